"""Trace, write, measure and store graphs of torch's operations, as they run or above autograd."""

from __future__ import annotations

import importlib
import io
import logging
import warnings
from collections.abc import Callable, Generator, Sequence
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


def traced_above_autograd(function: Callable[..., Any], tensors: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function with the ops that autograd sees (2.13: `make_fx`, whose module takes long to import)."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, pre_dispatch=True)(*tensors)


def traced_by_torch(function: Callable[..., Any], fakes: Sequence[Tensor]) -> fx.GraphModule:
    """Trace a function of tensors on fake ones; it may hold on to real ones (2.13: `make_fx`)."""
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(function, tracing_mode="fake", _allow_non_fake_inputs=True)(*fakes)


def calls_so_far() -> int:
    """How many ops the trace that is going on has seen (2.13: `get_proxy_mode`)."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode: Any = get_proxy_mode()
    return sum(node.op == "call_function" for node in mode.tracer.graph.nodes)


@contextmanager
def unnoticed() -> Generator[None]:
    """Without what tells Python that make_fx watches: attention that wants no gradient runs as one op of its own, and
    would write its steps out instead (2.13: `_is_make_fx_tracing`). What make_fx's mode for functions notes is only for
    people to read (2.13: `_temp_remove_metadata_torch_function_mode`)."""
    from torch.fx.experimental import proxy_tensor
    from torch.nn.modules import activation

    watching: Any = proxy_tensor
    attention: Any = activation
    before, attention._is_make_fx_tracing = attention._is_make_fx_tracing, lambda: False
    try:
        with watching._temp_remove_metadata_torch_function_mode():
            yield
    finally:
        attention._is_make_fx_tracing = before


@contextmanager
def without_compiled_functions() -> Generator[None]:
    """A function of torch.compile refuses to run, as in make_fx: its kernels would read memory that is not there (a
    flag of a module up to 2.13, of a thread in 2.15)."""
    from torch.fx import _symbolic_trace

    place = getattr(_symbolic_trace, "_is_fx_tracing_tls", _symbolic_trace)
    name = "_is_fx_tracing_flag" if place is _symbolic_trace else "flag"
    before = getattr(place, name, False)
    setattr(place, name, True)
    try:
        yield
    finally:
        setattr(place, name, before)


def undecided_branch() -> type[Exception]:
    """The error of a trace where Python branches on a number that it computes (2.13: `GuardOnDataDependentSymNode`)."""
    from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

    return GuardOnDataDependentSymNode


def looked_at_data(error: BaseException) -> bool:
    """Whether a trace has ended since it cannot know a number or a shape (2.13: errors of fake tensors)."""
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException

    kinds = (undecided_branch(), DataDependentOutputException, DynamicOutputShapeException)
    found: BaseException | None = error
    while found is not None and not isinstance(found, kinds):
        found = found.__cause__ or found.__context__
    return found is not None


def of_data(size: Any) -> bool:
    """Whether a size depends on data (2.13: `free_unbacked_symbols`)."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(size))


def dump_graph(module: fx.GraphModule) -> bytes:
    """Pickle a graph with the fake tensors in its meta (2.13: `torch.fx._graph_pickler`)."""
    from torch.fx import _graph_pickler as pickler  # it brings torch's compiler, which takes a while to import

    graphs: Any = pickler
    return graphs.GraphPickler.dumps(module, graphs.Options(ops_filter=None))


def load_graph(data: bytes) -> fx.GraphModule:
    """Load a graph that `dump_graph` has pickled, with fake tensors of a mode of its own (2.13)."""
    from torch._subclasses import FakeTensorMode
    from torch.fx import _graph_pickler as pickler
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    graphs: Any = pickler
    module = graphs.GraphPickler.loads(data, FakeTensorMode(shape_env=ShapeEnv()))
    module.recompile()
    return module


def open_mode() -> Any:
    """Make tensors without data whose open sizes have a symbol each: as many rows in the example are no reason to be as
    many in a step (2.13: `FakeTensorMode` with a `ShapeEnv`)."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(specialize_zero_one=False, duck_shape=False)
    return FakeTensorMode(shape_env=sizes, allow_non_fake_inputs=True)


def fake_like(mode: Any, tensor: Tensor, rows: bool) -> Tensor:
    """A tensor without data in the place of one, its number of rows open or not (2.13: symbolic contexts)."""
    from torch.fx.experimental.symbolic_shapes import DimDynamic, StatelessSymbolicContext

    each = [DimDynamic.STATIC] * tensor.ndim
    if rows:
        each[0] = DimDynamic.DYNAMIC
    return mode.from_tensor(tensor.detach(), symbolic_context=StatelessSymbolicContext(dynamic_sizes=each))


def expression(size: Any) -> Any:
    """The expression of an open size, in sympy (2.13: `SymInt.node.expr`)."""
    return size.node.expr


def example_number(size: Any) -> int:
    """An open size as it was in the example of its trace (2.13: `SymInt.node.hint`)."""
    return size if isinstance(size, int) else int(size.node.hint or 1)


def has_floor(expr: Any) -> bool:
    """Whether an expression rounds a quotient to an integer, for which torch has no code (2.13)."""
    from torch.utils._sympy.functions import CeilToInt, FloorToInt

    return expr.has(CeilToInt, FloorToInt)


def computed(expr: Any, known: dict[Any, Any]) -> Any:
    """Compute an expression of symbols as Python does, on proxies of a graph (2.13: `sympy_interp`)."""
    from torch.utils._sympy.interp import sympy_interp
    from torch.utils._sympy.reference import PythonReferenceAnalysis

    return sympy_interp(PythonReferenceAnalysis, known, expr)


def environment(size: Any) -> Any:
    """The ShapeEnv of the trace that an open size is of (2.13: `SymInt.node.shape_env`)."""
    return size.node.shape_env


def guards_of(sizes: Any) -> tuple[Any, ...]:
    """The conditions on open sizes by which a traced function has decided, not torch, from the ShapeEnv of its trace
    (2.13: `ShapeEnv.guards`, and of each its `sloc.framework_loc`, the innermost line that is not torch's).

    Sizes that the function compared as equal have one symbol from then on, and no condition.
    """
    asked = (sizes.replace(guard.expr) for guard in sizes.guards if _is_functions(guard.sloc.framework_loc))
    return tuple(expr for expr in dict.fromkeys(asked) if expr.free_symbols)


def _is_functions(where: Any) -> bool:
    return where is None or not Path(where.filename).is_relative_to(Path(torch.__file__).parent)


# Read what `torch.export` writes into a graph: calls of graphs in other contexts, vmap, paths of modules.

_HIGHER: Any = torch.ops.higher_order
GRAPH_CALLS: dict[Any, int] = {_HIGHER.wrap_with_set_grad_enabled: 1, _HIGHER.wrap_with_autocast: 4}
"""The ops that call a graph with gradients off, say, or under autocast, each with the number of its settings, which
come before the graph (2.13)."""
NO_MODULE = "_empty_nn_module_stack_from_metadata_hook"
"""The path in `nn_module_stack` of a node whose module is not known (2.13)."""


def is_of_vmap(node: fx.Node) -> bool:
    """Whether a node enters or leaves torch.vmap (2.13: a function of `torch._functorch.predispatch`)."""
    return getattr(node.target, "__module__", None) == "torch._functorch.predispatch"


def call_trees(exported: ExportedProgram, given: Sequence[Any], results: Sequence[Any]) -> tuple[Any, Any]:
    """The arguments and the result of a call, as trees of these leaves (2.13: of `torch.utils._pytree`)."""
    in_spec: Any = exported.call_spec.in_spec
    out_spec: Any = exported.call_spec.out_spec
    return _pytree.tree_unflatten(given, in_spec), _pytree.tree_unflatten(results, out_spec)


def import_export() -> None:
    """Import what `torch.export` imports when it is first called, 1,300 modules (2.13)."""
    importlib.import_module("torch.export._trace")


@contextmanager
def quiet_export() -> Generator[None]:
    """Without the graph that torch prints where an export ends in an error. A tensor that a module remembers in a plain
    attribute is an error, but for the lists that an RNN has of its weights (2.13: the words of a warning)."""
    log = logging.getLogger("torch.fx.experimental.symbolic_shapes")
    before = log.disabled
    log.disabled = True
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.filterwarnings("error", "The tensor attributes? .* assigned during export", UserWarning)
            warnings.filterwarnings("ignore", r"The tensor attributes? \S*_flat_weights", UserWarning)
            yield
    finally:
        log.disabled = before
