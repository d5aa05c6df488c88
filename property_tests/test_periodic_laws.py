"""Laws of scale: what is read off runs is what a simulation of the whole program says, at every size that fits."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import fpipe
from fpipe.orders.runs import Run
from fpipe.schedules.periodic_orders import PERIODIC

SECONDS = st.sampled_from([0.1, 1, 2, 0.7, 3.3, 1e-3])


@st.composite
def sized(draw: st.DrawFn) -> tuple[str, int, int]:
    """A schedule and a size that it serves."""
    name = draw(st.sampled_from([*PERIODIC]))
    ranks, microbatches = draw(st.integers(1, 6)), draw(st.integers(1, 26))
    order, known = PERIODIC[name], fpipe.schedules.about(name)
    if order.refuses(ranks, microbatches) and not order.refuses(ranks, ranks * microbatches):
        microbatches *= ranks
    assume(not order.refuses(ranks, microbatches))
    assume(not known.refuses(ranks, known.wants(ranks, {}), microbatches))
    return name, ranks, microbatches


@st.composite
def costs(draw: st.DrawFn, stages: int) -> fpipe.Costs:
    per_stage = st.one_of(SECONDS, st.lists(SECONDS, min_size=stages, max_size=stages))
    pair, transfer = draw(st.sampled_from(["sum", "max"])), draw(st.sampled_from([0, 0.3, 1, 7.7]))
    return fpipe.Costs(*(draw(per_stage) for _ in range(3)), transfer=transfer, pair=pair)


def written(run: Run) -> Iterator[str]:
    """The cells of a run, turn by turn."""
    for turn in range(run.turns):
        for cell in run.cells:
            names = [f"{part.stage}{part.kind}{part.first + turn * part.step}" for part in cell]
            yield f"({';'.join(names)})" if len(names) > 1 else names[0]


@given(sized())
def test_runs_written_out_are_the_rows_of_the_program(size: tuple[str, int, int]):
    name, ranks, microbatches = size
    rows = fpipe.schedules.about(name).program(ranks, microbatches).table()
    found = PERIODIC[name].rows(ranks, microbatches)
    assert [[*chain.from_iterable(map(written, runs))] for runs in found] == [[*row] for row in rows]


@given(sized(), st.data())
def test_times_and_peaks_from_runs_are_those_of_the_simulation(size: tuple[str, int, int], data: st.DataObject):
    name, ranks, microbatches = size
    program = fpipe.schedules.about(name).program(ranks, microbatches)
    drawn = data.draw(costs(program.stages))
    whole, found = fpipe.simulate(program, drawn), fpipe.periodic(name, ranks, microbatches, drawn)
    assert (found.makespan, found.span) == (whole.makespan, whole.span)
    assert (found.peak, found.peak_released) == (whole.peak, whole.peak_released)
    shares = (found.idle, found.bubble, found.bubble_span), (whole.idle, whole.bubble, whole.bubble_span)
    assert shares[0] == pytest.approx(shares[1], abs=1e-9)
