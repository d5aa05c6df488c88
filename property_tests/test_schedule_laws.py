"""Laws of the published schedules, whatever their sizes and costs. A schedule that is registered is under them."""

from __future__ import annotations

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
from property_tests.strategies import few

NAMES = [name for name in fpipe.schedules.names() if about(name).source]
every_schedule = pytest.mark.parametrize(
    "name", NAMES, scope="module"
)  # all laws of a schedule in a row, on one worker

seconds = st.integers(1, 6).map(float)


@functools.cache
def served(name: str) -> list[tuple[int, int, int]]:
    """Ranks, microbatches and stages a rank that the schedule says it serves; the last vary where its formulas do."""
    schedule = about(name)
    each = range(1, 5) if re.search(r"(?<![a-z])v(?![a-z])", schedule.idle) else (schedule.stages_per_rank,)
    sizes = itertools.product(range(1, 7), range(1, 14), each)
    small = [(p, m, v) for p, m, v in sizes if p * m * v <= 72 and schedule.refuses(p, p * v, m) is None]
    assert small
    return small


@functools.cache
def published(name: str, ranks: int, microbatches: int, each: int) -> Program:
    """Made once for all laws: what is searched takes longer to make than to judge."""
    return about(name).program(ranks, microbatches, ranks * each)


def programs(name: str) -> st.SearchStrategy[Program]:
    """A program of sizes that the schedule serves."""
    return st.sampled_from(served(name)).map(lambda sizes: published(name, *sizes))


def program_or_why(name: str, ranks: int, microbatches: int, stages: int) -> Program | str:
    try:
        return about(name).program(ranks, microbatches, stages)
    except ProgramError as error:
        return str(error)


@every_schedule
@few(8)
@given(ranks=st.integers(1, 6), microbatches=st.integers(1, 13), stages=st.integers(1, 13))
def test_it_serves_its_sizes_and_says_why_not_the_others(name: str, ranks: int, microbatches: int, stages: int):
    refusal = about(name).refuses(ranks, stages, microbatches)
    made = program_or_why(name, ranks, microbatches, stages)
    if isinstance(made, Program):
        assert refusal is None
        assert (made.stages, made.microbatches) == (stages, microbatches)
        assert {op.rank for op in made.ops if op.kind in "FBI"} <= set(range(ranks))
    else:
        assert refusal or stages != ranks * about(name).stages_per_rank
        assert re.match(rf"{name}: |{ranks} ranks for {stages} stages: ", made)


@every_schedule
@few(7)
@given(data=st.data())
def test_its_transfers_and_frees_check(name: str, data: st.DataObject):
    program = data.draw(programs(name))
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))


Formula = list[str]
WHERE = re.compile(r" for |, p divides m|, m >= |, g=p|, the latter|; at |, or | at most")
"""Where a formula of the registry goes on in words: what the law draws below holds for all of them."""


def formula(text: str) -> Formula | None:
    """The tokens of a formula of the registry, with its products written out; None if it is a sentence."""
    text = WHERE.split(text.removeprefix("span: "))[0].replace("[", "(").replace("]", ")").replace(" ", "")
    tokens = re.findall(r"min|floor|[0-9]+|[pmvrwgFBWTQc]|//|[-+*/(),]", text)
    if not text or "".join(tokens) != text:
        return None
    out: Formula = []
    for token in tokens:
        if out and (out[-1].isalnum() or out[-1] == ")") and out[-1] not in ("min", "floor"):
            out += ["*"] * (token.isalnum() or token == "(")
        out.append(token)
    return out


def value(tokens: Formula | None, **letters: float) -> float:
    return eval(" ".join(tokens or []), {"min": min, "floor": math.floor}, letters)


def test_formulas_read_as_they_are_printed():
    assert formula("in words") is None
    assert value(formula("(p-1)T + [2(p-1)m/p + 2(p-2)]c"), p=4, T=9, m=8, c=1) == 43
    assert value(formula("min(m, ((v-1)p + 2(p-1-r) + 1)/v)"), p=4, v=2, m=9, r=1) == 4.5


IDLE = [name for name in NAMES if formula(about(name).idle)]
PEAK = [name for name in NAMES if formula(about(name).peak)]


def test_most_schedules_have_a_formula():
    assert len(IDLE) >= 16
    assert len(PEAK) >= 19


@pytest.mark.parametrize("name", IDLE, scope="module")
@few(8)
@given(data=st.data(), F=seconds, B=seconds, less=st.integers(0, 5))
def test_it_idles_as_its_formula_says(name: str, data: st.DataObject, F: float, B: float, less: int):
    text = about(name).idle
    p, m, v = data.draw(st.sampled_from([(p, m, v) for p, m, v in served(name) if 1 < p <= m // 2 and m % p == 0]))
    B = F if "F=B" in text else min(B, 2 * F - 0.5) if "2F" in text else B
    W = 2 * F - B if "B+W=2F" in text else max(1.0, min(F, B) - less)
    c = 0.01 if "c" in text.partition(",")[0] else 0.0
    program = published(name, p, m, v)
    parts = v * program.slices
    found = fpipe.simulate(program, fpipe.Costs(F / parts, B / parts, W / parts, transfer=c))
    took = found.span if text.startswith("span: ") else found.makespan
    letters = {"p": p, "m": m, "v": v, "w": v / 2, "Q": program.slices, "T": F + B + W, "c": c}
    expected = value(formula(text), F=F, B=B, W=W, **letters)
    assert took - m * (F + B + W) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize("name", PEAK, scope="module")
@few(8)
@given(data=st.data())
def test_no_rank_holds_more_than_its_formula_says(name: str, data: st.DataObject):
    """And where p divides many microbatches a rank holds just as much."""
    divided = about(name).peak.endswith(", p divides m")
    sizes = [size for size in served(name) if not divided or size[1] % size[0] == 0]
    ranks, microbatches, each = data.draw(st.sampled_from(sizes))
    program = published(name, ranks, microbatches, each)
    letters = {"p": ranks, "m": microbatches, "v": each, "g": ranks, "Q": program.slices}
    for rank, held in enumerate(fpipe.simulate(program).peak):
        most = value(formula(about(name).peak), r=rank, **letters)
        assert held <= most + 1e-9
        if name in IDLE and "cap" not in about(name).peak and microbatches % ranks == 0 and microbatches >= 2 * ranks:
            assert held == pytest.approx(most)
