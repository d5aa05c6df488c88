"""Export a net in which modules that look at data are one op each, whose Python runs in every step.

h.1.norm  h.1.mlp: if len(rows) == 0: ..  h.2        -->        h.1.norm  OPAQUE(h.1.mlp)  h.2

A module whose Python looks at data ends an export. It then runs once on the example, and the export is repeated with an
op in its place, which reads its inputs and its own tensors. Outside the export this op calls the module, so its stage
runs under autograd, as any stage that cannot be traced. If the sizes of its inputs depend on data, its caller is taken.
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
from fpipe.graphs.tracing.marks import KEY
from fpipe.meaning.purity.attributes import AttributeSnapshot
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.models.exporting.export_net import double_single_rows, export_net
from fpipe.models.exporting.module_calls import NetFunction
from fpipe.models.exporting.source_locations import location_of_error, modules_called_in
from fpipe.torch_private.fx import depends_on_data, example_number, is_data_dependence

_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("opaque(Tensor[] given, Tensor[] held, str name) -> Tensor[]")


class OpaqueCall:
    """A call of a module on the example, which is an op in the exported graph.

    Arguments that are no tensors are the same in each step.
    """

    def __init__(self, path: str, module: nn.Module, args: Any, results: Any, flops: int) -> None:
        self.path, self.module, self.flops, self.exporting = path, module, flops, False
        self.names = [*_tensors_of(module)]
        (self.args, self.spec), (self.example_results, self.result_spec) = map(_without_data, (args, results))
        self.name = ""
        self.register()

    def register(self) -> None:
        """Register this call under a new name, by which its op finds it."""
        # Unique, so that a copy of a stage finds its own copy of the module.
        self.name = f"{self.path} {uuid4()}"
        _CALL_BY_NAME[self.name] = self

    def call_as_op(self, *args: Any, **kwargs: Any) -> Any:
        """Run the op in place of the module's forward, while the net is exported."""
        leaves = tree.leaves((args, kwargs))
        input_tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        # An op takes and returns tensors; sizes that depend on data have no number at the export.
        takes_size = any(isinstance(leaf, torch.SymInt) for leaf in leaves)
        returns_number = any(type(leaf) in (int, float, complex) for leaf in self.example_results)
        if (
            not input_tensors
            or takes_size
            or returns_number
            or any(depends_on_data(size) for leaf in input_tensors for size in leaf.shape)
        ):
            raise NotTensorFunction(self.path)
        tensors = iter(OPAQUE(input_tensors, [*_tensors_of(self.module).values()], self.name))
        return _with_tensors(self.example_results, self.result_spec, tensors)

    def empty_results(self, input_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Return empty tensors like the results on the example, with the symbolic sizes of these inputs."""
        examples = [leaf for leaf in self.example_results if isinstance(leaf, Tensor)]
        shapes = [
            [_symbolic_size(size, dim, leaf.ndim, input_tensors) for dim, size in enumerate(leaf.shape)]
            for leaf in examples
        ]
        return [input_tensors[0].new_empty(shape, dtype=x.dtype) for shape, x in zip(shapes, examples, strict=True)]

    def run(self, input_tensors: Sequence[Tensor], module_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call the module on input tensors, with these tensors as its parameters and buffers."""
        args, kwargs = _with_tensors(self.args, self.spec, iter(input_tensors))
        tensor_by_name = dict(zip(self.names, module_tensors, strict=True))
        results, spec = tree.flatten(torch.func.functional_call(self.module, tensor_by_name, args, kwargs))
        self._refuse_other_results(results, spec, input_tensors)
        return [leaf for leaf in results if isinstance(leaf, Tensor)]

    def _refuse_other_results(self, results: Sequence[Any], spec: tree.Spec, input_tensors: Sequence[Tensor]) -> None:
        """Raise StepChanged if structure, sizes or non-tensors differ from the example: the graph has them baked in."""
        examples = [example for example in self.args if isinstance(example, Tensor)]
        pairs = zip(examples, input_tensors, strict=True)
        # Pairs of a size in the example and now: a result may change its sizes along with its inputs'.
        sizes = {size_pair for example, tensor in pairs for size_pair in zip(example.shape, tensor.shape, strict=True)}
        if spec != self.result_spec or not all(map(partial(_matches_example, sizes), results, self.example_results)):
            raise StepChanged(
                f"{self.path!r} returned {_describe(results)}, but {_describe(self.example_results)} at the export. "
                "Only tensors may change, in sizes of its inputs."
            )


class NotTensorFunction(Exception):
    """A module that is no function of tensors whose shapes are known at the export."""


_CALL_BY_NAME: WeakValueDictionary[str, OpaqueCall] = WeakValueDictionary()
"""Calls by the name in their op. Weak: a call lives as long as a stage that runs it."""


def _run_opaque(input_tensors: list[Tensor], module_tensors: list[Tensor], name: str) -> list[Tensor]:
    call = _CALL_BY_NAME[name]
    return call.empty_results(input_tensors) if call.exporting else call.run(input_tensors, module_tensors)


_LIBRARY.impl("opaque", _run_opaque, "CompositeImplicitAutograd")
OPAQUE: Any = torch.ops.fpipe.opaque.default
"""The op that stands for a module in a graph."""


def opaque_call_of(node: fx.Node) -> OpaqueCall:
    """Return the call that a node stands for."""
    return _CALL_BY_NAME[str(node.args[2])]


def opaque_calls_of(graph: fx.Graph) -> list[OpaqueCall]:
    """Return the opaque calls in a graph, which the owner of the graph has to keep alive."""
    return [opaque_call_of(node) for node in graph.find_nodes(op="call_function", target=OPAQUE)]


def rename_calls(module: fx.GraphModule, calls: Sequence[OpaqueCall]) -> None:
    """Let the ops of a copied graph find the copies of their calls."""
    for node, call in zip(module.graph.find_nodes(op="call_function", target=OPAQUE), calls, strict=True):
        call.register()
        node.args = (*node.args[:2], call.name)
    module.recompile()


class Exported(NamedTuple):
    """An exported program, its opaque calls, and for each module the reason why it is one."""

    program: ExportedProgram
    calls: Sequence[OpaqueCall] = ()
    explanations: Sequence[str] = ()


def export_with_opaque_modules(net: nn.Module, inputs: Any) -> Exported:
    """Export a module, with an op for each inner module whose Python looks at data.

    Raises:
        ValueError: torch cannot export it even so; why, and in which line.
    """
    inputs, named_modules = double_single_rows(inputs), [*net.named_modules()]
    first_error, location_by_path = None, dict[str, str]()
    # Each round takes one more module out of the graph: the innermost one that was running when the export failed. An
    # outer module that is taken replaces those inside it, so this ends at the net itself.
    while True:
        calls = _record_calls(net, inputs, location_by_path) if location_by_path else []
        try:
            with _replace_forwards(calls):
                exported = export_net(net, inputs)
        except ValueError as error:
            first_error, cause = first_error or error, error.__cause__ or error
            needs_data = isinstance(cause, NotTensorFunction) or is_data_dependence(cause)
            callers = [
                path for path, _ in modules_called_in(cause, named_modules) if path and path not in location_by_path
            ]
            if not needs_data or not callers:
                raise first_error from first_error.__cause__
            path = callers[-1]
            if any(leaf.is_meta for leaf in (*tree.leaves(inputs), *net.parameters()) if isinstance(leaf, Tensor)):
                raise ValueError(
                    f"{first_error}\nThe Python of {path!r} looks at data, which tensors on meta lack: cut the net "
                    "with values."
                ) from first_error.__cause__
            location = next(
                (location for inner_path, location in location_by_path.items() if inner_path.startswith(f"{path}.")), ""
            )
            location_by_path = {
                other_path: location
                for other_path, location in location_by_path.items()
                if not other_path.startswith(f"{path}.")
            }
            location_by_path[path] = location or location_of_error(cause, named_modules)
            continue
        consequence = "looks at data, so it is one operation of its stage, which runs under autograd"
        notes = [f"The Python of {path!r} {consequence}.{location}" for path, location in location_by_path.items()]
        return Exported(exported, calls, notes)


def _record_calls(net: nn.Module, inputs: Any, paths: Iterable[str]) -> list[OpaqueCall]:
    """Run the net once on its inputs, and return the calls of these modules, with their flops."""
    records = list[tuple[str, nn.Module, Any, Any]]()

    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        records.append((path, module, (args, kwargs), output))

    params = {name: parameter.detach() for name, parameter in net.named_parameters()}
    attributes = AttributeSnapshot([*net.named_modules()], with_containers=True)
    with ExitStack() as stack, torch.no_grad(), FlopCounterMode(display=False) as counter:
        for path in paths:
            module = net.get_submodule(path)
            stack.callback(module.register_forward_hook(partial(record, path), with_kwargs=True).remove)
        stack.callback(attributes.restore)
        NetFunction(net, lambda output, _: output, ())(params, (inputs, None), KEY, 0)
    counts, root = counter.get_flop_counts(), type(net).__name__
    # FlopCounterMode counts by path: divide by the calls of the module.
    recorded_paths = [path for path, _, _, _ in records]
    flops = {
        path: sum(counts.get(f"{root}.{path}", {}).values()) // recorded_paths.count(path) for path in recorded_paths
    }
    return [OpaqueCall(path, module, args, output, flops[path]) for path, module, args, output in records]


@contextmanager
def _replace_forwards(calls: Sequence[OpaqueCall]) -> Generator[None]:
    """Replace the forward of each module by the ops of its calls, in order."""
    modules = {call.path: call.module for call in calls}
    old_forwards = {path: vars(module).get("forward") for path, module in modules.items()}

    def next_call(remaining_calls: Iterator[OpaqueCall], *args: Any, **kwargs: Any) -> Any:
        return next(remaining_calls).call_as_op(*args, **kwargs)

    for path, module in modules.items():
        vars(module)["forward"] = partial(next_call, cycle([call for call in calls if call.path == path]))
    for call in calls:
        call.exporting = True
    try:
        yield
    finally:
        for path, module in modules.items():
            del vars(module)["forward"]
            vars(module).update({} if old_forwards[path] is None else {"forward": old_forwards[path]})
        for call in calls:
            call.exporting = False


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _matches_example(sizes: set[tuple[int, int]], leaf: Any, example: Any) -> bool:
    """Whether a result matches its example, where a size may change as an input size did that was equal to it."""
    if not isinstance(leaf, Tensor) or not isinstance(example, Tensor):
        return repr(leaf) == repr(example)
    pairs = zip(example.shape, leaf.shape, strict=False)
    return leaf.ndim == example.ndim and all(expected == size or (expected, size) in sizes for expected, size in pairs)


def _describe(leaves: Sequence[Any]) -> str:
    return ", ".join(f"a tensor {tuple(x.shape)}" if isinstance(x, Tensor) else repr(x) for x in leaves) or "nothing"


def _without_data(values: Any) -> tuple[list[Any], tree.Spec]:
    leaves, spec = tree.flatten(values)
    return [leaf.detach().to("meta") if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec


def _with_tensors(leaves: Iterable[Any], spec: tree.Spec, tensors: Iterator[Tensor]) -> Any:
    """Unflatten leaves, with these tensors in place of those without data."""
    return tree.unflatten(spec, [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in leaves])


def _symbolic_size(size: int, dim: int, ndim: int, input_tensors: Sequence[Tensor]) -> Any:
    """Return the symbolic size of an input that equals a result's size: of the same dimension if possible, or any."""
    # Two symbolic sizes may have one number in the example: the same dimension is the better guess.
    same_dim_sizes = [tensor.shape[dim] for tensor in input_tensors if tensor.ndim == ndim]
    symbolic_sizes = [size for tensor in input_tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    return next((option for option in (*same_dim_sizes, *symbolic_sizes) if example_number(option) == size), size)
