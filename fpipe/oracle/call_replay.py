"""Replay a recorded call with the reference net, on its recorded inputs.

The call of a module P with children A and B is replayed with stubs in the places of A and B, which return what was
recorded of them. So each call answers for its own code alone, and a fault is found where it is, and not where it leads:

    x --glue--> A --glue--> B --glue--> y     forward:  y and the inputs of A and B, given x and the outputs of A, B
                                              backward: dA, dB, dx, given dy and what A and B make of dA and dB

Calls are replayed from the last to the first, children before parents: a parent's backward needs that of its children.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fpipe.oracle.call_result import CallResult, RecordedChoice
from fpipe.oracle.recorded_calls import Call, RecordedCalls, input_hashes, module_call
from fpipe.oracle.recorded_step import RecordedStep
from fpipe.oracle.replay_graph import find_readers, subtract_flows
from fpipe.oracle.run_report import eps_of
from fpipe.recording.choice_watch import ChoiceWatch
from fpipe.recording.record_files import as_spec, from_spec
from fpipe.verification.report import PrecisionWatch


class OtherCalls(ValueError):
    """The reference calls a child more or less often than the record."""


class UnknownPart(ValueError):
    """A rank's part of a DTensor cannot be placed in the whole."""


class CallReplay:
    """Replays the recorded calls of a microbatch on one rank, each alone.

    Attributes:
        roots: how many calls stand in no other: with a pipeline, one for each microbatch.
        is_whole: whether every call of the net can be replayed, so that gradients of parameters are complete.
    """

    def __init__(self, net: nn.Module, rank: RecordedStep, microbatch: int) -> None:
        self._net, self._record, self._moment = net, rank.record, (rank.step, microbatch)
        self._calls = RecordedCalls(net, rank, microbatch)
        self.roots, self.is_whole = self._calls.roots, self._calls.are_whole
        self._modules = dict(net.named_modules())
        self._name_by_param = {param: name for name, param in net.named_parameters()}
        self._results = dict[int, CallResult]()

    def module_of(self, number: int) -> nn.Module:
        """Return the reference's module of a call."""
        return self._modules[self._calls[number]["module"]]

    def replay(
        self,
        number: int,
        moved: Callable[[Tensor], Tensor] | None = None,
        change: Callable[[nn.Module], Any] | None = None,
        finds_readers: bool = False,
    ) -> CallResult:
        """Replay one call.

        Args:
            number: of the call.
            moved: noise for what the call reads.
            change: a context in which the module runs differently, by which a mistake is tried.
            finds_readers: fill in the readers of the result.
        """
        call, module = self._calls[number], self._modules[self._calls[number]["module"]]
        leaves, outputs_by_child = list[Tensor](), dict[int, list[Tensor]]()

        def leaf_of(tensor_hash: str, leaves: list[Tensor]) -> Tensor:
            tensor = self._record.tensor(tensor_hash)
            tensor = moved(tensor) if moved else tensor
            if tensor.is_floating_point() or tensor.is_complex():
                tensor.requires_grad_()
            leaves.append(tensor)
            # A copy: code may change what it is handed in place, which torch forbids for a leaf.
            return tensor.clone()

        inner_call = module_call(call)
        args, kwargs = (from_spec(inner_call[key], lambda name: leaf_of(name, leaves)) for key in ("args", "kwargs"))
        children = self._calls.children_of(number)
        result = CallResult([])

        def run_stub(child: int, args: Any, kwargs: Any) -> Any:
            result.child_inputs[child] = _tensors_in((args, kwargs))
            if "rng" in self._calls[child]:
                torch.set_rng_state(self._record.tensor(self._calls[child]["rng"][1]))
            outputs = outputs_by_child[child] = list[Tensor]()
            return from_spec(self._calls[child]["output"], lambda name: leaf_of(name, outputs))

        recorded_choices = [self._record.tensor(indices) for indices in self._calls.choices_in(number)]

        def choose(scores: Tensor, indices: Tensor, dim: int) -> Tensor:
            if not recorded_choices:
                return indices
            recorded = recorded_choices.pop(0)
            if recorded.shape != indices.shape:
                raise OtherCalls(f"its top-k has the shape {[*recorded.shape]}, not {[*indices.shape]}")
            result.choices.append(RecordedChoice(scores.detach(), recorded, indices, dim))
            return recorded

        params = {name: param for name, param in self._named_params(call["module"]).items() if param.requires_grad}
        with self._environment(call), _lent_params(params, call["param_dtype"], moved), PrecisionWatch() as precision:
            changed = change(module) if change else nullcontext()
            with self._stubs(children, run_stub), changed, ChoiceWatch(choose):
                result.outputs = _tensors_in(module(*args, **kwargs))
            try:
                self._differentiate(number, result, leaves, outputs_by_child, params, moved, finds_readers)
            except UnknownPart:
                result.has_grads = False
                # Gradients of the children's parameters follow from the recorded ones of their outputs.
                stubbed = tuple(f"{self._calls[child]['module']}." for child in children)
                self.is_whole &= all(name.startswith(stubbed) for name in params)
        result.eps = max(precision.eps, eps_of(*result.outputs))
        return result

    def _differentiate(
        self,
        number: int,
        result: CallResult,
        leaves: list[Tensor],
        outputs_by_child: dict[int, list[Tensor]],
        params: dict[str, nn.Parameter],
        moved: Callable[[Tensor], Tensor] | None,
        finds_readers: bool,
    ) -> None:
        """Run the backward of a call from the gradients of its outputs and of its children's inputs."""
        roots = [*zip(result.outputs, self._recorded_grads(module_call(self._calls[number])), strict=False)]
        for child, inputs in result.child_inputs.items():
            roots += zip(inputs, self._outer_input_grads(child), strict=False)
        pairs = [
            (root, (moved(grad) if moved else grad).to(root.dtype))
            for root, grad in roots
            if grad is not None and root.requires_grad and root.shape == grad.shape
        ]
        result.flows = subtract_flows(result.outputs, pairs)
        sources = [*leaves, *chain.from_iterable(outputs_by_child.values()), *params.values()]
        needed = [source for source in sources if source.requires_grad]
        if finds_readers:
            result.readers = find_readers(result.outputs, result.child_inputs, outputs_by_child)
        source_grads: dict[int, Tensor | None] = {}
        if pairs and needed:
            values = torch.autograd.grad(
                [root for root, _ in pairs],
                needed,
                [grad for _, grad in pairs],
                allow_unused=True,
            )
            source_grads = {id(source): value for source, value in zip(needed, values, strict=True)}
        result.input_grads = [source_grads.get(id(leaf)) for leaf in leaves]
        for child, outputs in outputs_by_child.items():
            result.child_grads[child] = [source_grads.get(id(output)) for output in outputs]
        computed = {name: source_grads.get(id(param)) for name, param in params.items()}
        result.param_grads = {name: grad for name, grad in computed.items() if grad is not None}
        for tensors in (result.outputs, *result.child_inputs.values()):
            tensors[:] = [tensor.detach() for tensor in tensors]

    def _outer_input_grads(self, child: int) -> list[Tensor | None]:
        """Return the gradients of a child's inputs as its parent hands them: of a whole DTensor a part.

        Raises:
            UnknownPart: the parent's tensor is no part of the whole, or one of several equal parts; or the child's
                gradients are not known.
        """
        call, result = self._calls[child], self._results.get(child)
        if result is None or not result.has_grads:
            raise UnknownPart
        grads = result.input_grads
        if "inner" not in call:
            return grads
        inputs = [[self._record.tensor(name) for name in input_hashes(part)] for part in (call, call["inner"])]
        if len(inputs[0]) != len(inputs[1]):
            raise UnknownPart
        return [
            grad if grad is None else grad.narrow(*_region_of(part, whole_tensor))
            for part, whole_tensor, grad in zip(*inputs, grads, strict=True)
        ]

    def _recorded_grads(self, call: Call) -> list[Tensor | None]:
        grads = call["grads"]
        return [self._record.tensor(grads[str(i)]) if grads[str(i)] else None for i in range(len(grads))]

    def _named_params(self, module: str) -> dict[str, nn.Parameter]:
        # A tied parameter has the first of its names, wherever it is used.
        return {self._name_by_param[param]: param for param in self._modules[module].parameters()}

    @contextmanager
    def _environment(self, call: Call) -> Generator[None]:
        """Run in the autocast of a call, from its random state, and put the caller's back."""
        # A dropout draws again what the run drew: its random state is recorded around each call that draws.
        former = torch.get_rng_state()
        if "rng" in call:
            torch.set_rng_state(self._record.tensor(call["rng"][0]))
        dtype = getattr(torch, call["autocast"]) if call["autocast"] else torch.bfloat16
        try:
            with torch.enable_grad(), torch.autocast("cpu", dtype, enabled=call["autocast"] is not None):
                yield
        finally:
            torch.set_rng_state(former)

    @contextmanager
    def _stubs(self, children: Sequence[int], run_stub: Callable[[int, Any, Any], Any]) -> Generator[None]:
        """Let the modules of these calls return their recorded outputs, call after call."""
        numbers_by_module = dict[str, list[int]]()
        for child in children:
            numbers_by_module.setdefault(self._calls[child]["module"], []).append(child)

        def stub_of(name: str, numbers: list[int]) -> Callable[..., Any]:
            def stub(*args: Any, **kwargs: Any) -> Any:
                if not numbers:
                    raise OtherCalls(f"the reference calls {name} more often")
                return run_stub(numbers.pop(0), args, kwargs)

            return stub

        # On the instance: the hooks of the module run as ever, only its own code does not.
        modules = {name: self._modules[name] for name in numbers_by_module}
        former = {name: module.__dict__["forward"] for name, module in modules.items() if "forward" in module.__dict__}
        for name, module in modules.items():
            module.__dict__["forward"] = stub_of(name, numbers_by_module[name])
        try:
            yield
        finally:
            for name, module in modules.items():
                del module.__dict__["forward"]
                module.__dict__.update({"forward": former[name]} if name in former else {})
        unused = next((name for name, numbers in numbers_by_module.items() if numbers), None)
        if unused is not None:
            raise OtherCalls(f"it calls {unused} more often than the reference")


