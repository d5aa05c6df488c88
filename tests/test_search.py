"""A search is never worse than a named schedule, never below a proven bound, never over its cap; and its result
runs."""

import inspect
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fpipe
from fpipe.finding import search as module
from fpipe.finding import solver
from fpipe.finding.search_result import ScheduleTable, schedule_table_of
from fpipe.program import Value
from property_tests.strategies import tiny

OPTIMA = json.loads((Path(__file__).parent / "data" / "search_optima.json").read_text())
TEN = fpipe.Costs(5, 6, 4)  # F=10, B=12, W=8 of a rank with two stages
OFFLOADING = ("bpipe", "pipe_offload")
COSTS = [
    fpipe.Costs(),
    TEN,
    fpipe.Costs(10, 11, 6, transfer=2),
    fpipe.Costs(3, 4, 2, transfer=1, backward=5),
    fpipe.Costs(1, 1, 3, recompute=0.5, transfer={(a, b): a + 0.5 * b for a in range(8) for b in range(8)}),
    fpipe.Costs(4, 6, 1),
]


def step(stages: int, microbatches: int) -> fpipe.Program:
    return fpipe.chain(fpipe.split(microbatches), fpipe.merge())(fpipe.program(stages))


def quick(*sizes: Any, **options: Any) -> fpipe.SearchResult:
    return fpipe.search(*sizes, **({"seconds": 0.04, "solver": "local", "without": OFFLOADING} | options))


def costs_of(fact: dict[str, Any]) -> fpipe.Costs:
    seconds = (fact[name] for name in ("forward", "backward_input", "backward_weight"))
    return fpipe.Costs(*seconds, transfer=fact["transfer"])


def search_optimum(fact: dict[str, Any], seconds: float, solver_name: str) -> fpipe.SearchResult:
    sizes = {name: fact[name] for name in ("ranks", "microbatches", "placement", "memory_cap", "objective")}
    result = fpipe.search(
        fact["stages"], costs_of(fact), **sizes, seconds=seconds, solver=solver_name, without=OFFLOADING
    )  # type: ignore[arg-type]
    assert max(result.timeline.peak) <= fact["memory_cap"] + 1e-9
    assert result.bound <= fact["optimum"] + 1e-6
    assert result.value >= fact["optimum"] - 1e-6
    return result


@pytest.mark.parametrize("number", range(0, len(OPTIMA), 10))
def test_a_search_never_beats_a_proven_optimum(number: int):
    search_optimum(OPTIMA[number], 0.02, "local")


@pytest.mark.parametrize("number", [33, 54])
def test_room_for_the_oldest_microbatch_alone_reaches_the_optimum(number: int):
    """Used to keep room for all begun microbatches, and so to end 1.7 % and 2.6 % above the optimum."""
    result = search_optimum(OPTIMA[number], 0.2, "local")
    assert result.value == pytest.approx(OPTIMA[number]["optimum"])


def test_a_short_search_spends_time_on_its_best_orders():
    """Used to spend all time on eight orders side by side: 368 on a V under a cap of 2.5."""
    options = {"ranks": 4, "microbatches": 6, "placement": "v", "memory_cap": 2.5, "seconds": 0.17}
    assert quick(8, fpipe.Costs(8, 6, 9, transfer=1), **options).value <= 364


@pytest.mark.deep
@pytest.mark.timeout(0)
def test_nineteen_of_twenty_proven_optima_are_found_without_the_solver():
    facts = [fact for fact in OPTIMA if fact["placement"] != "looped"]
    reached = sum(search_optimum(fact, 2, "local").value <= fact["optimum"] + 1e-6 for fact in facts)
    assert reached >= 0.95 * len(facts)


@pytest.mark.deep
@pytest.mark.timeout(0)
@pytest.mark.parametrize("number", range(len(OPTIMA)))
def test_all_proven_optima_are_found_and_proven_with_the_solver(number: int):
    result = search_optimum(OPTIMA[number], 60, "cp-sat")
    assert result.value == pytest.approx(OPTIMA[number]["optimum"])


def test_the_solver_improves_and_proves():
    costs = fpipe.Costs(5, 6, 4)
    result = fpipe.search(6, costs, ranks=3, microbatches=3, placement="v", memory_cap=1.5, seconds=8, solver="cp-sat")
    assert result.gap == 0
    assert result.bound > fpipe.bounds(result.program, costs, memory_cap=1.5).makespan


