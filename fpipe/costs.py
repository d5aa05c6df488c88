"""What an op costs: seconds for each kind and stage, seconds for a transfer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fpipe.program import Op, kind_of

PerStage = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """Seconds of one op for one microbatch (and slice), a number for all stages or one for each.

    Args:
        forward, backward_input, backward_weight: of F, I and W; a full backward B costs the last two together.
        recompute: of R; by default what F costs.
        transfer: latency of a value from one rank to another; the sender is not blocked.

    >>> Costs(forward=2, backward_weight=[1, 3]).forward
    2
    """

    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    recompute: PerStage | None = None
    transfer: float = 0

    def __post_init__(self) -> None:
        for word in ("forward", "backward_input", "backward_weight", "recompute", "transfer"):
            given = getattr(self, word)
            for cost in given if isinstance(given, Sequence) else (given,):
                if cost is None and word == "recompute":
                    continue
                if not isinstance(cost, int | float) or not cost >= 0:
                    raise ValueError(f"{word} is a time in seconds, at least 0; found {cost!r}.")

    def seconds(self, op: Op) -> float:
        """How long an op takes on its lane; what keeps to its data takes nothing."""
        if op.parts:
            return sum(self.seconds(part) for part in op.parts)
        stage = op.stage or 0
        if op.kind == "F":
            return _at(self.forward, stage, "forward")
        if op.kind == "B":
            return _at(self.backward_input, stage, "backward_input") + _at(
                self.backward_weight, stage, "backward_weight"
            )
        if op.kind == "I":
            return _at(self.backward_input, stage, "backward_input")
        if op.kind == "W":
            return _at(self.backward_weight, stage, "backward_weight")
        if op.kind == "R":
            return _at(self.forward if self.recompute is None else self.recompute, stage, "recompute")
        return _EXTRA.get(op.kind, 0.0)


class Ticks(Costs):
    """The clock that fixes a program's global order: F, B, I, W and R take one tick each."""

    def seconds(self, op: Op) -> float:
        """One tick, or none for what keeps to its data."""
        return kind_of(op.kind).time


_EXTRA: dict[str, float] = {}


def register_cost(kind: str, seconds: float) -> None:
    """Say what an op of a kind of your own costs, in seconds; a kind of ours has its cost in `Costs`.

    >>> register_cost("REDUCE", 0.5)
    """
    kind_of(kind)
    if kind in "FBIWR":
        raise ValueError(f"the cost of {kind} is a field of Costs.")
    _EXTRA[kind] = seconds


def _at(cost: PerStage, stage: int, word: str) -> float:
    if not isinstance(cost, Sequence):
        return cost
    if stage >= len(cost):
        raise ValueError(f"{word} lists {len(cost)} costs, but the program has a stage {stage}; give one a stage.")
    return cost[stage]