def _region_of(part: Tensor, whole_tensor: Tensor) -> tuple[int, int, int]:
    """Return the dimension, start and length of the only region of a tensor that has the numbers of a part.

    >>> _region_of(torch.tensor([3.0, 4.0]), torch.tensor([1.0, 2.0, 3.0, 4.0]))
    (0, 2, 2)
    """
    if part.shape == whole_tensor.shape and part.ndim:
        return 0, 0, len(part)
    regions = list[tuple[int, int, int]]()
    for dim in range(part.ndim if part.ndim == whole_tensor.ndim else 0):
        size = part.shape[dim]
        if (
            part.shape[:dim] + part.shape[dim + 1 :] == whole_tensor.shape[:dim] + whole_tensor.shape[dim + 1 :]
            and size
        ):
            starts = range(0, whole_tensor.shape[dim] - size + 1, size)
            regions += [(dim, k, size) for k in starts if torch.equal(whole_tensor.narrow(dim, k, size), part)]
    if len(regions) != 1:
        raise UnknownPart
    return regions[0]


def _tensors_in(value: Any) -> list[Tensor]:
    tensors = list[Tensor]()
    as_spec(value, lambda tensor: tensors.append(tensor) or "")
    return tensors


@contextmanager
def _lent_params(
    params: dict[str, nn.Parameter], dtype: str | None, moved: Callable[[Tensor], Tensor] | None
) -> Generator[None]:
    """Give parameters the dtype that they had in the call, and noise; and put their tensors back."""
    former = {name: param.data for name, param in params.items()}
    for name, numbers in former.items():
        lent = numbers.to(getattr(torch, dtype)) if dtype and numbers.is_floating_point() else numbers
        params[name].data = moved(lent) if moved else lent
    try:
        yield
    finally:
        for name, numbers in former.items():
            params[name].data = numbers
