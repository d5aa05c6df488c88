"""Describe one way to call a stage or the loss: a value to compare, and a function of leaves.

call = StageCall(stage=1, reads=(("params", avals), ("x", avals)), specs=...)
flat(model, call, specs)({"params": [w, b], "x": [x]})    -->    {"y": [y]}
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Aval, aval_of_tensor
from fpipe.graphs.language.labels import is_input, label_at
from fpipe.graphs.tracing.marks import collect_marks
from fpipe.meaning.purity.outputs import call_stage, check_output, loss_of, outputs_of, split_output
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.purity.write_guard import alias
from fpipe.model import Model, Turn, check_keys
from fpipe.positional_stage import PositionalStage

Spec = Any


@dataclass(frozen=True, eq=False)
class StageCall:
    """A way to call a stage, or the loss: the avals of its leaves and the containers around them.

    Attributes:
        stage: the number of the stage; None for the loss.
        reads: by label (`params`, `params:1`, `x`, `x:1`, `carry`, `state`, `target`, `const`) the avals of tensors,
            and the other leaves themselves.
        specs: by label the containers around the leaves.
        microbatch, turn: the microbatch's number, and whether it is the first or the last, if the stage asks for them.
        autograd_leaves: labels of inputs that are leaves of autograd, like parameters; others come from a stage.
    """

    stage: int | None
    reads: tuple[tuple[str, tuple[Any, ...]], ...]
    specs: tuple[tuple[str, Spec], ...]
    microbatch: int | None = None
    autograd_leaves: tuple[str, ...] = ()
    turn: Turn | None = None

    @cached_property
    def _comparison_key(self) -> Any:
        """The parts that equal calls have in common, with the exact types of leaves that are no tensors."""
        # Python takes 1 and True to be equal, and 0.0 and -0.0, as leaves and as keys of containers; a trace does not.
        leaves = (leaf for _, leaves in self.reads for leaf in leaves if not isinstance(leaf, Aval))
        kinds = tuple((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else None) for leaf in leaves)
        keys = tuple(None if spec is None else tree.mixed_key_text(spec) for _, spec in self.specs)
        return self.stage, self.reads, self.specs, self.microbatch, self.autograd_leaves, self.turn, kinds, keys

    @property
    def type_key(self) -> Any:
        """The types and signs that tell this call from calls which Python takes to be equal."""
        return self._comparison_key[-2:]

    @cached_property
    def _hash(self) -> int:
        return hash(self._comparison_key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, call: object) -> bool:
        return self is call or (isinstance(call, StageCall) and self._comparison_key == call._comparison_key)

    def differentiable(self) -> StageCall:
        """Return this call with a gradient of every input that can have one."""
        reads = tuple(
            (label, tuple(map(_request_grad, leaves)) if is_input(label) or label == "carry" else leaves)
            for label, leaves in self.reads
        )
        return replace(self, reads=reads)


def _request_grad(leaf: Any) -> Any:
    has_grad = isinstance(leaf, Aval) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return leaf._replace(wants_grad=True) if has_grad else leaf


def aval_with_grad(leaf: Any) -> Any:
    """Return the aval of a tensor, with a gradient if its dtype allows one; return other leaves unchanged."""
    return _request_grad(aval_of_tensor(leaf)) if isinstance(leaf, Tensor) else leaf


def aval_wants_grad(leaf: Any) -> bool:
    """Whether a leaf is the aval of a tensor whose gradient is wanted."""
    return isinstance(leaf, Aval) and leaf.wants_grad


def as_flat_function(
    model: Model, call: StageCall, spec_by_label: dict[str, Spec]
) -> Callable[[Mapping[str, list[Any]]], dict[str, list[Any]]]:
    """Return the call as a function of leaves by label, which records its output containers in `spec_by_label`."""
    # The returned function is `run_loss` or `run_stage`. Each unflattens its inputs, calls the user's code under the
    # guard of purity, and flattens the results.
    input_specs = dict(call.specs)

    def unflatten_label(leaves_by_label: Mapping[str, list[Any]], label: str) -> Any:
        comes_from_stage = is_input(label) and label not in call.autograd_leaves
        # An alias of what another stage wrote: a change of it in place must not reach the value that others read.
        return tree.unflatten(
            input_specs[label], map(alias, leaves_by_label[label]) if comes_from_stage else leaves_by_label[label]
        )

    def run_loss(leaves_by_label: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        with pure(model.loss, "it", leaves_by_label, tracing=True):
            loss, row_count, aux = loss_of(
                model, unflatten_label(leaves_by_label, "x"), unflatten_label(leaves_by_label, "target")
            )
        count_result = {"count": row_count} if model.reduction == "count" else {}
        return flatten_results({"loss": loss} | count_result | ({"aux": aux} if model.aux else {}))

    def run_stage(leaves_by_label: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        assert call.stage is not None
        stage = model.stages[call.stage]
        inputs = [unflatten_label(leaves_by_label, label) for label in leaves_by_label if is_input(label)]
        x = tuple(inputs) if isinstance(model.inputs[call.stage], tuple) else inputs[0]
        # a. The stage of a net takes lists of tensors, in the order of its names.
        if isinstance(stage.forward, PositionalStage):
            slots = param_slots_of(model, call.stage, stage.forward)
            params = [leaves_by_label[label][index] for label, index in slots]
            buffer_places = buffer_indices(stage.forward, call)
            with collect_marks() as marks, pure(stage.forward, "it", leaves_by_label, tracing=True):
                state = [leaves_by_label["state"][index].clone() for index in buffer_places]
                y, other_results = stage.forward.pure(params, leaves_by_label.get("const", []), x, state)
            if buffer_places:
                # The module returns its buffers in its own order; put them back into the order of the state's leaves.
                other_results["state"] = [
                    other_results["state"][buffer_places.index(index)] for index in range(len(buffer_places))
                ]
            return collect_outputs(call.stage, y, other_results, marks)
        # b. A stage function takes trees, and the keyword arguments that it asks for.
        untied_params = unflatten_label(leaves_by_label, "params")
        tied_params = {
            leaf.name: unflatten_label(leaves_by_label, label_at("params", leaf.bundle))
            for leaf in model.tied(call.stage)
        }
        other_arguments: dict[str, Any] = {"microbatch": call.microbatch, "turn": call.turn, "carry": None}
        other_arguments |= {
            label: unflatten_label(leaves_by_label, label) for label in ("state", "carry") if label in input_specs
        }
        with collect_marks() as marks, pure(stage.forward, "it", leaves_by_label, tracing=True):
            result = call_stage(
                stage, {**untied_params, **tied_params} if tied_params else untied_params, x, other_arguments
            )
        return collect_outputs(call.stage, *split_output(stage, result), marks)

    def collect_outputs(
        stage_index: int, y: Any, other_results: Mapping[str, Any], marks: list[Tensor]
    ) -> dict[str, list[Any]]:
        ports = {label_at("y", port): output for port, output in enumerate(outputs_of(model, stage_index, y))}
        for output in ports.values():
            check_output(output, "it")
        return flatten_results({**ports, **other_results, "kept": marks})

    def flatten_results(values: Mapping[str, Any]) -> dict[str, list[Any]]:
        leaves: dict[str, list[Any]] = {}
        for label, value in values.items():
            leaves[label], spec_by_label[label] = tree.flatten(value)
        return leaves

    return run_loss if call.stage is None else run_stage


def param_slots_of(model: Model, stage: int, module: PositionalStage) -> list[tuple[str, int]]:
    """Return the label of each parameter of a module, and its index under that label, in the module's order.

    A tied parameter is a bundle with a label of its own; all others stand under `params`, as `bind_inputs` orders them.
    """
    tied = {leaf.name: label_at("params", leaf.bundle) for leaf in model.tied(stage)}
    next_index = count()
    return [(tied[name], 0) if name in tied else ("params", next(next_index)) for name, *_ in module.names]


def buffer_indices(module: PositionalStage, call: StageCall) -> tuple[int, ...]:
    """Return, for each buffer that a module writes, its index among the leaves of the state."""
    if not module.state_names:
        return ()
    index_by_name: dict[str, int] = tree.unflatten(dict(call.specs)["state"], range(len(dict(call.reads)["state"])))
    check_keys(index_by_name, module.state_names, f"state of stage {call.stage}", "a buffer that it writes")
    return tuple(index_by_name[name] for name in module.state_names)
