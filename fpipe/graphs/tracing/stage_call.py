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
    """One way to call a stage (or, if `stage` is None, the loss): what it reads, in which containers.

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
        """A mark that tells it apart from calls that Python takes to be equal."""
        return self._parts[-2:]

    @cached_property
    def _hash(self) -> int:
        return hash(self._parts)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, StageCall) and self._parts == other._parts)

    def differentiable(self) -> StageCall:
        """This call as if a gradient of every input that can have one were wanted."""
        reads = tuple(
            (label, tuple(map(_wanting, leaves)) if is_input(label) or label == "carry" else leaves)
            for label, leaves in self.reads
        )
        return replace(self, reads=reads)


def _wanting(leaf: Any) -> Any:
    able = isinstance(leaf, Aval) and (leaf.dtype.is_floating_point or leaf.dtype.is_complex)
    return leaf._replace(wants=True) if able else leaf


def wanting(leaf: Any) -> Any:
    """The aval of a tensor whose gradient is wanted, if it can have one; other leaves as they are."""
    return _wanting(aval(leaf)) if isinstance(leaf, Tensor) else leaf


def wants(leaf: Any) -> bool:
    """Whether a leaf is a tensor's aval with a gradient."""
    return isinstance(leaf, Aval) and leaf.wants


def flat(
    model: Model, call: StageCall, specs: dict[str, Spec]
) -> Callable[[Mapping[str, list[Any]]], dict[str, list[Any]]]:
    """The call as a function of leaves; it notes the containers of what it writes."""
    containers = dict(call.specs)

    def whole(given: Mapping[str, list[Any]], label: str) -> Any:
        came = is_input(label) and label not in call.starts
        return tree.unflatten(containers[label], map(alias, given[label]) if came else given[label])

    def loss(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        with pure(model.loss, "it", given, tracing=True):
            made, total, aux = loss_of(model, whole(given, "x"), whole(given, "target"))
        beside = {"count": total} if model.reduction == "count" else {}
        return written({"loss": made} | beside | ({"aux": aux} if model.aux else {}))

    def stage(given: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
        assert call.stage is not None
        one = model.stages[call.stage]
        taken = [whole(given, label) for label in given if is_input(label)]
        x = tuple(taken) if isinstance(model.inputs[call.stage], tuple) else taken[0]
        if isinstance(one.forward, PositionalStage):
            order = positions(model, one.forward)
            params = [given[label][at] for label, at in order]
            places = buffers(one.forward, call)
            with collecting_marks() as kept, pure(one.forward, "it", given, tracing=True):
                held = [given["state"][at].clone() for at in places]
                y, beside = one.forward.pure(params, given.get("const", []), x, held)
            if places:  # in the order that they came in
                beside["state"] = [beside["state"][places.index(at)] for at in range(len(places))]
            return outputs(call.stage, y, beside, kept)
        own = whole(given, "params")
        more = {leaf.name: whole(given, label_at("params", leaf.bundle)) for leaf in model.tied(call.stage)}
        said: dict[str, Any] = {"microbatch": call.microbatch, "turn": call.turn, "carry": None}
        said |= {word: whole(given, word) for word in ("state", "carry") if word in containers}
        with collecting_marks() as kept, pure(one.forward, "it", given, tracing=True):
            made = call_stage(one, {**own, **more} if more else own, x, said)
        return outputs(call.stage, *split_output(one, made), kept)

    def outputs(stage: int, y: Any, beside: Mapping[str, Any], kept: list[Tensor]) -> dict[str, list[Any]]:
        ports = {label_at("y", port): one for port, one in enumerate(outputs_of(model, stage, y))}
        for one in ports.values():
            refuse_odd_output(one, "it")
        return written({**ports, **beside, "kept": kept})

    def written(made: Mapping[str, Any]) -> dict[str, list[Any]]:
        leaves: dict[str, list[Any]] = {}
        for label, value in made.items():
            leaves[label], specs[label] = tree.flatten(value)
        return leaves

    return loss if call.stage is None else stage


def positions(model: Model, module: PositionalStage) -> list[tuple[str, int]]:
    """Where each of the module's parameters stands among the leaves handed in: tied ones are bundles of their own, the
    others come in its order, as `bind_inputs` hands them on."""
    tied = {leaf.name: label_at("params", leaf.bundle) for leaf in model.tied(module.number)}
    place = count()
    return [(tied[name], 0) if name in tied else ("params", next(place)) for name, *_ in module.names]


def buffers(module: PositionalStage, call: StageCall) -> tuple[int, ...]:
    """Where each of the buffers that the module writes stands among the leaves handed in as its state."""
    if not module.holds:
        return ()
    given: dict[str, int] = tree.unflatten(dict(call.specs)["state"], range(len(dict(call.reads)["state"])))
    same_keys(given, module.holds, f"state of stage {module.number}", "a buffer that it writes")
    return tuple(given[name] for name in module.holds)
