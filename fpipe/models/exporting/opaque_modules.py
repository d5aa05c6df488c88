"""Export a net around modules that look at data: each is one operation, whose Python runs in every step.

h.1.norm  h.1.mlp: if len(rows) == 0: ..  h.2        -->        h.1.norm  OPAQUE(h.1.mlp)  h.2

A module that ends an export since its Python looks at data runs once on the example, and is then an operation of what
it takes and of its own tensors. Outside of the export this calls the module, so its stage runs as any that cannot be
traced. Where what it takes has sizes that depend on data, it is the module that calls it that is taken.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple
from uuid import uuid4
from weakref import WeakValueDictionary

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from fpipe import tree
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.models.tracing.boundary import KEY
from fpipe.models.tracing.export_net import export_net, two_rows
from fpipe.models.tracing.module_calls import NetFunction
from fpipe.models.tracing.places import modules_in, place_of_error
from fpipe.torch_private.fx import example_number, looked_at_data, of_data

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("opaque(Tensor[] given, Tensor[] held, str name) -> Tensor[]")


class OpaqueCall:
    """A call of a module on the example, and the operation that stands for it. Arguments that are no tensors are the
    same in each step."""

    def __init__(self, path: str, module: nn.Module, args: Any, made: Any, flops: int) -> None:
        self.path, self.module, self.flops, self.exporting = path, module, flops, False
        self.names = [*_held(module)]
        (self.args, self.spec), (self.made, self.made_spec) = map(_without_data, (args, made))
        self.name = ""
        self.register()

    def register(self) -> None:
        """Take a name, by which its operation finds it."""
        self.name = f"{self.path} {uuid4()}"
        _CALLS[self.name] = self

    def stand_in(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward while the net is exported."""
        leaves = tree.leaves((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        takes_size = any(isinstance(leaf, torch.SymInt) for leaf in leaves)
        returns_number = any(type(leaf) in (int, float, complex) for leaf in self.made)
        if not given or takes_size or returns_number or any(of_data(size) for leaf in given for size in leaf.shape):
            raise NotAlone(self.path)
        tensors = iter(OPAQUE(given, [*_held(self.module).values()], self.name))
        return _with_tensors(self.made, self.made_spec, tensors)

    def abstract(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Tensors as it returned them, with the open sizes of what it is given."""
        made = [leaf for leaf in self.made if isinstance(leaf, Tensor)]
        shapes = [[_open(size, dim, leaf.ndim, given) for dim, size in enumerate(leaf.shape)] for leaf in made]
        return [given[0].new_empty(shape, dtype=leaf.dtype) for shape, leaf in zip(shapes, made, strict=True)]

    def run(self, given: Sequence[Tensor], held: Sequence[Tensor]) -> list[Tensor]:
        """Call the module on tensors."""
        args, kwargs = _with_tensors(self.args, self.spec, iter(given))
        named = dict(zip(self.names, held, strict=True))
        results, spec = tree.flatten(torch.func.functional_call(self.module, named, args, kwargs))
        self._refuse_other(results, spec, given)
        return [leaf for leaf in results if isinstance(leaf, Tensor)]

    def _refuse_other(self, results: Sequence[Any], spec: tree.Spec, given: Sequence[Tensor]) -> None:
        """Raise StepChanged for another structure, size or non-tensor than the export was told: it is in the graph."""
        examples = [example for example in self.args if isinstance(example, Tensor)]
        tensors = zip(examples, given, strict=True)
        sizes = {pair for example, now in tensors for pair in zip(example.shape, now.shape, strict=True)}
        if spec != self.made_spec or not all(map(partial(_is_as_told, sizes), results, self.made)):
            raise StepChanged(
                f"{self.path!r} returned {_shown(results)}, and {_shown(self.made)} when the net was exported; what "
                "follows is traced for that. Sizes are those of what it takes; return what changes as a tensor."
            )


_NUMBERS = (int, float, complex)


class NotAlone(Exception):
    """A module that is no operation of tensors of known shapes."""


_CALLS: WeakValueDictionary[str, OpaqueCall] = WeakValueDictionary()
"""Calls by the name that their operations have; stages hold them."""


def _opaque(given: list[Tensor], held: list[Tensor], name: str) -> list[Tensor]:
    call = _CALLS[name]
    return call.abstract(given) if call.exporting else call.run(given, held)


_LIBRARY.impl("opaque", _opaque, "CompositeImplicitAutograd")
OPAQUE: Any = torch.ops.fpipe.opaque.default
"""The operation that a module is in a graph."""


def call_of_node(node: fx.Node) -> OpaqueCall:
    """The call that an operation stands for."""
    return _CALLS[str(node.args[2])]


def own_calls(graph: fx.Graph) -> list[OpaqueCall]:
    """The calls in a graph, which have to be held as long as it is."""
    return [call_of_node(node) for node in graph.find_nodes(op="call_function", target=OPAQUE)]


def rename_calls(module: fx.GraphModule, calls: Sequence[OpaqueCall]) -> None:
    """Let a copy of a graph find its own copies of the calls."""
    for node, call in zip(module.graph.find_nodes(op="call_function", target=OPAQUE), calls, strict=True):
        call.register()
        node.args = (*node.args[:2], call.name)
    module.recompile()


class Exported(NamedTuple):
    """An exported program, the calls of modules that it has as operations, and why, in words."""

    program: ExportedProgram
    calls: Sequence[OpaqueCall] = ()
    words: Sequence[str] = ()


def export_around(net: nn.Module, inputs: Any) -> Exported:
    """Export a module, with those modules in it as operations whose Python looks at data.

    Raises:
        ValueError: torch cannot export it otherwise either; why, and in which line.
    """
    inputs, named = two_rows(inputs), [*net.named_modules()]
    first, taken = None, dict[str, str]()
    while True:
        calls = _recorded(net, inputs, taken) if taken else []
        try:
            with _standing_in(calls):
                exported = export_net(net, inputs)
        except ValueError as error:
            first, cause = first or error, error.__cause__ or error
            needs_data = isinstance(cause, NotAlone) or looked_at_data(cause)
            callers = [path for path, _ in modules_in(cause, named) if path and path not in taken]
            if not needs_data or not callers:
                raise first from first.__cause__
            path = callers[-1]
            if any(leaf.is_meta for leaf in (*tree.leaves(inputs), *net.parameters()) if isinstance(leaf, Tensor)):
                raise ValueError(
                    f"{first}\nThe Python of {path!r} looks at data, and a net or an example on meta has none: cut the "
                    "net where both have values, and the module is one operation of its stage."
                ) from first.__cause__
            place = next((place for inner, place in taken.items() if inner.startswith(f"{path}.")), "")
            taken = {outer: place for outer, place in taken.items() if not outer.startswith(f"{path}.")}
            taken[path] = place or place_of_error(cause, named)
            continue
        said = "looks at data, so it is one operation of its stage, which runs under autograd"
        return Exported(exported, calls, [f"The Python of {path!r} {said}.{place}" for path, place in taken.items()])


def _recorded(net: nn.Module, inputs: Any, paths: Iterable[str]) -> list[OpaqueCall]:
    """The calls of these modules when the net runs on its inputs."""
    seen = list[tuple[str, nn.Module, Any, Any]]()

    def note(path: str, module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        seen.append((path, module, (args, kwargs), made))

    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    with ExitStack() as stack, torch.no_grad(), FlopCounterMode(display=False) as counter:
        for path in paths:
            module = net.get_submodule(path)
            stack.callback(module.register_forward_hook(partial(note, path), with_kwargs=True).remove)
        NetFunction(net, lambda made, _: made, ())(params, (inputs, None), KEY, 0)
    counts, root = counter.get_flop_counts(), type(net).__name__
    times = [path for path, _, _, _ in seen]
    flops = {path: sum(counts.get(f"{root}.{path}", {}).values()) // times.count(path) for path in times}
    return [OpaqueCall(path, module, args, made, flops[path]) for path, module, args, made in seen]


@contextmanager
def _standing_in(calls: Sequence[OpaqueCall]) -> Generator[None]:
    """Let the modules of these calls be operations."""
    modules = {call.path: call.module for call in calls}
    before = {path: vars(module).get("forward") for path, module in modules.items()}

    def next_call(turns: Iterator[OpaqueCall], *args: Any, **kwargs: Any) -> Any:
        return next(turns).stand_in(*args, **kwargs)

    for path, module in modules.items():
        vars(module)["forward"] = partial(next_call, cycle([call for call in calls if call.path == path]))
    for call in calls:
        call.exporting = True
    try:
        yield
    finally:
        for path, module in modules.items():
            del vars(module)["forward"]
            vars(module).update({} if before[path] is None else {"forward": before[path]})
        for call in calls:
            call.exporting = False


def _held(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _is_as_told(sizes: set[tuple[int, int]], leaf: Any, made: Any) -> bool:
    """Whether a result is as in the example, its sizes as those that had the same size there are now."""
    if not isinstance(leaf, Tensor) or not isinstance(made, Tensor):
        return repr(leaf) == repr(made)
    pairs = zip(made.shape, leaf.shape, strict=False)
    return leaf.ndim == made.ndim and all(told == now or (told, now) in sizes for told, now in pairs)


def _shown(leaves: Sequence[Any]) -> str:
    return ", ".join(f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in leaves) or "nothing"


def _without_data(values: Any) -> tuple[list[Any], tree.Spec]:
    leaves, spec = tree.flatten(values)
    return [leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def _with_tensors(leaves: Iterable[Any], spec: tree.Spec, tensors: Iterator[Tensor]) -> Any:
    """Put tensors into containers, in the places of those without data."""
    return tree.unflatten(spec, [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _open(size: int, dim: int, ndim: int, given: Sequence[Tensor]) -> Any:
    """The size of a result as an argument has it in the same dimension, or else as an open size of any argument."""
    same = [tensor.shape[dim] for tensor in given if tensor.ndim == ndim]
    opened = [size for tensor in given for size in tensor.shape if isinstance(size, torch.SymInt)]
    return next((candidate for candidate in (*same, *opened) if example_number(candidate) == size), size)
