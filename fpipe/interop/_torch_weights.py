"""Actions of torch's runtime for sharded weights and gradients, between the ops of a rank."""

from __future__ import annotations

from collections.abc import Sequence

from fpipe.interop._torch_read import Action
from fpipe.program import Op

_ACTIVE = 3  # stages whose weights are gathered at once: torch's own number


def weight_actions(row: list[Op], waits: bool) -> list[list[Action]]:
    """FSDP's actions before each op of a row, and after the last: weights of the stages that come next are gathered,
    others dropped to make room, gradients reduced (and where said waited for) once the last of a stage is there."""
    reduce = ("REDUCE_GRAD", "WAIT_REDUCE_GRAD") if waits else ("REDUCE_GRAD",)
    stages = [[part.stage or 0 for part in op.parts or (op,)] for op in row]
    last = {part.stage or 0: at for at, op in enumerate(row) for part in op.parts or (op,) if part.kind in "BW"}
    active: set[int] = set()
    gaps: list[list[Action]] = []
    for position in range(len(row) + 1):
        due = [Action(stage, kind, None) for stage, at in last.items() if at == position - 1 for kind in reduce]
        ahead = _next(stages[position:])
        due += [Action(stage, "RESHARD", None) for stage in sorted(active) if stage not in ahead]
        due += [Action(stage, "UNSHARD", None) for stage in ahead if stage not in active]
        active = set(ahead)
        gaps.append(due)
    return gaps


def _next(stages: Sequence[list[int]]) -> list[int]:
    """The next stages that compute, at most three, or one more where two overlap."""
    found: list[int] = []
    for group in stages:
        found += [stage for stage in group if stage not in found]
        if len(found) >= _ACTIVE:
            break
    return found
