"""Export a net in which modules that no graph contains are one op each, whose Python runs in its stage.

h.1.norm  h.1.mlp: if len(rows) == 0: ..  h.2        -->        h.1.norm  OPAQUE(h.1.mlp)  h.2

A module whose Python looks at data, takes a derivative or calls an op that torch does not export ends an export. It
then runs once on the example, and the export is repeated with an op in its place, which reads its inputs and its own
tensors. Outside the export this op calls the module. If the sizes of its inputs depend on data, its caller is taken.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.utils.flop_counter import FlopCounterMode

from fpipe import tree
from fpipe.graphs.tracing.marks import KEY
from fpipe.meaning.purity.as_written import as_written
from fpipe.meaning.purity.attributes import AttributeSnapshot
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.models.exporting.export_net import double_single_rows, export_net, moved_to_meta, tensor_without_data
from fpipe.models.exporting.module_calls import NetFunction
from fpipe.models.exporting.net_graph import OutsideTrace, refuse_vmap
from fpipe.models.exporting.opaque_ops import (
    OPAQUE,
    Call,
    as_meta_leaves,
    register_call,
    with_tensors,
)
from fpipe.models.exporting.source_locations import location_of_error, modules_called_in
from fpipe.torch_internals import is_jagged_error
from fpipe.torch_private.fx import depends_on_data, example_number, is_data_dependence


class OpaqueCall:
    """A call of a module on the example, which is an op in the exported graph.

    Arguments that are no tensors are the same in each step.
    """

    def __init__(self, path: str, module: nn.Module, args: Any, results: Any) -> None:
        self.path, self.module, self.flops, self.exporting = path, module, 0, False
        self.names = [*_tensors_of(module)]
        (self.args, self.spec), (self.example_results, self.result_spec) = map(as_meta_leaves, (args, results))
        self.name = register_call(self, path)

    @property
    def module_by_path(self) -> dict[str, nn.Module]:
        """The module that it calls."""
        return {self.path: self.module}

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
        return with_tensors(self.example_results, self.result_spec, tensors)

    def results(self, operands: Sequence[Tensor], module_tensors: Sequence[Tensor]) -> list[Tensor]:
        """Run the module; during the export, return empty tensors."""
        return self.empty_results(operands) if self.exporting else self.run(operands, module_tensors)

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
        args, kwargs = with_tensors(self.args, self.spec, iter(input_tensors))
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


class Exported(NamedTuple):
    """An exported program, its opaque calls, and for each module the reason why it is one."""

    program: ExportedProgram
    calls: Sequence[Call] = ()
    explanations: Sequence[str] = ()


class _Reason(NamedTuple):
    """Why a module is one op: what its Python does, where, and the error that ended the export."""

    deed: str
    location: str
    error: ValueError


def export_with_opaque_modules(net: nn.Module, inputs: Any) -> Exported:
    """Export a module, with an op for each inner module whose Python no export contains.

    Raises:
        ValueError: torch cannot export it even so; why, and in which line.
    """
    inputs, named_modules = double_single_rows(inputs), [*net.named_modules()]
    reason_by_path = dict[str, _Reason]()
    # Each round takes one more module out of the graph: the innermost one that was running when the export failed. An
    # outer module that is taken replaces those inside it, so this ends at the net itself.
    while True:
        try:
            calls = _record_calls(net, inputs, reason_by_path) if reason_by_path else []
            with _replace_forwards(calls):
                exported = export_net(net, inputs)
            refuse_vmap(exported)
        except ValueError as error:
            cause = error.__cause__ or error
            running = [path for path, _ in modules_called_in(cause, named_modules)]
            running = [cause.path] if isinstance(cause, OutsideTrace) and cause.path else running
            callers = [path for path in running if path and path not in reason_by_path]
            # The error of a module inside is the one to show where its caller cannot be one op either.
            inside = [reason for path, reason in reason_by_path.items() if not callers or path.startswith(callers[-1])]
            first_error = inside[-1].error if isinstance(cause, NotTensorFunction) and inside else error
            deed = _deed_of(cause)
            if not deed or not callers:
                raise first_error from first_error.__cause__
            path, is_data = callers[-1], deed == _LOOKS_AT_DATA
            tensors = [leaf for leaf in (*tree.leaves(inputs), *net.parameters()) if isinstance(leaf, Tensor)]
            if is_data and any(leaf.is_meta for leaf in tensors):
                raise ValueError(
                    f"{first_error}\nThe Python of {path!r} looks at data, which tensors on meta lack: cut the net "
                    "with values."
                ) from first_error.__cause__
            inside = [reason for inner_path, reason in reason_by_path.items() if inner_path.startswith(f"{path}.")]
            location = getattr(cause, "location", "") or location_of_error(cause, named_modules)
            reason = inside[0] if inside else _Reason(deed, location, error)
            outside = {key: old for key, old in reason_by_path.items() if not key.startswith(f"{path}.")}
            reason_by_path = {**outside, path: reason}
            continue
        notes = [
            f"The Python of {path!r} {reason.deed}, so it is one operation of its stage.{reason.location}"
            for path, reason in reason_by_path.items()
        ]
        return Exported(exported, calls, notes)


_LOOKS_AT_DATA = "looks at data"


def _deed_of(cause: BaseException) -> str:
    """Describe the deed of a module that ended an export; empty if no op of a stage could do it either."""
    if isinstance(cause, NotTensorFunction) or is_data_dependence(cause):
        return _LOOKS_AT_DATA
    if isinstance(cause, OutsideTrace):
        return cause.deed
    # Errors of torch that are no refusals of fpipe, which are ValueErrors. The net then has to run on its example.
    if is_jagged_error(cause):
        return "makes a jagged nested tensor"
    if type(cause).__module__ == "torch._dynamo.exc":
        return "calls a higher-order op, such as FlexAttention or torch.cond"
    if isinstance(cause, RuntimeError | NotImplementedError | TypeError | AssertionError):
        line = next((line.strip() for line in str(cause).splitlines() if line.strip()), "").rstrip(".")
        return f"is not exported ({type(cause).__name__}: {line})"
    return ""


def _record_calls(net: nn.Module, inputs: Any, paths: Iterable[str]) -> list[OpaqueCall]:
    """Run the net once on its inputs, and return the calls of these modules, with their flops."""
    records = list[OpaqueCall]()

    # Now, and not after the run: a caller may change the containers that it was handed.
    def record(path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        records.append(OpaqueCall(path, module, (args, kwargs), output))

    def run(*contexts: Any) -> None:
        records.clear()
        with ExitStack() as stack:
            for path in paths:
                module = net.get_submodule(path)
                stack.callback(module.register_forward_hook(partial(record, path), with_kwargs=True).remove)
            stack.callback(AttributeSnapshot([*net.named_modules()], with_containers=True).restore)
            params = {name: parameter.detach() for name, parameter in net.named_parameters()}
            batch: Any = inputs, None
            if stack.enter_context(moved_to_meta(net)):
                params, batch = tree.tree_map(tensor_without_data, (params, batch))
            for context in (torch.no_grad(), as_written(), *contexts):
                stack.enter_context(context)
            NetFunction(net, lambda output, _: output, ())(params, batch, KEY, 0)

    counter = FlopCounterMode(display=False)
    try:
        run(counter)
    except Exception:  # it knows no higher-order ops, and no derivatives inside: without it there are no numbers
        run()
    counts, root = counter.get_flop_counts(), type(net).__name__
    # FlopCounterMode counts by path: divide by the calls of the module.
    paths_called = [call.path for call in records]
    for call in records:
        call.flops = sum(counts.get(f"{root}.{call.path}", {}).values()) // paths_called.count(call.path)
    return records


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


def _symbolic_size(size: int, dim: int, ndim: int, input_tensors: Sequence[Tensor]) -> Any:
    """Return the symbolic size of an input that equals a result's size: of the same dimension if possible, or any."""
    # Two symbolic sizes may have one number in the example: the same dimension is the better guess.
    same_dim_sizes = [tensor.shape[dim] for tensor in input_tensors if tensor.ndim == ndim]
    symbolic_sizes = [size for tensor in input_tensors for size in tensor.shape if isinstance(size, torch.SymInt)]
    return next((option for option in (*same_dim_sizes, *symbolic_sizes) if example_number(option) == size), size)
