"""Hold which stages run under autograd, since they cannot be traced."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.model import Model
from fpipe.program import Op, Program, parts_of


@dataclass
class Untraced:
    """The stages that run under autograd.

    Attributes:
        stages: their numbers, each with the reason.
        known_only: whether only traces are used that were made before.
    """

    stages: dict[int, str] = field(default_factory=dict[int, str])
    known_only: bool = False

    def has(self, op: Op, model: Model) -> bool:
        """Whether an op is of one of them."""
        return op.stage in self.stages and op.kind in "FRBIW"

    def surprises(self) -> list[tuple[int, str]]:
        """The stages of which a user learns only so that they cannot be traced."""
        return [(stage, why) for stage, why in self.stages.items() if why != BY_SIZES]

    def with_words(self, error: Exception) -> str:
        """An error behind why stages run without a trace, each reason once."""
        return "; ".join(dict.fromkeys([*(why for _, why in self.surprises()), str(error).rstrip(".")]))


def is_sized(model: Model, stage: int | None) -> bool:
    """Whether a stage is an exchange whose sizes are data."""
    function = model.stages[stage or 0].forward
    return isinstance(function, Exchanged) and function.sizes


def by_sizes(model: Model) -> dict[int, str]:
    """The exchanges whose sizes are data, and the stages that read what these bring: shapes there depend on data."""
    every = range(len(model.stages))
    sized = {stage for stage in every if is_sized(model, stage)}
    found = (stage for stage in every if stage in sized or sized & _sources(model, stage))
    return dict.fromkeys(found, BY_SIZES)


def refuse_unknown_rows(program: Program, model: Model) -> None:
    """A ValueError where what an exchange with sizes brings goes to another rank, or is a result."""
    every = range(len(model.stages))
    functions: list[Any] = [stage.forward for stage in model.stages]
    sized = [stage for stage in every if is_sized(model, stage) and functions[stage].size > 1]
    ops = [op for op in parts_of(program.ops) if op.kind == "F" and op.stage in sized] if sized else []
    brought = {value: op for op in ops for value in op.writes if value.name == "y"}
    away = {value for op in program.ops if op.kind == "SEND" for value in op.reads if value in brought}
    for value, op in brought.items():
        who = f"{model.who(op.stage or 0)} brings as many rows as the data say"
        if value in away:
            readers = [at for at in every if op.stage in _sources(model, at)]
            where = dict(enumerate(program.placement))
            others = " and ".join(f"{model.who(at)} on rank {where[at]}" for at in readers if where[at] != op.rank)
            raise ValueError(
                f"{who} on rank {op.rank}, and {others} would read them; a message has a shape that is known before. "
                f"{WHOLE_BLOCKS}"
            )
        if any(end.value == value for end in program.outputs):
            raise ValueError(f"{who}, and {value} is a result, which has a shape that is known before: leave it out.")


def _sources(model: Model, stage: int) -> set[Any]:
    return {source[0] if isinstance(source, tuple) else source for source in model.sources(stage)}


BY_SIZES = "the data say how many rows its exchange brings"
WHOLE_BLOCKS = (
    "Place dispatch, experts, combine and what reads that on one rank: by a list such as fpipe.place([0, 1, 1, 1, 1]) "
    "in front of a schedule of one chunk a rank, which keeps it, or by chunks that begin with a dispatch."
)
UNDER_AUTOGRAD = "a stage runs under autograd, without a trace, and its I computes what W hands over"
