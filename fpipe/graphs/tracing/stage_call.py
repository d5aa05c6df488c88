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
from fpipe.graphs.language.graph import Aval, aval
from fpipe.graphs.language.labels import is_input, label_at
from fpipe.graphs.tracing.keep import collecting_marks
from fpipe.meaning.purity.own_memory import alias
from fpipe.meaning.purity.pure import pure
from fpipe.meaning.stages.outputs import call_stage, loss_of, outputs_of, refuse_odd_output, split_output
from fpipe.model import Model, Turn, same_keys
from fpipe.positional_stage import PositionalStage

Spec = Any


@dataclass(frozen=True, eq=False)
class StageCall:
    """A way to call a stage (or, if `stage` is None, the loss): what it reads, in which containers.

    Attributes:
        stage: its number.
        reads: by label (`params`, `params:1`, `x`, `x:1`, `carry`, `state`, `target`, `const`) avals of the tensors,
            and leaves that are no tensors as they are.
        specs: the containers around them.
        microbatch, turn: its number, and whether it is the first and the last, if the stage asks for it.
        starts: the labels of inputs at which the gradient ends, as it does at parameters; all others come from a stage.
    """

    stage: int | None
    reads: tuple[tuple[str, tuple[Any, ...]], ...]
    specs: tuple[tuple[str, Spec], ...]
    microbatch: int | None = None
    starts: tuple[str, ...] = ()
    turn: Turn | None = None

    @cached_property
    def _parts(self) -> Any:
        """The parts to compare. 1 and True are equal, and so are 0.0 and -0.0, as leaves and as keys of containers."""
        leaves = (leaf for _, leaves in self.reads for leaf in leaves if not isinstance(leaf, Aval))
        kinds = tuple((type(leaf), repr(leaf) if isinstance(leaf, float | complex) else None) for leaf in leaves)
        keys = tuple(None if spec is None else tree.odd_keys(spec) for _, spec in self.specs)
        return self.stage, self.reads, self.specs, self.microbatch, self.starts, self.turn, kinds, keys

    @property
    def odd(self) -> Any:
        """The part that distinguishes this call from calls that Python takes to be equal."""
        return self._parts[-2:]

    @cached_property
    def _hash(self) -> int:
        return hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StageCall) and self._parts == other._parts)

    def differentiable(self) -> StageCall:
        """Return this call with a gradient of every input that can have one."""
        reads = tuple(
            (label, tuple(map(_wanting, leaves)) if is_input(label) or label == "carry" else leaves)
            for label, leaves in self.reads
        )
        return replace(self, reads=reads)


def _wanting(leaf: Any) -> Any:
    has_grad = isinstance(leaf, Aval) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return leaf._replace(wants=True) if has_grad else leaf


def wanting(leaf: Any) -> Any:
    """Return the aval of a tensor whose gradient is wanted, if it can have one; other leaves as they are."""
    return _wanting(aval(leaf)) if isinstance(leaf, Tensor) else leaf


def wants(leaf: Any) -> bool:
    """Whether a leaf is a tensor's aval with a gradient."""
    return isinstance(leaf, Aval) and leaf.wants


def flat(
    model: Model, call: StageCall, specs: dict[str, Spec]
) -> Callable[[Mapping[str, list[Any]]], dict[str, list[Any]]]:
    """Return the call as a function of leaves, which notes in `specs` the containers of what it writes."""
    containers = dict(call.specs)

    def whole(given: Mapping[str, list[Any]], label: str) -> Any:
        flows = is_input(label) and label not in call.starts  # it comes from another stage
        return tree.unflatten(containers[label], map(alias, given[label]) if flows else given[label])

    def loss(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        with pure(model.loss, "it", given, tracing=True):
            loss, total, aux = loss_of(model, whole(given, "x"), whole(given, "target"))
        count = {"count": total} if model.reduction == "count" else {}
        return written({"loss": loss} | count | ({"aux": aux} if model.aux else {}))

    def stage(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        assert call.stage is not None
        function = model.stages[call.stage]
        inputs = [whole(given, label) for label in given if is_input(label)]
        x = tuple(inputs) if isinstance(model.inputs[call.stage], tuple) else inputs[0]
        if isinstance(function.forward, PositionalStage):
            order = positions(model, function.forward)
            params = [given[label][at] for label, at in order]
            places = buffers(function.forward, call)
            with collecting_marks() as kept, pure(function.forward, "it", given, tracing=True):
                state = [given["state"][at].clone() for at in places]
                y, rest = function.forward.pure(params, given.get("const", []), x, state)
            if places:  # in the order of the state that was handed in
                rest["state"] = [rest["state"][places.index(at)] for at in range(len(places))]
            return outputs(call.stage, y, rest, kept)
        own = whole(given, "params")
        tied = {leaf.name: whole(given, label_at("params", leaf.bundle)) for leaf in model.tied(call.stage)}
        extra: dict[str, Any] = {"microbatch": call.microbatch, "turn": call.turn, "carry": None}
        extra |= {word: whole(given, word) for word in ("state", "carry") if word in containers}
        with collecting_marks() as kept, pure(function.forward, "it", given, tracing=True):
            result = call_stage(function, {**own, **tied} if tied else own, x, extra)
        return outputs(call.stage, *split_output(function, result), kept)

    def outputs(stage: int, y: Any, rest: Mapping[str, Any], kept: list[Tensor]) -> dict[str, list[Any]]:
        ports = {label_at("y", port): output for port, output in enumerate(outputs_of(model, stage, y))}
        for output in ports.values():
            refuse_odd_output(output, "it")
        return written({**ports, **rest, "kept": kept})

    def written(values: Mapping[str, Any]) -> dict[str, list[Any]]:
        leaves: dict[str, list[Any]] = {}
        for label, value in values.items():
            leaves[label], specs[label] = tree.flatten(value)
        return leaves

    return loss if call.stage is None else stage


def positions(model: Model, module: PositionalStage) -> list[tuple[str, int]]:
    """Return the label and the place of each of the module's parameters: tied ones are bundles of their own, and the
    others come in its order, as `bind_inputs` hands them on."""
    tied = {leaf.name: label_at("params", leaf.bundle) for leaf in model.tied(module.number)}
    place = count()
    return [(tied[name], 0) if name in tied else ("params", next(place)) for name, *_ in module.names]


def buffers(module: PositionalStage, call: StageCall) -> tuple[int, ...]:
    """Return the place of each buffer that the module writes among the leaves of its state."""
    if not module.holds:
        return ()
    given: dict[str, int] = tree.unflatten(dict(call.specs)["state"], range(len(dict(call.reads)["state"])))
    same_keys(given, module.holds, f"state of stage {module.number}", "a buffer that it writes")
    return tuple(given[name] for name in module.holds)
