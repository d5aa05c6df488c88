"""Bidirectional schedules and waves on drawn sizes and models: the right gradients, the published bubbles and peaks."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program
from property_tests.strategies import Net, few, nets
from property_tests.test_gradients import same_bits

VISITS = {"chimera": 1, "dualpipe": 1, "dualpipev": 2, "hanayo": 2}


@dataclass(frozen=True)
class Run:
    """A schedule on so many ranks, with its options."""

    name: str
    ranks: int
    microbatches: int
    options: dict[str, int] = field(default_factory=dict[str, int])

    @property
    def stages(self) -> int:
        return self.ranks * VISITS[self.name] * self.options.get("waves", 1)

    @property
    def program(self) -> Program:
        about = fpipe.schedules.about(self.name)
        return about.program(self.ranks, self.microbatches, self.stages, **self.options)


@st.composite
def runs(draw: st.DrawFn, most: int = 8, names: tuple[str, ...] = tuple(VISITS)) -> Run:
    name = draw(st.sampled_from(names))
    if name == "hanayo":
        ranks, waves = draw(st.integers(2, most)), draw(st.integers(1, 3 if most > 2 else 1))
        return Run(name, ranks, draw(st.integers(1, 3 * ranks)), {"waves": waves})
    if name == "dualpipev":
        ranks = draw(st.integers(1, most))
        return Run(name, ranks, draw(st.integers(2 * ranks, 4 * ranks)))
    ranks = 2 * draw(st.integers(1, most // 2))
    least = 1 if name == "chimera" else ranks
    return Run(name, ranks, 2 * draw(st.integers(least, 2 * ranks)))


@few(10)
@given(runs(most=4))
def test_every_op_is_there_once_and_it_checks_with_transfers(run: Run):
    program = run.program
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))
    work = sum(end - start for _, start, end in fpipe.simulate(program).events)
    assert work == 3 * run.stages * run.microbatches


@few(5)
@given(runs(most=2), st.data())
def test_gradients_are_those_of_plain_autograd(run: Run, data: st.DataObject):
    net: Net = data.draw(nets(st.integers(run.stages, 5)), label="net")
    steps = (fpipe.split(run.microbatches), fpipe.schedules.get(run.name)(run.ranks, **run.options), fpipe.merge())
    program = fpipe.chain(*steps, fpipe.communicate(), fpipe.free())(fpipe.program(net.model))
    params, batch = net.params(), net.batch(run.microbatches + 1)
    expected = fpipe.reference(net.model, params, batch, microbatches=run.microbatches)
    assert same_bits(fpipe.build(program, net.model)(params, batch), expected.loss, expected.grads)


@given(runs())
def test_no_rank_holds_more_than_published(run: Run):
    p, m = run.ranks, run.microbatches
    half = m // 2
    published = {
        "chimera": [min(p / 2, p - r, half) + min(p / 2, r + 1, half) for r in range(p)],
        "dualpipe": [p + 1] * p,
        "dualpipev": [p + 0.5] * p,
        "hanayo": [min(m, p - (p - 1 - r) * p / run.stages) for r in range(p)],
    }
    held = fpipe.simulate(run.program).peak
    assert all(one <= most + 1e-9 for one, most in zip(held, published[run.name], strict=True))


@given(runs(names=("chimera", "hanayo")), st.floats(1, 9), st.floats(0.1, 0.9))
def test_the_bubble_of_whole_units_is_the_formula(run: Run, forward: float, share: float):
    """For B+W = 2F: one drain a unit, and one more at the start."""
    units = -(-run.microbatches // run.ranks)
    run = Run(run.name, run.ranks, units * run.ranks, run.options)
    waves = run.options.get("waves", 1)
    parts = run.stages // run.ranks
    costs = fpipe.Costs(forward / parts, 2 * forward * share / parts, 2 * forward * (1 - share) / parts)
    turns = (run.ranks - 2) if run.name == "chimera" else (run.ranks - 1) / waves
    assert fpipe.simulate(run.program, costs).idle == pytest.approx(turns * (units + 1) * forward)


@given(runs(names=("dualpipe", "dualpipev")), st.floats(1, 9), st.floats(0, 0.9))
def test_the_bubble_of_overlapped_pairs_is_the_formula(run: Run, forward: float, weight: float):
    """For B = F: (p/2-1)(F&B + B - 3W) with B the full backward; cut in half, with p-1 for p-2."""
    parts = run.stages // run.ranks
    costs = fpipe.Costs(forward / parts, forward / parts, forward * weight / parts)
    turns = (run.ranks - 2 if run.name == "dualpipe" else run.ranks - 1) / 2
    assert fpipe.simulate(run.program, costs).idle == pytest.approx(turns * forward * (3 - weight))
