"""Every schedule through every law: legal, complete, the right gradients, the published numbers. One row a schedule."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fpipe
from fpipe.program import Program, ProgramError

GOLDEN = json.loads((Path(__file__).parent / "data" / "golden_schedules.json").read_text())["rows"]


class Row(NamedTuple):
    """A schedule, what the golden file calls it, and how its numbers compare: equal, or no worse."""

    name: str
    golden: tuple[str, ...] | Callable[[int], tuple[str, ...]] = ()  # or f(p)
    exact: bool = True
    stages_per_rank: int = 1
    options: dict[str, Any] = {}  # of the factory; f(p) where it depends  # noqa: RUF012
    idle: Callable[..., float] | None = None  # of p, m, v, F, B, W at c=0
    idle_costs: tuple[tuple[float, float, float], ...] = ((1, 1, 1), (3, 4, 2), (10, 12, 8))  # F, B, W where it holds
    idle_sizes: Callable[[int, int], bool] = lambda p, m: m >= 2 * p  # and p, m
    hosts: int = 0  # ranks that only hold weights
    costs: bool = False  # whether the factory takes costs= to order by
    floors: tuple[str, ...] = ("makespan", "span")  # where it is no worse
    drawn: Callable[[int, int], bool] = lambda p, m: True  # the p and m for which the order is the published one
    of: str = "makespan"  # what idle time is left of: makespan or span
    late: Callable[..., float] | None = None  # of p, m: how many transfers of c seconds add to the idle time
    peak: Callable[..., float] | None = None  # of p, m, v, r: at most, and exactly at the sizes of `idle`

    def program(self, ranks: int, microbatches: int, costs: fpipe.Costs | None = None) -> Program:
        more = {"costs": costs} if self.costs and costs is not None else {}
        about = fpipe.schedules.about(self.name)
        options = {word: value(ranks) if callable(value) else value for word, value in self.options.items()}
        return about.program(ranks, microbatches, ranks * self.stages_per_rank, **options, **more)

    def goldens(self) -> list[dict[str, Any]]:
        """Its rows in the golden file."""
        return [
            fact
            for fact in GOLDEN
            if fact["schedule"] in (self.golden(fact["p"]) if callable(self.golden) else self.golden)
        ]

    def __str__(self) -> str:
        said = "".join(f" {word}={getattr(value, '__name__', value)}" for word, value in self.options.items())
        return f"{self.name}{said}" + (f" v={self.stages_per_rank}" if self.stages_per_rank > 1 else "")


def fused(p: int, m: int, v: int, F: float, B: float, W: float) -> float:
    return (p - 1) * (F + B + W) / v


def filled(p: int, m: int, v: int, F: float, B: float, W: float) -> float:
    return (p - 1) * (F + B - W) / v


def whole_rounds(p: int, m: int) -> bool:
    return m % p == 0


def enough(p: int, m: int) -> bool:
    return m >= p


def in_group(p: int, m: int) -> int:
    """Microbatches of a round, which are evened out where p does not divide them and that is shorter."""
    return p if m < p else -(-m // (m // p))


def vpp(p: int, m: int, v: int, r: int) -> float:
    return min(m, ((v - 1) * in_group(p, m) + 2 * (p - 1 - r) + 1) / v)


def grouped(group: Callable[[int], int]) -> dict[str, Any]:
    """Group-interleaved 1F1B with groups of `group(p)`."""
    return {
        "options": {"group": group},
        "golden": lambda p: (f"GroupInterleaved v=2 g={group(p)}",),
        "idle": lambda p, m, v, F, B, W: ((p - 1) * (F + B) + (p - group(p)) * (v - 1) * (F + B - W)) / v,
        "idle_sizes": lambda p, m: m % group(p) == 0 and m >= p and p % group(p) == 0,
        "peak": lambda p, m, v, r: min(m, ((v - 1) * group(p) + p - r) / v),
    }


def full(p: int) -> int:
    return p


def half(p: int) -> int:
    return (p + 1) // 2


ROWS = [
    Row(
        "gpipe",
        ("GPipe",),
        idle=fused,
        idle_sizes=lambda p, m: True,
        late=lambda p, m: 2 * (p - 1),
        peak=lambda p, m, v, r: m,
    ),
    Row(
        "one_f_one_b",
        ("1F1B",),
        idle=fused,
        idle_sizes=lambda p, m: True,
        late=lambda p, m: 2 * (p - 1) * m / p + 2 * (p - 2) if p > 1 and m % p == 0 else None,
        peak=lambda p, m, v, r: min(m, p - r),
    ),
    Row(
        "eager_1f1b",
        ("Eager1F1B",),
        idle=fused,
        idle_sizes=lambda p, m: True,
        late=lambda p, m: 2 * (p - 1),
        peak=lambda p, m, v, r: min(m, 2 * (p - r) - 1),
    ),
    Row("interleaved", ("VPP v=2",), stages_per_rank=2, idle=fused, idle_sizes=whole_rounds, peak=vpp),
    Row("interleaved", ("VPP v=3",), stages_per_rank=3, idle=fused, idle_sizes=whole_rounds, peak=vpp),
    Row("interleaved", stages_per_rank=1, idle=fused, idle_sizes=enough, peak=vpp),
    Row(
        "kimi_k2",
        ("KimiK2 v=2",),
        stages_per_rank=2,
        idle=fused,
        idle_sizes=whole_rounds,
        peak=lambda p, m, v, r: min(m, ((v - 1) * p + 2 * (p - 1 - r) + 2) / v),
    ),
    Row("looped_bfs", ("LoopedBFS v=2",), stages_per_rank=2, idle=fused, idle_sizes=enough, peak=lambda p, m, v, r: m),
    Row(
        "interleaved_zb",
        ("InterleavedZeroBubble v=2",),
        stages_per_rank=2,
        idle=filled,
        idle_sizes=whole_rounds,
        peak=lambda p, m, v, r: min(m, p + (v - 1) * (in_group(p, m) - p) / v),
    ),
    Row("group_interleaved", stages_per_rank=2, **grouped(full)),
    Row("group_interleaved", stages_per_rank=2, **grouped(half)),
    Row("group_interleaved", stages_per_rank=3, **grouped(half) | {"golden": ()}),
    Row("zb_h1", ("ZB-H1",), idle=filled, idle_sizes=enough, peak=lambda p, m, v, r: min(m, p)),
    Row(
        "zb_h2",
        ("ZB-H2",),
        idle=lambda p, m, v, F, B, W: (p - 1) * (F + B - 2 * W),
        idle_sizes=lambda p, m: m >= 2 * p - 1,
        of="span",
        drawn=lambda p, m: m >= 2 * p - 1,
        late=lambda p, m: 2 * (p - 1),
        peak=lambda p, m, v, r: min(m, 2 * p - 1),
    ),
    Row("roundpipe", hosts=1),
    Row("roundpipe", hosts=1, stages_per_rank=2),
    Row("one_f_one_b_v", ("1F1B-V",), stages_per_rank=2, peak=lambda p, m, v, r: min(m, 4 * (p + 1) // 3 / 2)),
    Row(
        "chimera",
        ("Chimera",),
        idle=lambda p, m, v, F, B, W: (p - 2) * (m / p + 1) * F,
        idle_sizes=whole_rounds,
        peak=lambda p, m, v, r: min(p / 2, p - r, m / 2) + min(p / 2, r + 1, m / 2),
    ),
    Row(
        "dualpipe",
        ("DualPipe",),
        idle=lambda p, m, v, F, B, W: (p / 2 - 1) * (F + 2 * B - W),
        idle_costs=((3.0, 3.0, 2.0), (1, 1, 1)),
        peak=lambda p, m, v, r: p + 1,
    ),
    Row("dualpipe", options={"overlap": False}, peak=lambda p, m, v, r: p + 1),
    Row(
        "dualpipev",
        ("DualPipeV", "DualPipeV v=2"),
        stages_per_rank=2,
        idle=lambda p, m, v, F, B, W: (p - 1) * (F + 2 * B - W) / 2,
        idle_costs=((3.0, 3.0, 2.0), (1, 1, 1)),
        peak=lambda p, m, v, r: p + 1 / 2,
    ),
    Row(
        "dualpipev",
        ("DualPipeV (unpacked)",),
        exact=False,
        stages_per_rank=2,
        options={"overlap": False},
        peak=lambda p, m, v, r: p + 1 / 2,
    ),
    Row(
        "hanayo",
        stages_per_rank=2,
        idle=lambda p, m, v, F, B, W: (p - 1) * (m / p + 1) * F,
        idle_sizes=whole_rounds,
        peak=lambda p, m, v, r: min(m, p - (p - 1 - r) / v),
    ),
    Row(
        "hanayo",
        stages_per_rank=4,
        options={"waves": 2},
        idle=lambda p, m, v, F, B, W: (p - 1) * (m / p + 1) * F / 2,
        idle_sizes=whole_rounds,
        peak=lambda p, m, v, r: min(m, p - (p - 1 - r) / v),
    ),
    Row(
        "seq1f1b",
        ("Seq1F1B Q=4",),
        options={"slices": 4},
        idle=lambda p, m, v, F, B, W: (p - 1) * (F + B + W) / 4,
        idle_sizes=lambda p, m: m >= p,
        peak=lambda p, m, v, r: min(m, (p - r - 1 + 4) / 4),
    ),
    Row("bpipe", idle=fused, idle_sizes=lambda p, m: True),
    Row(
        "pipe_offload", stages_per_rank=2, idle=lambda p, m, v, F, B, W: (p - 1) * (F + B) / v, idle_sizes=whole_rounds
    ),
    Row("pipe_offload", options={"cap": 2}, idle=lambda p, m, v, F, B, W: (p - 1) * (F + B), idle_sizes=enough),
    Row(
        "zb_auto",
        ("ZB-auto 2p",),
        exact=False,
        costs=True,
        idle=lambda p, m, v, F, B, W: (p - 1) * F,
        idle_costs=((1, 1, 1),),
    ),
    Row(
        "zb_auto",
        ("ZB-auto 1p",),
        exact=False,
        costs=True,
        options={"memory_cap": lambda p: p},
        idle=filled,
        idle_costs=((1, 1, 1),),
    ),
    Row(
        "zbv",
        ("ZB-V", "ZBVZeroBubble v=2"),
        exact=False,
        floors=("makespan",),  # what it is ordered by; with transfers a shorter one has a longer span
        stages_per_rank=2,
        costs=True,
        idle=lambda p, m, v, F, B, W: (p - 1) * F / 2,
        idle_costs=((1, 1, 1),),
    ),
    Row("v_half", ("V-Half (greedy)",), exact=False, stages_per_rank=2, costs=True),
    Row("v_min", ("V-Min (greedy)",), exact=False, stages_per_rank=2, costs=True),
]
SIZES = [(ranks, microbatches) for ranks in (1, 2, 3, 4) for microbatches in (1, 2, 3, 5, 8)]

every_row = pytest.mark.parametrize("row", ROWS, ids=str)


def served(row: Row) -> list[tuple[int, int]]:
    refuses = fpipe.schedules.about(row.name).refuses
    return [(p, m) for p, m in SIZES if refuses(p, p * row.stages_per_rank, m) is None]


def share_costs(row: Row, costs: dict[str, float]) -> fpipe.Costs:
    """Golden costs are of a whole device share; ours are of one stage op."""
    parts = row.stages_per_rank * row.options.get("slices", 1)
    forward, backward, weight = (costs[letter] / parts for letter in "FBW")
    return fpipe.Costs(forward, backward, weight, transfer=costs["comm"])


def test_every_schedule_has_a_row():
    assert {row.name for row in ROWS} == set(fpipe.schedules.names())


@every_row
def test_it_serves_sizes_and_checks_with_transfers(row: Row):
    sizes = served(row)
    assert sizes
    for ranks, microbatches in sizes:
        program = row.program(ranks, microbatches)
        assert program.ranks == ranks + row.hosts
        assert program.microbatches == microbatches
        fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))


@every_row
def test_what_it_does_not_serve_is_refused_with_the_reason(row: Row):
    for ranks, microbatches in set(SIZES) - set(served(row)):
        with pytest.raises(ProgramError, match=f"{row.name}: "):
            row.program(ranks, microbatches)


@every_row
def test_idle_time_is_the_formula(row: Row):
    if row.idle is None:
        pytest.skip("the catalogue gives no formula that holds for all sizes")
    sizes = [size for size in served(row) if row.idle_sizes(*size)]
    assert sizes
    for ranks, microbatches in sizes:
        program = row.program(ranks, microbatches)
        for F, B, W in row.idle_costs:
            found = fpipe.simulate(program, share_costs(row, {"F": F, "B": B, "W": W, "comm": 0.0}))
            formula = row.idle(ranks, microbatches, row.stages_per_rank, F, B, W)
            assert getattr(found, row.of) - microbatches * (F + B + W) == pytest.approx(formula, abs=1e-9)


@every_row
def test_transfers_add_what_the_formula_says(row: Row):
    if row.idle is None or row.late is None:
        pytest.skip("the catalogue gives no formula with transfers")
    for ranks, microbatches in served(row):
        late = row.late(ranks, microbatches)
        if late is None or not row.idle_sizes(ranks, microbatches):
            continue
        costs = {"F": 3.0, "B": 4.0, "W": 2.0, "comm": 0.05}
        found = fpipe.simulate(row.program(ranks, microbatches), share_costs(row, costs))
        formula = row.idle(ranks, microbatches, row.stages_per_rank, 3.0, 4.0, 2.0) + late * 0.05
        assert getattr(found, row.of) - microbatches * 9.0 == pytest.approx(formula, abs=1e-9)


@every_row
def test_no_rank_holds_more_than_the_formula_says(row: Row):
    if row.peak is None:
        pytest.skip("the catalogue gives no formula that holds for all sizes")
    for ranks, microbatches in served(row):
        found = fpipe.simulate(row.program(ranks, microbatches)).peak
        formula = [row.peak(ranks, microbatches, row.stages_per_rank, rank) for rank in range(ranks)]
        if row.idle and row.idle_sizes(ranks, microbatches):
            assert found == pytest.approx(formula)
        else:
            assert all(held <= most + 1e-9 for held, most in zip(found, formula, strict=True))


GOLDEN_CASES = [
    pytest.param(row, fact, marks=pytest.mark.deep if fact["p"] > 4 and not row.exact else [])
    for row in ROWS
    for fact in row.goldens()
]


def case_name(case: object) -> str:
    if isinstance(case, Row):
        return str(case)
    assert isinstance(case, dict)
    costs = case["costs"]
    return f"p={case['p']} m={case['m']} F={costs['F']} B={costs['B']} W={costs['W']} c={costs['comm']}"


@pytest.mark.parametrize(("row", "fact"), GOLDEN_CASES, ids=case_name)
def test_the_simulation_gives_the_published_numbers(row: Row, fact: dict[str, Any]):
    costs = share_costs(row, fact["costs"])
    found = fpipe.simulate(row.program(fact["p"], fact["m"], costs), costs)
    peaks = fact["peak_activation_per_rank"]
    if row.exact and row.drawn(fact["p"], fact["m"]):
        assert (found.makespan, found.span) == pytest.approx((fact["makespan"], fact["span"]), abs=1e-9, rel=0)
        assert found.peak == pytest.approx(peaks, abs=1e-6)
    else:
        for what in row.floors:
            assert getattr(found, what) <= fact[what] + 1e-9
        assert max(found.peak) <= max(peaks) + 1e-6


def tanh_stage(p: dict[str, Tensor], x: Tensor) -> Tensor:
    return torch.tanh(x @ p["w"])


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


@every_row
def test_its_gradients_are_bitwise_those_of_plain_autograd(row: Row):
    ranks, microbatches = max((p, m) for p, m in served(row) if p <= 3 and m <= 8)
    program = row.program(ranks, microbatches)
    generator = torch.Generator().manual_seed(0)
    params = tuple({"w": torch.randn(4, 4, generator=generator)} for _ in range(program.stages))
    slices = program.slices
    x, target = (torch.randn(2 * microbatches, slices, 4, generator=generator) for _ in range(2))
    model = fpipe.from_functions([tanh_stage] * program.stages, loss)

    leaves = [p["w"].clone().requires_grad_() for p in params]
    expected: list[Tensor | None] = [None] * len(leaves)
    for rows, wanted in zip(x.tensor_split(microbatches), target.tensor_split(microbatches), strict=True):
        parts = zip(rows.tensor_split(slices, 1), wanted.tensor_split(slices, 1), strict=True)
        for y, part in reversed(list(parts)):  # the last slice of a sequence first; nothing looks back here
            for leaf in leaves:
                y = torch.tanh(y @ leaf)
            found = torch.autograd.grad(loss(y, part) * (len(rows) / len(x) / slices), leaves)
            expected = [new if old is None else old + new for old, new in zip(expected, found, strict=True)]

    result = fpipe.build(program, model)(params, (x, target))
    assert all(torch.equal(found["w"], right) for found, right in zip(result.grads, expected, strict=True))
