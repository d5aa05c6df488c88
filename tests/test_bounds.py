"""Lower bounds equal their formulas for uniform stages, and no schedule falls below them."""

import itertools
import math
import random
import re
from typing import Any
from unittest.mock import Mock

import pytest

import fpipe
from fpipe.program import Program
from fpipe.timing.bounds import _backward_times

F, B, W, C = 3.0, 4.0, 2.0, 0.5
UNIFORM = fpipe.Costs(F, B, W, transfer=C)
T = F + B + W
SIZES = [(p, m) for p in (1, 2, 3, 5) for m in (1, 2, 3, 8, 11)]


def linear(p: int, m: int, split: bool) -> Program:
    backward = fpipe.split_backward() if split else fpipe.identity()
    return fpipe.chain(fpipe.split(m), fpipe.schedules.one_f_one_b(p), backward, fpipe.merge())(fpipe.program(p))


FORMULAS = {
    "head": lambda p, m: (p - 1) * (F + C) + m * T,
    "fused": lambda p, m: (m + p - 1) * T + 2 * (p - 1) * C,
    "drain": lambda p, m: (m + p - 1) * (F + B) + W + 2 * (p - 1) * C,
}


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("name", FORMULAS)
def test_bounds_equal_their_formulas(name: str, p: int, m: int):
    bounds = fpipe.bounds(linear(p, m, name != "fused"), UNIFORM)
    assert getattr(bounds, name).makespan == pytest.approx(FORMULAS[name](p, m))


@pytest.mark.parametrize(("p", "m"), SIZES)
@pytest.mark.parametrize("k", [1, 2, 4, math.inf])
def test_bounds_under_a_memory_cap_equal_their_formulas(p: int, m: int, k: float):
    bounds = fpipe.bounds(linear(p, m, True), UNIFORM, memory_cap=k)
    life = p * F + p * B + W + 2 * (p - 1) * C
    assert bounds.lifespan.ranks[0] == pytest.approx(life * math.ceil(m / k) if k < m else life)
    if k <= m:
        spans = [m * T + max(0, (p - 1 - r) * (B + 2 * C) + (p - r - k) * F) for r in range(p)]
        assert bounds.warm_up.spans == pytest.approx(spans)


@pytest.mark.parametrize("policy", ["looped", "v"])
def test_the_head_of_chunked_placements_equals_its_formula(policy: str):
    p, m, v = 4, 5, 2
    program = fpipe.chain(fpipe.split(m), fpipe.place(policy, ranks=p))(fpipe.program(p * v))
    costs = fpipe.Costs(F / v, B / v, W / v, transfer=C)
    assert fpipe.bounds(program, costs).head.makespan == pytest.approx((p - 1) * (F / v + C) + m * T)


def test_the_head_of_bidirectional_pipelines_equals_its_formula():
    p, m = 6, 8
    program = fpipe.chain(fpipe.split(m), fpipe.schedules.chimera(p))(fpipe.program(p))
    assert fpipe.bounds(program, UNIFORM).head.makespan == pytest.approx((p / 2 - 1) * (F + C) + m * T)


def test_unequal_stages_have_windows_of_their_own():
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2))(fpipe.program(2))
    bounds = fpipe.bounds(program, fpipe.Costs([1, 5], [1, 5], [1, 5], transfer={(0, 1): 2, (1, 0): 3}))
    assert bounds.fused.ranks == (6, (1 + 2) + 2 * 15 + (3 + 2))
    assert (bounds.binding.name, bounds.binding.rank) == ("fused", 1)


def test_a_gap_is_a_share_of_the_bound():
    slow = fpipe.chain(fpipe.split(2), fpipe.place("linear"))(fpipe.program(2))
    assert fpipe.bounds(slow, memory_cap=2).gap(fpipe.simulate(slow)) == pytest.approx(12 / 9 - 1)


@pytest.mark.parametrize("cap", [math.nan, -1, [1, -2]])
def test_invalid_memory_caps_are_refused(cap: Any):
    wrong_cap = cap[1] if isinstance(cap, list) else cap
    message = f"memory_cap is in microbatches, at least 0; found {wrong_cap!r}."
    with pytest.raises(ValueError, match=re.escape(message)):
        fpipe.bounds(linear(2, 2, False), memory_cap=cap)


def test_bounds_of_many_stages_are_fast():
    """Used to take minutes for 2000 stages: quadratic in stages for each microbatch, though all are alike."""
    program = fpipe.chain(fpipe.split(8), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(200))
    with pytest.MonkeyPatch.context() as patch:
        backward_times = Mock(wraps=_backward_times)
        patch.setattr("fpipe.timing.bounds._backward_times", backward_times)
        assert fpipe.bounds(program).gap(fpipe.simulate(program)) == pytest.approx(0.0)
        # Once for the first microbatch, once for all further ones, which add, and once for the ops of none.
        assert backward_times.call_count == 3
        # With this limit even one op of each kind is too many, so warm-up and lifespan give no bound.
        patch.setattr("fpipe.timing.bounds._MAX_OP_PAIRS", 0)
        bounds = fpipe.bounds(program)
    assert bounds.lifespan.makespan == 0.0 < bounds.makespan
    assert str(bounds).endswith("\nwarm-up and lifespan leave memory out: a microbatch has too many ops.")
    moved = fpipe.chain(fpipe.split(4), fpipe.schedules.bpipe(4), fpipe.merge())(fpipe.program(4))
    assert str(fpipe.bounds(moved)).endswith("leave memory out: residuals leave their rank.")


ROWS = [
    row
    for row in itertools.permutations(["F0", "F1", "B0", "B1"])
    if all(row.index(f"F{microbatch}") < row.index(f"B{microbatch}") for microbatch in (0, 1))
]


@pytest.mark.parametrize("seed", range(4))
def test_no_order_at_all_beats_the_bound_of_costs_of_microbatches(seed: int):
    """Of two stages and microbatches all orders are simulated: the bound is below each, and the search finds the best
    of those that keep the order of microbatches."""
    draw = random.Random(seed)
    forward, backward = ([[draw.randint(1, 5) for _ in range(2)] for _ in range(2)] for _ in range(2))
    costs = fpipe.Costs(forward, 0, 0, backward=backward)
    best_in_order = best = math.inf
    for rows in itertools.product(ROWS, repeat=2):
        table = "\n".join(" ".join(f"{stage}{cell}" for cell in row) for stage, row in enumerate(rows))
        try:
            program = fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(table))(fpipe.program(2))
        except fpipe.ProgramError:  # these ranks wait for one another
            continue
        makespan = fpipe.simulate(program, costs).makespan
        assert fpipe.bounds(program, costs, memory_cap=2).makespan <= makespan
        best = min(best, makespan)
        if all(row.index("F0") < row.index("F1") and row.index("B0") < row.index("B1") for row in rows):
            best_in_order = min(best_in_order, makespan)
    searched = fpipe.search(2, costs, ranks=2, microbatches=2, placement="linear", split_backward=False, seconds=0.05)
    assert searched.bound <= best <= searched.timeline.makespan <= best_in_order
