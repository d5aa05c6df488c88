"""Random chains of transforms, as values that print as what was drawn: which, in which order, and the schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from hypothesis import strategies as st

import fpipe
from fpipe.program import Program
from property_tests.strategies import legal_tables

Transform = Callable[[Program], Program]
Table = tuple[tuple[str, ...], ...]
MIDDLE: dict[str, Callable[[], Transform]] = {
    "checkpoint('always')": fpipe.checkpoint,
    "checkpoint('except_last')": lambda: fpipe.checkpoint("except_last"),
    "checkpoint(odd)": lambda: fpipe.checkpoint(lambda stage, microbatch: (stage + microbatch) % 2 == 1),
    "checkpoint(grain='layer')": lambda: fpipe.checkpoint(grain="layer"),
    "split_backward()": fpipe.split_backward,
    "split_backward(odd)": lambda: fpipe.split_backward(lambda stage, microbatch: (stage + microbatch) % 2 == 1),
    "merge_backward()": fpipe.merge_backward,
}
AWAY: dict[str, Callable[[], Transform]] = {
    "offload()": fpipe.offload,
    "offload('worthwhile', lead=1)": lambda: fpipe.offload("worthwhile", lead=1),
}
LAST: dict[str, Callable[[], Transform]] = {"communicate()": fpipe.communicate, "free()": fpipe.free}


@dataclass(frozen=True)
class Chain:
    """Transforms by name, one of them "schedule" and one "merge()", and the schedule: a name and ranks, or a table."""

    steps: tuple[str, ...]
    schedule: tuple[str, int] | Table = ("gpipe", 1)

    @property
    def named(self) -> bool:
        """Whether the schedule is one that has a name."""
        return isinstance(self.schedule[0], str)

    @property
    def ranks(self) -> int:
        return self.schedule[1] if self.named else len(self.schedule)  # type: ignore[return-value]

    def without(self, name: str) -> Chain:
        """The chain without one of its transforms."""
        return replace(self, steps=tuple(step for step in self.steps if step != name))

    def __call__(self, program: Program, merge: Transform | None = None) -> Program:
        """A program that is split already, under the chain."""
        if self.named:
            name, ranks = self.schedule
            schedule = fpipe.schedules.get(name)(ranks)
        else:
            schedule = fpipe.schedules.from_table(self.schedule)
        made = {name: make() for name, make in (MIDDLE | AWAY | LAST).items() if name in self.steps}
        made |= {"schedule": schedule, "merge()": merge or fpipe.merge()}
        return fpipe.chain(*(made[name] for name in self.steps))(program)


@st.composite
def chains(
    draw: st.DrawFn, split: Program, named: st.SearchStrategy[tuple[str, int]], tables: bool = True, away: bool = False
) -> Chain:
    """Draw a chain for a program that is split: under a schedule that has a name, or (`tables`) in an order of its own
    of F, I and W; and whether residuals wait elsewhere (`away`)."""
    steps = ["merge()", *draw(st.lists(st.sampled_from([*MIDDLE]), max_size=3, unique=True))]
    if tables and draw(st.booleans()):
        schedule = draw(legal_tables(fpipe.split_backward()(split)))
        steps = [
            "split_backward()",
            *draw(st.permutations(["schedule", *(s for s in steps if s != "merge_backward()")])),
        ]
    else:
        schedule = draw(named)
        steps = draw(st.permutations(["schedule", *steps]))
    if away and draw(st.booleans()):
        steps.insert(steps.index("schedule") + 1, draw(st.sampled_from([*AWAY])))
    last = draw(st.sampled_from([(), ("communicate()",), ("free()",), ("communicate()", "free()")]))
    return Chain((*steps, *last), schedule)
