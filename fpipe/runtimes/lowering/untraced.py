"""Hold which stages run under autograd, since they cannot be traced."""

from __future__ import annotations

from dataclasses import dataclass, field

from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.model import Model
from fpipe.program import Op
from fpipe.runtimes.lowering.stage_calls import update_only


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
        """Whether an op is of one of them; its U then runs the forward once more, if it is no norm's."""
        again = op.kind == "U" and bool(update_only(model, op.stage))
        return op.stage in self.stages and (op.kind in "FRBIW" or again)

    def surprises(self) -> list[tuple[int, str]]:
        """The stages of which a user learns only so that they cannot be traced."""
        return [(stage, why) for stage, why in self.stages.items() if why != BY_SIZES]


def is_sized(model: Model, stage: int | None) -> bool:
    """Whether a stage is an exchange whose sizes are data."""
    function = model.stages[stage or 0].forward
    return isinstance(function, Exchanged) and function.sizes


def by_sizes(model: Model) -> dict[int, str]:
    """The exchanges whose sizes are data, and the stages that read what these bring: shapes there depend on data."""
    sized = {stage for stage in range(len(model.stages)) if is_sized(model, stage)}
    readers = {
        stage
        for stage in range(len(model.stages))
        for source in model.sources(stage)
        if (source[0] if isinstance(source, tuple) else source) in sized
    }
    return dict.fromkeys(sorted(sized | readers), BY_SIZES)


BY_SIZES = "the data say how many rows its exchange brings"
UNDER_AUTOGRAD = "a stage runs under autograd, without a trace, and its I computes what W hands over"
