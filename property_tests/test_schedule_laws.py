"""Laws of all registered schedules, whatever their sizes and costs."""

import functools
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.program import Program, ProgramError
from fpipe.schedules import about
from property_tests.strategies import max_examples

NAMES = [name for name in fpipe.schedules.names() if about(name).source]
every_schedule = pytest.mark.parametrize(
    "name", NAMES, scope="module"
)  # all laws of a schedule in a row, on one worker

seconds = st.integers(1, 6).map(float)


@functools.cache
def served_sizes(name: str) -> list[tuple[int, int, int]]:
    """Return ranks, microbatches and stages a rank that the schedule accepts; the last vary if its formula has v."""
    schedule = about(name)
    chunk_counts = range(1, 5) if re.search(r"(?<![a-z])v(?![a-z])", schedule.idle) else (schedule.stages_per_rank,)
    sizes = itertools.product(range(1, 7), range(1, 14), chunk_counts)
    small = [(p, m, v) for p, m, v in sizes if p * m * v <= 72 and schedule.refuses(p, p * v, m) is None]
    assert small
    return small


@functools.cache
def published_program(name: str, ranks: int, microbatches: int, stages_per_rank: int) -> Program:
    """Build a schedule's program, once for all laws: a search takes longer than the laws."""
    return about(name).program(ranks, microbatches, ranks * stages_per_rank)


def programs(name: str) -> st.SearchStrategy[Program]:
    """Draw a program of sizes that the schedule accepts."""
    return st.sampled_from(served_sizes(name)).map(lambda sizes: published_program(name, *sizes))


def program_or_error(name: str, ranks: int, microbatches: int, stages: int) -> Program | str:
    try:
        return about(name).program(ranks, microbatches, stages)
    except ProgramError as error:
        return str(error)


@every_schedule
@max_examples(8)
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 13), stages=st.integers(1, 13))
def test_a_schedule_rejects_exactly_the_sizes_it_says(name: str, ranks: int, microbatches: int, stages: int):
    refusal = about(name).refuses(ranks, stages, microbatches)
    outcome = program_or_error(name, ranks, microbatches, stages)
    if isinstance(outcome, Program):
        assert refusal is None
        assert (outcome.stages, outcome.microbatches) == (stages, microbatches)
        assert {op.rank for op in outcome.ops if op.kind in "FBI"} <= set(range(ranks))
    else:
        assert refusal or stages != ranks * about(name).stages_per_rank
        assert re.match(rf"{name}: |{ranks} ranks for {stages} stages: ", outcome)


@every_schedule
@max_examples(7)
@given(data=st.data())
def test_transfers_and_frees_of_a_schedule_pass_check(name: str, data: st.DataObject):
    program = data.draw(programs(name))
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))


Formula = list[str]
QUALIFIER = re.compile(r" for |, p divides m|, m >= |, g=p|, the latter|; at |, or | at most")
"""Where a formula of the registry goes on in words: what the law draws below holds for all of them."""


def formula(text: str) -> Formula | None:
    """Return the tokens of a formula of the registry, with a * for each product; None if it is a sentence."""
    text = QUALIFIER.split(text.removeprefix("span: "))[0].replace("[", "(").replace("]", ")").replace(" ", "")
    tokens = re.findall(r"min|floor|[0-9]+|[pmvrwgFBWTQc]|//|[-+*/(),]", text)
    if not text or "".join(tokens) != text:
        return None
    products: Formula = []
    for token in tokens:
        if products and (products[-1].isalnum() or products[-1] == ")") and products[-1] not in ("min", "floor"):
            products += ["*"] * (token.isalnum() or token == "(")
        products.append(token)
    return products


def evaluate(tokens: Formula | None, **letters: float) -> float:
    return eval(" ".join(tokens or []), {"min": min, "floor": math.floor}, letters)


def test_formulas_read_as_they_are_printed():
    assert formula("in words") is None
    assert evaluate(formula("(p-1)T + [2(p-1)m/p + 2(p-2)]c"), p=4, T=9, m=8, c=1) == 43
    assert evaluate(formula("min(m, ((v-1)p + 2(p-1-r) + 1)/v)"), p=4, v=2, m=9, r=1) == 4.5


IDLE = [name for name in NAMES if formula(about(name).idle)]
PEAK = [name for name in NAMES if formula(about(name).peak)]


def test_most_schedules_have_a_formula():
    assert len(IDLE) >= 16
    assert len(PEAK) >= 19


@pytest.mark.parametrize("name", IDLE, scope="module")
@max_examples(8)
@given(data=st.data(), F=seconds, B=seconds, difference=st.integers(0, 5))
def test_a_schedule_idles_as_its_formula_says(name: str, data: st.DataObject, F: float, B: float, difference: int):
    text = about(name).idle
    sizes = [(p, m, v) for p, m, v in served_sizes(name) if 1 < p <= m // 2 and m % p == 0]
    p, m, v = data.draw(st.sampled_from(sizes))
    B = F if "F=B" in text else min(B, 2 * F - 0.5) if "2F" in text else B
    W = 2 * F - B if "B+W=2F" in text else max(1.0, min(F, B) - difference)
    c = 0.01 if "c" in text.partition(",")[0] else 0.0
    program = published_program(name, p, m, v)
    parts = v * program.slices
    timeline = fpipe.simulate(program, fpipe.Costs(F / parts, B / parts, W / parts, transfer=c))
    seconds_taken = timeline.span if text.startswith("span: ") else timeline.makespan
    letters = {"p": p, "m": m, "v": v, "w": v / 2, "Q": program.slices, "T": F + B + W, "c": c}
    expected = evaluate(formula(text), F=F, B=B, W=W, **letters)
    assert seconds_taken - m * (F + B + W) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", PEAK, scope="module")
@max_examples(8)
@given(data=st.data())
def test_no_rank_holds_more_than_its_formula_says(name: str, data: st.DataObject):
    """If p divides m and m >= 2p, each rank holds exactly that."""
    divided = about(name).peak.endswith(", p divides m")
    sizes = [size for size in served_sizes(name) if not divided or size[1] % size[0] == 0]
    ranks, microbatches, stages_per_rank = data.draw(st.sampled_from(sizes))
    program = published_program(name, ranks, microbatches, stages_per_rank)
    letters = {"p": ranks, "m": microbatches, "v": stages_per_rank, "g": ranks, "Q": program.slices}
    for rank, peak in enumerate(fpipe.simulate(program).peak):
        limit = evaluate(formula(about(name).peak), r=rank, **letters)
        assert peak <= limit + 1e-9
        if name in IDLE and "cap" not in about(name).peak and microbatches % ranks == 0 and microbatches >= 2 * ranks:
            assert peak == pytest.approx(limit)
