"""Draw random chains of transforms, with a schedule, as values that print as recipes, and small nets to run them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

import fpipe
from fpipe.program import Program
from property_tests.strategies import Net, legal_tables, nets

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
OFFLOADS: dict[str, Callable[[], Transform]] = {
    "offload()": fpipe.offload,
    "offload('worthwhile', lead=1)": lambda: fpipe.offload("worthwhile", lead=1),
}
LOWERINGS: dict[str, Callable[[], Transform]] = {"communicate()": fpipe.communicate, "free()": fpipe.free}


@dataclass(frozen=True)
class Chain:
    """Names of transforms, among them "schedule" and "merge()", and the schedule: a name and ranks, or a table."""

    steps: tuple[str, ...]
    schedule: tuple[str, int] | Table = ("gpipe", 1)

    @property
    def named(self) -> bool:
        return isinstance(self.schedule[0], str)

    @property
    def ranks(self) -> int:
        return self.schedule[1] if self.named else len(self.schedule)  # type: ignore[return-value]

    def without_step(self, name: str) -> Chain:
        """The chain without one of its transforms."""
        return replace(self, steps=tuple(step for step in self.steps if step != name))

    def __call__(self, program: Program, merge: Transform | None = None) -> Program:
        """Apply the chain to a program that is split already."""
        if self.named:
            name, ranks = self.schedule
            schedule = fpipe.schedules.get(name)(ranks)
        else:
            schedule = fpipe.schedules.from_table(self.schedule)
        makers = MIDDLE | OFFLOADS | LOWERINGS
        transform_by_name = {name: make() for name, make in makers.items() if name in self.steps}
        transform_by_name |= {"schedule": schedule, "merge()": merge or fpipe.merge()}
        return fpipe.chain(*(transform_by_name[name] for name in self.steps))(program)


@st.composite
def chains(
    draw: st.DrawFn,
    split: Program,
    named: st.SearchStrategy[tuple[str, int]],
    tables: bool = True,
    offload: bool = False,
) -> Chain:
    """Draw a chain for a program that is split: under a schedule that has a name, or (`tables`) in an order of its own
    of F, I and W; and whether residuals wait elsewhere (`offload`)."""
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
    if offload and draw(st.booleans()):
        steps.insert(steps.index("schedule") + 1, draw(st.sampled_from([*OFFLOADS])))
    lowering = draw(st.sampled_from([(), ("communicate()",), ("free()",), ("communicate()", "free()")]))
    return Chain((*steps, *lowering), schedule)


@dataclass(frozen=True)
class Run:
    """A model, a batch of `rows` in `microbatches`, and the chain of transforms that makes the program."""

    net: Net
    microbatches: int
    rows: int
    chain: Chain
    seed: int

    @property
    def program(self) -> Program:
        return self.chain(fpipe.split(self.microbatches)(fpipe.program(self.net.model)))

    @property
    def inputs(self) -> tuple[Any, Any]:
        return self.net.params(self.seed), self.net.batch(self.rows, self.seed)


@st.composite
def runs(draw: st.DrawFn, models: st.SearchStrategy[Net] | None = None) -> Run:
    net = draw(nets() if models is None else models)
    m = draw(st.integers(1, 4))
    rows = m * draw(st.integers(1, 3)) + draw(st.integers(0, m - 1))
    named = st.sampled_from(["gpipe", "one_f_one_b"]).map(lambda name: (name, min(2, len(net.bodies))))
    seed = st.integers(0, 2**16)
    return Run(net, m, rows, draw(chains(fpipe.split(m)(fpipe.program(net.model)), named)), draw(seed))
