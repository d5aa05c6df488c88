"""Trace functions to graphs of torch's ops, store graphs, and read symbolic sizes and exported programs."""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.utils import _pytree  # pyright: ignore[reportPrivateUsage]

_C: Any = torch._C  # pyright: ignore[reportPrivateUsage]
_AMP: Any = torch.amp.autocast_mode

SET_GRAD: Any = _C._set_grad_enabled
"""The target of a node that switches gradients on or off (2.13)."""
ENTER_AUTOCAST: Any = _AMP._enter_autocast
"""The target of a node that enters autocast: device, dtype, whether it is on, whether it caches (2.13)."""
EXIT_AUTOCAST: Any = _AMP._exit_autocast
"""The target of a node that leaves the autocast which its argument entered (2.13)."""


def trace_above_autograd(function: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function to the ops that autograd sees (2.13: `make_fx`, whose module takes long to import)."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, pre_dispatch=True)(*tensors)


def trace_on_fakes(function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function on fake tensors; it may hold on to real ones (2.13: `make_fx`)."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)


def count_traced_ops() -> int:
    """Return how many ops the current trace has seen so far (2.13: `get_proxy_mode`)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return sum(node.op == "call_function" for node in mode.tracer.graph.nodes)


@contextmanager
def hide_make_fx() -> Generator[None]:
    """Hide from Python that make_fx traces, so that modules do the same as without it (2.13)."""
    # Attention without gradients runs as one fused op, and in parts if `_is_make_fx_tracing` says so. The other is
    # make_fx's mode for torch functions, whose notes are only for people to read.
    from torch.fx.experimental import proxy_tensor
    from torch.nn.modules import activation

    proxy_module: Any = proxy_tensor
    attention: Any = activation
    original, attention._is_make_fx_tracing = attention._is_make_fx_tracing, lambda: False
    try:
        with proxy_module._temp_remove_metadata_torch_function_mode():
            yield
    finally:
        attention._is_make_fx_tracing = original


@contextmanager
def as_in_make_fx() -> Generator[None]:
    """Let torch believe that a graph is traced, so that nested tensors refuse: fake ones end the process (2.13)."""
    # The flag is of a module up to 2.13, of a thread in 2.15.
    from torch.fx import _symbolic_trace

    flag_owner = getattr(_symbolic_trace, "_is_fx_tracing_tls", _symbolic_trace)
    name = "_is_fx_tracing_flag" if flag_owner is _symbolic_trace else "flag"
    original = getattr(flag_owner, name, False)
    setattr(flag_owner, name, True)
    try:
        yield
    finally:
        setattr(flag_owner, name, original)


def undecided_branch_error() -> type[Exception]:
    """Return the error of a trace whose Python branches on computed data (2.13: `GuardOnDataDependentSymNode`)."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def is_data_dependence(error: BaseException) -> bool:
    """Whether an error of a trace comes from a number or shape that depends on data (2.13: errors of fake tensors)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    kinds = (undecided_branch_error(), DataDependentOutputException, DynamicOutputShapeException)
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, kinds):
        cause = cause.__cause__ or cause.__context__
    return cause is not None


def depends_on_data(size: Any) -> bool:
    """Whether a size depends on data (2.13: `free_unbacked_symbols`)."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def dump_graph(module: fx.GraphModule) -> bytes:
    """Pickle a graph with the fake tensors in its meta (2.13: `torch.fx._graph_pickler`)."""
    from torch.fx import _graph_pickler as pickler  # it brings torch's compiler, which takes a while to import

    graphs: Any = pickler
    return graphs.GraphPickler.dumps(module, graphs.Options(ops_filter=None))


def load_graph(pickled: bytes) -> fx.GraphModule:
    """Load a graph that `dump_graph` has pickled, with a new mode for its fake tensors (2.13)."""
    from torch._subclasses import FakeTensorMode
    from torch.fx import _graph_pickler as pickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graphs: Any = pickler
    module = graphs.GraphPickler.loads(pickled, FakeTensorMode(shape_env=ShapeEnv()))
    module.recompile()
    return module


def open_fake_mode() -> Any:
    """Return a mode for fake tensors with open sizes (2.13: `FakeTensorMode` with a `ShapeEnv`)."""
    # No duck shapes: two sizes that are equal in the example need not be equal in a step. No specialisation of 0 and 1.
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    return FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)


def make_fake(mode: Any, tensor: Tensor, rows_are_open: bool) -> Tensor:
    """Return a fake tensor like a tensor, whose number of rows is open or fixed (2.13: symbolic contexts)."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    dynamic_sizes = [DimDynamic.STATIC] * tensor.ndim
    if rows_are_open:
        dynamic_sizes[0] = DimDynamic.DYNAMIC
    return mode.from_tensor(tensor.detach(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dynamic_sizes))


def sympy_expression(size: Any) -> Any:
    """Return the sympy expression of an open size (2.13: `SymInt.node.expr`)."""
    return size.node.expr


def example_number(size: Any) -> int:
    """Return the number that an open size has in the example of its trace (2.13: `SymInt.node.hint`)."""
    return int(size.node.hint or 1) if isinstance(size, torch.SymInt) else size


def has_floor(expr: Any) -> bool:
    """Whether an expression rounds a quotient to an integer, for which torch has no code (2.13)."""
    from torch.utils._sympy.functions import CeilToInt, FloorToInt

    return expr.has(CeilToInt, FloorToInt)


def evaluate_expression(expr: Any, value_by_symbol: dict[Any, Any]) -> Any:
    """Evaluate an expression with a value, or a proxy of a graph, for each symbol (2.13: `sympy_interp`)."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, value_by_symbol, expr)


def unique_symbols(symbols: Iterable[Any]) -> dict[Any, Any]:
    """Return a new symbol for each symbol; torch gives symbols of different traces equal names (2.13)."""
    import sympy  # pyright: ignore[reportMissingTypeStubs]

    return {symbol: sympy.Dummy(symbol.name, integer=True, positive=True) for symbol in symbols}


def rename_symbols(expr: Any, new_symbols: Mapping[Any, Any]) -> Any:
    """Return an expression with new symbols."""
    return expr.xreplace(new_symbols)


def shape_env_of(size: Any) -> Any:
    """Return the ShapeEnv of the trace that made an open size (2.13: `SymInt.node.shape_env`)."""
    return size.node.shape_env


def guards_of(sizes: Any) -> tuple[Any, ...]:
    """Return the conditions on open sizes that the traced function, not torch, has branched on (2.13).

    Sizes that the function compared as equal have one symbol from then on, and no condition. `sizes` is the ShapeEnv of
    the trace; `sloc.framework_loc` of a guard is the innermost line that is not torch's.
    """
    guard_exprs = (sizes.replace(guard.expr) for guard in sizes.guards if _is_functions(guard.sloc.framework_loc))
    return tuple(expr for expr in dict.fromkeys(guard_exprs) if expr.free_symbols)


def _is_functions(frame: Any) -> bool:
    return frame is None or not Path(frame.filename).is_relative_to(Path(torch.__file__).parent)


# Read graphs of `torch.export`: calls of graphs in other contexts, vmap, paths of modules.

_HIGHER: Any = torch.ops.higher_order
GRAPH_CALLS: dict[Any, int] = {_HIGHER.wrap_with_set_grad_enabled: 1, _HIGHER.wrap_with_autocast: 4}
"""The ops that call a graph with gradients on or off, or under autocast, and how many settings come first (2.13)."""
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""The path in `nn_module_stack` of a node whose module is not known (2.13)."""


def is_of_vmap(node: fx.Node) -> bool:
    """Whether a node enters or leaves torch.vmap (2.13: a function of `torch._functorch.predispatch`)."""
    return getattr(node.target, "__module__", None) == "torch._functorch.predispatch"


def call_trees(exported: ExportedProgram, arguments: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
    """Return the arguments and the result of an exported call, built of these leaves (2.13: `torch.utils._pytree`)."""
    in_spec: Any = exported.call_spec.in_spec
    out_spec: Any = exported.call_spec.out_spec
    return _pytree.tree_unflatten(arguments, in_spec), _pytree.tree_unflatten(results, out_spec)


def import_export() -> None:
    """Import the 1,300 modules that `torch.export` needs at its first call (2.13)."""
    importlib.import_module("torch.export._trace")


@contextmanager
def silence_export() -> Generator[None]:
    """Export without the graph that torch prints on an error; an assigned tensor attribute is an error (2.13)."""
    # Torch only warns of a module that keeps a tensor in a plain attribute. RNNs do so with lists of their weights.
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    was_disabled = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("error", "The tensor attributes? .* assigned during export", UserWarning)
            warnings.filterwarnings("ignore", r"The tensor attributes? \S*_flat_weights", UserWarning)
            yield
    finally:
        log.disabled = was_disabled


# Open sizes of a trace that is made by fpipe's own fake mode.


def new_symbols() -> Any:
    """Return an empty set of symbols with guards: sizes of 0 and 1 have none (2.13: `ShapeEnv`)."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return ShapeEnv(duck_shape=False)


def new_symbol(shape_env: Any, name: str, example: int) -> Any:
    """Return a new symbol for a size that is at least 2, as a sympy expression (2.13: `create_symbol`)."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    return shape_env.create_symbol(example, ConstantSource(name), dynamic_dim=DimDynamic.DYNAMIC)


def open_size(shape_env: Any, expr: Any, example: int) -> Any:
    """Return the open size of an expression (2.13: `create_symintnode`)."""
    return shape_env.create_symintnode(expr, hint=example)


def noted_guards(shape_env: Any) -> tuple[Any, ...]:
    """Return all conditions on symbols under which a trace holds (2.13: `ShapeEnv.guards`)."""
    return tuple(dict.fromkeys(guard.expr for guard in shape_env.guards))


def fixes_symbol(guard: Any) -> bool:
    """Whether a condition holds for one size alone, such as of a size that Python read as a number."""
    return guard.is_Relational and guard.rel_op == "==" and len(guard.free_symbols) == 1


def is_expression(x: Any) -> bool:
    """Whether something is an expression of symbols."""
    return type(x).__module__.startswith(("sympy.", "torch.utils._sympy")) if type(x) not in _PLAIN else False


_PLAIN = (int, float, bool, str, type(None), torch.dtype, torch.device)