def test_a_search_beats_every_named_schedule_on_a_v():
    """The published V-Min takes 344, and 321 is proven optimal."""
    result = quick(8, TEN, ranks=4, microbatches=8, placement="v", memory_cap=2, seconds=0.1)
    assert 321 <= result.timeline.makespan <= 330
    assert max(result.timeline.peak) == 2


def options_of(name: str, ranks: int, cap: float | None) -> list[dict[str, Any]]:
    """Return combinations of the options of a schedule, apart from costs."""
    parameters = inspect.signature(fpipe.schedules.get(name)).parameters
    choices: list[dict[str, Any]] = [{}]
    choices += [{"overlap": False}] if "overlap" in parameters else []
    choices += [{"group": group} for group in (-(-ranks // 2), ranks) if "group" in parameters]
    if cap is not None:
        choices += [options | {"cap": cap} for options in choices if "cap" in parameters]
    return choices


def never_worse(
    ranks: int, stages: int, microbatches: int, costs: fpipe.Costs, cap: float | None, **search_options: Any
) -> fpipe.SearchResult:
    base = step(stages, microbatches)
    result = quick(base, costs, ranks=ranks, memory_cap=cap, **({"without": ()} | search_options))
    assert cap is None or max(result.timeline.peak) <= cap + 1e-9
    assert result.bound <= result.value * (1 + 1e-9)
    for name in {*fpipe.schedules.names()} - {*search_options.get("without", ())}:
        about = fpipe.schedules.about(name)
        costs_options: list[dict[str, Any]] = [{}] if about.searches else [{}, {"costs": costs}]
        for factory_options in (
            costs_option | options for costs_option in costs_options for options in options_of(name, ranks, cap)
        ):
            try:
                program = about.factory(ranks, **factory_options)(base)
            except (ValueError, TypeError):
                continue
            timeline = fpipe.simulate(program, costs)
            fits = cap is None or max(timeline.peak) <= cap + 1e-9
            refused = ("R", "I") if search_options.get("split_backward") is False else ("R",)
            if fits and program.ranks == ranks and not any(op.kind in refused for op in program.ops):
                assert result.value <= getattr(timeline, result.objective) * (1 + 1e-9), (name, factory_options)
    return result


PAST_FAULTS = [
    # 31 seconds were found, and no less than 32 was said to be possible, with halves everywhere.
    (2, 2, 3, COSTS[3], 3),
    # interleaved took even groups where they divide: from 9 and 13 microbatches it was told wrong what 21 take.
    (2, 4, 21, fpipe.Costs(4, [5, 8, 6, 2], [1, 7, 3, 2], transfer=1, offload=12), 4),
    # pipe_offload with a smaller group, and zb_auto by other costs than these, were no candidates.
    (3, 3, 25, fpipe.Costs(5, 6, 4), 2.25),
]


@pytest.mark.parametrize("case", PAST_FAULTS, ids=lambda case: f"m={case[2]}")
def test_a_search_is_never_worse_than_a_named_schedule(case: Any):
    never_worse(*case)


@pytest.mark.parametrize("name", [name for name in fpipe.schedules.names() if name not in ("roundpipe", "seq1f1b")])
def test_a_schedule_table_reproduces_its_schedule(name: str):
    """Covers bpipe and pipe_offload, whose residuals are offloaded, and chimera with its two replicas."""
    about = fpipe.schedules.about(name)
    base = step(about.stage_count(4, {}), 8)
    program = about.factory(4)(base)
    table = schedule_table_of(program)
    assert (
        ScheduleTable.from_json(table.to_json())
        == ScheduleTable.from_csv(table.to_csv(), replicated=table.replicated)
        == table
    )
    assert fpipe.simulate(table(base), COSTS[2]).peak == fpipe.simulate(program, COSTS[2]).peak
    if name != "pipe_offload":  # a LOAD and an OFFLOAD of one moment stand in another order there
        assert table(base) == program


def test_a_schedule_table_keeps_recomputes():
    program = fpipe.chain(fpipe.checkpoint("except_last"), fpipe.schedules.zb_h1(3))(step(3, 5))
    table = schedule_table_of(program)
    assert table(step(3, 5)) == program
    assert ScheduleTable.from_csv(table.to_csv())(step(3, 5)) == program


RUN: list[dict[str, Any]] = [
    {"placement": "v", "memory_cap": 1.5},
    {"placement": "looped", "split_backward": False},
    {"memory_cap": 1, "checkpoint": "auto"},
    {"checkpoint": "always", "objective": "span"},
    {},
]


@pytest.mark.parametrize("options", RUN, ids=str)
def test_a_found_schedule_has_the_bits_of_autograd(options: dict[str, Any]):
    """The schedule is applied to another program of the same sizes."""
    net = tiny(("batch", 0, 1, 2))
    model, params, batch = net.model, net.params(), net.batch(9)
    search = quick(model, COSTS[3], ranks=2, microbatches=4, **options)
    program = fpipe.chain(fpipe.split(4), search.schedule, fpipe.merge())(fpipe.program(model))
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))
    assert fpipe.verify(program, model, params, batch).bitwise
    local_result, threaded_result = (
        fpipe.build(program, model, runtime=name)(params, batch) for name in ("local", "threads")
    )
    results = ((result.loss, result.grads) for result in (local_result, threaded_result))
    assert all(map(torch.equal, *map(fpipe.tree.leaves, results)))
    assert fpipe.simulate(program, COSTS[3]).makespan == pytest.approx(search.timeline.makespan)


@pytest.mark.parametrize("placement", ["linear", "v", "looped", [0, 1, 1, 0, 1, 0]])
@pytest.mark.parametrize("split_backward", [True, False])
def test_a_search_keeps_to_its_placement_and_split(placement: Any, split_backward: bool):
    result = quick(6, TEN, ranks=2, microbatches=4, placement=placement, split_backward=split_backward)
    transform = fpipe.place(placement, ranks=2 if isinstance(placement, str) else None)
    assert result.program.placement == transform(step(6, 4)).placement
    assert {op.kind for op in result.program.ops} & {"B", "I", "W"} == ({"I", "W"} if split_backward else {"B"})


def test_unequal_stages_may_be_placed_anywhere():
    costs = fpipe.Costs([9, 1, 1, 1], [9, 1, 1, 1], [9, 1, 1, 1])
    result = quick(4, costs, ranks=2, microbatches=6, seconds=0.4, without=("chimera", "dualpipe", *OFFLOADING))
    best = min(
        quick(4, costs, ranks=2, microbatches=6, placement=placement).value for placement in ("linear", "looped", "v")
    )
    assert result.value < best


def test_any_stages_may_be_recomputed():
    """Used to recompute the first stages only, whatever that costs."""
    costs = fpipe.Costs(3, 3, 3, recompute=[9, 0.5, 9, 0.5])
    options: dict[str, Any] = {"ranks": 2, "microbatches": 4, "memory_cap": 1, "placement": "linear", "seconds": 0.2}
    result = quick(4, costs, checkpoint="auto", **options)
    recomputed_stages = {op.stage for op in result.program.ops if op.kind == "R"}
    assert recomputed_stages <= {1, 3}
    assert recomputed_stages
    recomputed_first = quick(4, costs, checkpoint=lambda stage, _: stage == 0, **(options | {"seconds": 0.04}))
    assert result.value < recomputed_first.value == 108  # the best of the first ones
    assert result.schedule(step(4, 4)) == result.program


def test_a_cap_in_bytes_limits_the_peak():
    sizes = {"res": 100, "y": 10, "dx": 10, "wres": 40, "g": 5, "sum": 5, "dy": 10}
    costs = fpipe.Costs(2, 3, 2, bytes=lambda value: sizes.get(value.name, 0))
    free = quick(3, costs, ranks=3, microbatches=6)
    cap = 0.6 * max(free.timeline.peak)
    capped = quick(3, costs, ranks=3, microbatches=6, memory_cap=cap)
    assert max(capped.timeline.peak) <= cap
    assert capped.value >= free.value


class UntilW:
    """Sizes that count residuals only: one byte a microbatch, with the share that W needs after I."""

    def __init__(self, w_share: float) -> None:
        self.w_share = w_share

    def storages(self, value: Value) -> dict[Any, float]:
        until_w, until_i = {("late", *value[1:3]): self.w_share}, {("early", *value[1:3]): 1 - self.w_share}
        return {"res": until_w | until_i, "wres": until_w}.get(value.name, {})

    def size(self, value: Value) -> float:
        return 0.0


@pytest.mark.parametrize("solver_name", ["local", pytest.param("cp-sat", marks=pytest.mark.deep)])
def test_residuals_that_i_frees_make_room(solver_name: str):
    """Used to count residuals until W, which left a third of the bytes unused."""
    options: dict[str, Any] = {"ranks": 3, "microbatches": 6, "memory_cap": 3.0, "placement": "linear"}
    options |= {"solver": solver_name, "seconds": 0.2 if solver_name == "local" else 5}
    bytes_options: Any = (UntilW(0.0), UntilW(1.0), None)
    until_i, until_w, plain = (
        quick(3, fpipe.Costs(4, 5, 3, bytes=bytes_option), **options).value for bytes_option in bytes_options
    )
    assert until_i < until_w == plain


@pytest.mark.parametrize(
    ("stages", "options"),
    [(4, {"memory_cap": 3}), pytest.param(8, {"placement": "v", "memory_cap": 3}, marks=pytest.mark.deep)],
)
def test_a_long_step_is_a_short_one_repeated(stages: int, options: dict[str, Any]):
    costs = fpipe.Costs(5, 6, 4, transfer=1)
    result = quick(stages, costs, ranks=4, microbatches=101, **options)
    short = quick(stages, costs, ranks=4, microbatches=13, **options)
    pace = (result.value - short.value) / (101 - 13)
    assert max(result.timeline.peak) <= options.get("memory_cap", math.inf)
    assert 30 * stages / 8 <= 2 * pace <= 2 * short.value / 13


def test_a_schedule_that_takes_costs_is_also_tried_without():
    """With costs, one_f_one_b_v takes an order that holds more than 2.5; as published its span is 518."""
    costs = fpipe.Costs([3, 2, 7, 8, 8, 3], [8, 4, 8, 7, 6, 8], [8, 4, 4, 6, 2, 2])
    result = never_worse(3, 6, 12, costs, 2.5, split_backward=False, objective="span", without=OFFLOADING)
    assert result.value <= 518
    assert "interleaved without costs" not in {row.name for row in result.named}  # it is the same where p divides m


def test_ctrl_c_returns_the_best_so_far():
    reports: list[tuple[float, float, float]] = []

    def stop(share: float, best: float, bound: float) -> None:
        reports.append((share, best, bound))
        if len(reports) == 1:
            raise KeyboardInterrupt

    options: dict[str, Any] = {"ranks": 4, "microbatches": 8, "placement": "looped", "memory_cap": 3}
    result = quick(8, TEN, progress=stop, **options)
    assert not result.complete
    assert "stopped" in repr(result)
    share, best, bound = reports[0]
    assert 0 < share <= 1
    assert bound <= result.value <= best
    assert quick(8, TEN, **options).complete


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"placement": [0, 0, 0, 0]}, "a placement uses each of the ranks 0..1, found"),
    ({"placement": [0, 1]}, "the placement lists 2 ranks for 4 stages"),
    ({"memory_cap": -1}, "memory_cap is a number above 0, found -1."),
    ({"seconds": 0}, "seconds is a number above 0, found 0."),
    ({"seed": -1}, "seed is a whole number, at least 0; found -1."),
    ({"without": ["chimaera"]}, "there is no schedule 'chimaera'; did you mean chimera?"),
    ({"microbatches": None}, "microbatches is missing, the number to split into."),
    ({"ranks": 0}, "ranks is a whole number, at least 1; found 0."),
    ({"ranks": 5}, "5 ranks for 4 stages: each rank needs a stage."),
    ({"costs": fpipe.Costs([1, 2])}, "forward lists 2 costs, but the program has a stage 2"),
    ({"costs": fpipe.Costs(transfer={(0, 1): 1})}, "transfer says nothing of the link from rank 1 to rank 0"),
    ({"shard": ["twice"]}, "shard lists some of step, run, use; found"),
]


@pytest.mark.parametrize(("options", "sentence"), WRONG, ids=lambda part: part if isinstance(part, str) else None)
def test_invalid_options_are_refused(options: dict[str, Any], sentence: str):
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        quick(4, **({"ranks": 2, "microbatches": 4} | options))


def test_a_missing_solver_is_named(monkeypatch: pytest.MonkeyPatch):
    def absent() -> bool:
        return False

    monkeypatch.setattr(module, "is_installed", absent)
    with pytest.raises(ModuleNotFoundError, match=r"needs OR-tools: pip install ortools networkx.*proves less"):
        quick(2, ranks=2, microbatches=2, solver="cp-sat")
    assert quick(2, ranks=2, microbatches=2, solver="auto", placement="linear").value == 7
    assert solver.is_installed()
