"""`balance` splits layers into parts such that the largest part costs as little as possible."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe


def test_six_growing_layers_are_split_after_the_fourth():
    assert fpipe.balance([1, 2, 3, 4, 5, 6], 2) == [4, 2]


@given(st.lists(st.floats(0, 10) | st.integers(0, 10), min_size=1, max_size=9), st.data())
def test_the_largest_part_costs_as_little_as_brute_force_finds(costs: list[float], draws: st.DataObject):
    parts = draws.draw(st.integers(1, len(costs)))
    sizes = fpipe.balance(costs, parts)

    def largest(ends: tuple[int, ...]) -> float:
        return max(sum(costs[start:end]) for start, end in pairwise((0, *ends, len(costs))))

    ends = tuple(sum(sizes[:part]) for part in range(1, parts))
    least_cost = min(map(largest, combinations(range(1, len(costs)), parts - 1)))
    assert len(sizes) == parts
    assert sum(sizes) == len(costs)
    assert largest(ends) == pytest.approx(least_cost, rel=1e-12)


def test_equal_layers_make_even_parts():
    assert fpipe.balance([1.0] * 10, 4) == [3, 3, 2, 2]
    assert fpipe.balance([0] * 7, 3) == [3, 2, 2]


def test_parameter_memory_counts_optimizer_state():
    assert fpipe.balance([4, 4, 1, 1], 2, parameters=[0, 0, 3, 3]) == [3, 1]
    assert fpipe.balance([4, 4, 1, 1], 2, parameters=[0, 0, 3, 3], scale=0) == [1, 3]


def test_a_thousand_layers_are_balanced_quickly():
    costs = [1 + index % 7 for index in range(1000)]
    sizes = fpipe.balance(costs, 64)
    assert sum(sizes) == 1000


@pytest.mark.parametrize("parts", [0, 4, -1])
def test_impossible_part_counts_are_refused(parts: int):
    with pytest.raises(ValueError, match=r"3 layers make 1 to 3 parts, found parts="):
        fpipe.balance([1, 2, 3], parts)


@pytest.mark.parametrize("cost", [-1, float("nan"), float("inf")])
def test_invalid_costs_are_refused(cost: float):
    with pytest.raises(ValueError, match="the cost of layer 1 is a number, at least 0; found"):
        fpipe.balance([1, cost, 3], 2)
