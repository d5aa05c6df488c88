"""Makespans under noise: without noise they are those of `simulate`, and more noise is never better."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.timing import noise as drawing
from property_tests.strategies import DrawnProgram, few, plans
from property_tests.test_time_laws import costs
from tests.refusals import refusals

NAMED = {name: fpipe.schedules.about(name).program(4, 8) for name in ("one_f_one_b", "zb_h1", "gpipe")}


@few(6)
@given(plans(), costs())
def test_without_noise_every_draw_is_the_simulation(plan: DrawnProgram, costs: fpipe.Costs):
    (found,) = fpipe.robustness(plan.program, costs, noise=fpipe.Noise(), samples=3)
    assert {*found.makespans, found.nominal} == {fpipe.simulate(plan.program, costs).makespan}


@few(6)
@given(plans(), costs(plain=True), st.integers(0, 9))
def test_draws_at_once_are_the_draws_one_by_one(plan: DrawnProgram, costs: fpipe.Costs, seed: int):
    noise, program = fpipe.Noise(jitter=0.2, slow_rank=2, slow_link=3), plan.program
    draws = drawing._Draws(program, costs, noise, 5, seed)
    at_once = drawing.makespans(program, costs, noise, 5, seed)
    assert at_once == pytest.approx([drawing._alone(program, costs, draws, number) for number in range(5)])


@few(6)
@given(plans(), costs(), st.integers(0, 9))
def test_slower_is_never_shorter(plan: DrawnProgram, costs: fpipe.Costs, seed: int):
    """One order, one link each: what is slower makes nothing else faster."""
    levels = [fpipe.Noise(0, slow, slow) for slow in (1, 1.5, 4)]
    rows = [drawing.makespans(plan.program, costs, noise, 4, seed) for noise in levels]
    assert all(a <= b + 1e-9 and b <= c + 1e-9 for a, b, c in zip(*rows, strict=True))


def test_the_best_where_all_goes_well_need_not_be_the_best_elsewhere():
    found = fpipe.robustness(NAMED, noise=fpipe.Noise(jitter=0.3, slow_rank=1.5))
    again = fpipe.robustness(NAMED, noise=fpipe.Noise(jitter=0.3, slow_rank=1.5))
    other = fpipe.robustness(NAMED, noise=fpipe.Noise(jitter=0.3, slow_rank=1.5), seed=1)
    assert found == again != other
    for row in found:
        assert row.nominal < row.median < row.p95 == pytest.approx(row.nominal * (1 + row.fragile))
    assert found.best("nominal") == found["zb_h1"]
    assert str(found).splitlines()[0].split() == ["program", "nominal", "median", "p95", "fragile"]


def test_jitter_has_the_mean_and_the_spread_that_are_said():
    program = fpipe.chain(fpipe.split(1), fpipe.schedules.gpipe(1), fpipe.forward_only())(fpipe.program(1))
    (found,) = fpipe.robustness(program, noise=fpipe.Noise(jitter=0.1), samples=4000)
    mean = sum(found.makespans) / 4000
    spread = (sum((one - mean) ** 2 for one in found.makespans) / 4000) ** 0.5
    assert (mean, spread) == (pytest.approx(1, abs=0.01), pytest.approx(0.1, abs=0.01))


def test_a_slow_link_of_a_cluster_and_costs_by_program():
    """Everything that `simulate` knows can vary, here a link that carries one value at a time."""
    known = replace(fpipe.Costs(bytes=lambda value: 1.0), cluster=fpipe.Cluster.parse("4 ranks; inside 1B/s shared"))
    calm, slow = (
        fpipe.robustness(NAMED["zb_h1"], lambda program: known, noise=fpipe.Noise(slow_link=factor), samples=3)
        for factor in (1, 4)
    )
    assert slow["program"].median > calm["program"].median == calm["program"].nominal


def spread() -> fpipe.Robustness:
    return fpipe.robustness(NAMED, noise=fpipe.Noise(), samples=2)


test_what_is_no_noise_is_refused = refusals(
    globals(),
    """
fpipe.Noise(jitter=-0.1)
    ValueError: jitter is a share of an op's seconds, a number from 0 to 1000000; found -0.1.
fpipe.Noise(slow_rank=0.5)
    ValueError: slow_rank is how many times as long it takes, a number from 1
fpipe.robustness({}, noise=fpipe.Noise())
    ValueError: takes a program, or several as {name: program}; found {}
fpipe.robustness(NAMED, noise=fpipe.Noise(), samples=0)
    ValueError: samples is a whole number, at least 1
spread().best("mean")
    ValueError: at "nominal", "median" or "p95"
spread()["gpipe"].at(2)
    ValueError: is from 0 to 1, found 2.
""",
)
