"""Plans of a run: a row has the time and memory of its program, the best comes first, and nothing beats the front."""

from dataclasses import fields, replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.cli.cost_options import parse
from property_tests.strategies import max_examples
from tests.refusals import refusals

COSTS = fpipe.Costs.per_rank(F=10, B=12, W=8, c=0.5)


def plan_run(subject: Any, *params_and_batch: Any, **options: Any) -> fpipe.RunPlan:
    """Call fpipe.plan_run with options of the machine, of the candidates and of the call in one list."""
    machine, candidates = (
        {field.name: options.pop(field.name) for field in fields(kind) if field.name in options}
        for kind in (fpipe.Machine, fpipe.Candidates)
    )
    example = params_and_batch or None
    return fpipe.plan_run(subject, fpipe.Machine(**machine), fpipe.Candidates(**candidates), example=example, **options)


FEW_SCHEDULES = {"schedules": ["gpipe", "one_f_one_b", "zb_h1", "chimera", "interleaved"]}


NAMES = "y", "dx", "res", "params", "g", "sum", "x", "t", "w", "loss", "target", "inputs", "outputs", "grads"


def bytes_of(value: fpipe.Value) -> float:
    return {"y": 8.0, "dx": 8.0, "res": 40.0, "wres": 24.0, "params": 100.0}.get(value.name, 0.0)


def of_residuals(value: fpipe.Value) -> float:
    return {"res": 40.0, "wres": 24.0}.get(value.name, 0.0)


WEIGHED = replace(COSTS, bytes=of_residuals, transfer=0)


@max_examples(4)
@given(
    st.sampled_from([2, 4]),
    st.lists(st.sampled_from([2, 4, 8]), min_size=1, max_size=2, unique=True),
    st.sampled_from([None, (3.0,), (1.0,), (200.0, 120.0)]),
)
def test_rows_equal_their_simulations_and_nothing_beats_the_front(
    ranks: int, microbatches: list[int], memory: tuple[float, ...] | None
):
    """One limit counts rows on each rank; several limits are bytes of the ranks in turn."""
    options: Any = {}
    costs, limits = COSTS, [*(memory or (float("inf"),))] * ranks
    if memory is not None and len(memory) > 1:
        costs = WEIGHED
        rank_limits = "; ".join(f"rank {rank} memory {limit:.0f}B" for rank, limit in enumerate(limits[:ranks]))
        options["cluster"] = f"{ranks} ranks; {rank_limits}"
    elif memory is not None:
        options["memory"] = memory[0]
    plan = plan_run(costs, ranks=ranks, microbatches=microbatches, **FEW_SCHEDULES, **options)

    def seconds(candidate: Any) -> float:
        return candidate.makespan / candidate.microbatches

    for row in plan:
        timeline = fpipe.simulate(row.program, row.timeline.costs)
        assert (row.makespan, row.bubble, row.memory) == (timeline.makespan, timeline.bubble, timeline.peak)
        assert row.throughput == row.microbatches / row.makespan
        assert row.fits == all(peak <= limit for peak, limit in zip(row.memory, limits, strict=False))
    assert plan.best.fits
    assert seconds(plan.best) == pytest.approx(min(seconds(row) for row in plan if row.fits))
    points = {row: (seconds(row) * (1 + 1e-9), row.peak_memory) for row in plan}
    for row in plan:
        nothing_beats = all(
            seconds_per_row >= points[row][0] / (1 + 1e-9) or peak > row.peak_memory
            for seconds_per_row, peak in points.values()
        )
        assert nothing_beats or row not in plan.front
        assert any(
            points[rival][0] <= points[row][0] * (1 + 1e-9) and rival.peak_memory <= row.peak_memory
            for rival in plan.front
        )


def test_costs_between_two_sizes_are_interpolated():
    larger = replace(COSTS, forward=40, transfer=2.0, send=4, receive=2, bytes={"y": 8})
    costs_by_rows = {2: replace(COSTS, send=1, bytes={"y": 2}), 8: larger}
    curve: Any = {rows: (lambda parts, slices, costs=costs: costs) for rows, costs in costs_by_rows.items()}
    interpolated, origin = fpipe.planning.work.CostCurve(curve, "given").costs_at(4, 1)
    assert (interpolated.forward, interpolated.transfer, interpolated.bytes, origin) == (
        20,
        1.0,
        {"y": 4},
        "interpolated",
    )
    assert (interpolated.send, interpolated.receive) == pytest.approx(
        (2, 2 / 3)
    )  # they were those of the smaller microbatch
    plan = plan_run(
        {2: COSTS, 8: replace(COSTS, forward=40)},
        ranks=2,
        rows=16,
        microbatches=[2, 4, 8],
        checkpoint=["never"],
        **FEW_SCHEDULES,
    )
    origin_by_microbatches = {row.microbatches: row.costs for row in plan}
    assert origin_by_microbatches == {2: "given", 4: "interpolated", 8: "given"}
    assert {row.rows * row.microbatches for row in plan} == {16}


def make_model() -> tuple[fpipe.Model, Any, Any]:
    net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(2)))
    make_model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    return make_model, params, (torch.randn(16, 8), torch.randn(16, 8))


def test_a_model_is_measured_and_sized_for_each_program():
    """Chimera adds gradients of replicas late, so it holds more than the sizes of another program say."""
    model, params, batch = make_model()
    options: Any = {"schedules": ["one_f_one_b", "chimera", "roundpipe"], "checkpoint": ["always"]}
    plan = plan_run(
        model, params, batch, ranks=2, microbatches=[2, 3, 4], profiled=[2, 4], repeats=1, search=0.05, **options
    )
    assert {row.costs for row in plan if row.microbatches == 3} == {"interpolated"}
    assert {row.costs for row in plan if row.microbatches != 3} == {"measured"}
    stage_bytes = sum(leaf.nbytes for leaf in params[0].values())  # of a stage
    for row in plan:
        if row.schedule in ("one_f_one_b", "chimera"):
            copies = 2 if row.schedule == "chimera" else 1
            peak = fpipe.sizes(row.program, model, params, batch).peak
            assert row.memory == tuple(peak_bytes + copies * stage_bytes for peak_bytes in peak)
    assert {"found", "roundpipe"} < {row.schedule for row in plan}
    assert fpipe.verify(plan.best.program, model, params, batch).bitwise


def test_a_model_that_draws_is_planned():
    """Profiling runs dropout, which needs a key; a plan has none, so it must supply one."""
    net = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5), torch.nn.Linear(4, 4))
    make_model, params, _ = fpipe.from_sequential(net, stages=1, loss=torch.nn.functional.mse_loss)
    batch = torch.randn(4, 4), torch.randn(4, 4)
    plan = plan_run(
        make_model, params, batch, ranks=1, microbatches=[2], repeats=1, schedules=["gpipe"], checkpoint=["always"]
    )
    assert plan.best.costs == "measured"


IN_BYTES = replace(parse("F=10,B=12,W=8,y=1KiB,res=4KiB,params=1MiB").of(fpipe.program(1)), transfer=0)
ONE_CANDIDATE: Any = {"ranks": 2, "microbatches": [4], "schedules": ["interleaved:stages=8"], "checkpoint": ["never"]}
RING = "2 ranks; replicas 4 20KiB/s"


def test_shard_policies_multiply_the_candidates():
    """On a slow ring the policy "use" takes longest, and is the only one that fits the least memory."""
    plan = plan_run(IN_BYTES, cluster=RING, shard=["step", "run", "use"], **ONE_CANDIDATE)
    row_by_gather = {row.gather: row for row in plan}
    assert row_by_gather.keys() == {"step", "run", "use"}
    plain = plan_run(IN_BYTES, **ONE_CANDIDATE)
    assert "gather" in str(plan)
    assert "gather" not in str(plain)
    for gather, row in row_by_gather.items():
        assert row.program == fpipe.shard(gather=gather)(plain.best.program)  # type: ignore[arg-type]
        timeline = fpipe.simulate(row.program, row.timeline.costs)
        assert row.makespan == timeline.delivered > timeline.makespan  # the last SCATTER
        shards = 2 * 0.5 * 2**20 / 4
        assert row.memory == pytest.approx([peak + shards for peak in row.timeline.peak])
    assert row_by_gather["step"].makespan < row_by_gather["use"].makespan
    assert row_by_gather["use"].peak_memory < row_by_gather["step"].peak_memory
    cap = (row_by_gather["use"].peak_memory + row_by_gather["step"].peak_memory) / 2
    capped = plan_run(IN_BYTES, cluster=RING, shard=["step", "use"], memory=cap, **ONE_CANDIDATE)
    assert [row.gather for row in capped if row.fits] == ["use"]


def test_unsharded_replicas_are_a_candidate():
    """Replicas that keep all parameters send as many bytes as replicas that gather once a step, and hold more."""
    row_by_gather = {
        row.gather: row for row in plan_run(IN_BYTES, cluster=RING, shard=["never", "use"], **ONE_CANDIDATE)
    }
    plain = plan_run(IN_BYTES, **ONE_CANDIDATE).best
    assert row_by_gather["never"].program == fpipe.data_parallel()(plain.program)
    assert (
        row_by_gather["never"].makespan
        == fpipe.simulate(row_by_gather["never"].program, row_by_gather["never"].timeline.costs).delivered
    )
    assert row_by_gather["never"].makespan > plain.makespan
    assert row_by_gather["never"].memory == pytest.approx(plain.memory)
    assert row_by_gather["use"].peak_memory < row_by_gather["never"].peak_memory


def test_a_sharded_model_holds_its_share_of_parameters():
    net = torch.nn.Sequential(*(torch.nn.Linear(64, 64, bias=False) for _ in range(4)))
    make_model, params, _ = fpipe.from_sequential(net, stages=4, loss=torch.nn.functional.mse_loss)
    batch, stage_bytes = (torch.randn(4, 64), torch.randn(4, 64)), 64 * 64 * 4
    options: dict[str, Any] = {"microbatches": [2], "schedules": ["interleaved"], "repeats": 1}
    options |= {"checkpoint": ["never"], "replicas": 2, "shard": ["use", "step"]}
    plan = plan_run(make_model, params, batch, ranks=2, search=0.1, **options)
    for row in plan:
        sizes = fpipe.sizes(row.program, make_model, params, batch, replicas=2)
        shards = [sum(rank in end.homes for end in row.program.inputs if end.value.name == "shard") for rank in (0, 1)]
        assert row.memory == tuple(
            peak + count * stage_bytes / 2 for peak, count in zip(sizes.peak, shards, strict=True)
        )
    assert {(row.schedule, row.gather) for row in plan} == {
        (name, gather) for name in ("interleaved", "found") for gather in ("use", "step")
    }


def test_no_named_schedule_beats_the_search():
    options: Any = {"ranks": 2, "microbatches": [4], "memory": 2.0, "checkpoint": ["never"]}
    plan = plan_run(COSTS, search=0.2, schedules=["one_f_one_b", "zb_h1", "interleaved_zb"], **options)
    assert plan.best.makespan == min(row.makespan for row in plan if row.schedule == "found")


def test_a_cluster_gives_ranks_different_memory_and_speed():
    costs = replace(COSTS, bytes=bytes_of, transfer=0)
    free = plan_run(costs, ranks=2, microbatches=[4], cluster="2 ranks; rank 1 speed 0.5", **FEW_SCHEDULES)
    assert free.best.makespan > plan_run(costs, ranks=2, microbatches=[4], **FEW_SCHEDULES).best.makespan
    row = next(row for row in free if row.name == "one_f_one_b, m=4")
    assert row.memory == tuple(peak + 100 for peak in row.timeline.peak)
    tight_cluster = f"2 ranks; rank 0 memory {row.memory[0]:.0f}B; rank 1 memory {row.memory[1]:.0f}B"
    assert row.memory[0] > row.memory[1]
    fits_per_rank = {
        candidate.name: candidate.fits
        for candidate in plan_run(costs, ranks=2, microbatches=[4], cluster=tight_cluster, **FEW_SCHEDULES)
    }
    fits_less = {
        candidate.name: candidate.fits
        for candidate in plan_run(costs, ranks=2, microbatches=[4], memory=row.peak_memory - 1, **FEW_SCHEDULES)
    }
    assert (fits_per_rank[row.name], fits_per_rank["gpipe, m=4"], fits_less[row.name]) == (True, False, False)


def test_typed_parameter_bytes_count_gradients_too():
    """Used to count no gradients for typed bytes, so half of the memory of a rank was missing."""
    costs = parse("F=10,B=12,W=8,params=1MB,res=10KB").for_library
    plan = plan_run(costs, ranks=2, microbatches=[4], schedules=["one_f_one_b"], checkpoint=["never"])
    assert plan.best.memory == (2e6 + 2e4, 2e6 + 1e4)


@pytest.mark.parametrize("typed", [True, False])
def test_slices_divide_residuals_and_not_parameters(typed: bool):
    """Used to divide the parameters of a stage by the number of slices, though each slice reads all parameters."""
    table = {"res": 1e4, "wres": 1e4, "params": 1e6, **dict.fromkeys(("g", "sum", "y", "dx", "x", "t", "w", "loss"), 0)}
    table |= dict.fromkeys(("carry", "dcarry", "inputs", "target", "outputs", "grads"), 0)
    costs = parse("F=10,B=12,W=8,params=1MB,res=10KB").for_library if typed else replace(COSTS, bytes=table)
    options: Any = {"schedules": ["seq1f1b:slices=4"], "checkpoint": ["never"]}
    best = plan_run(costs, ranks=2, microbatches=[4], **options).best
    stage_bytes = 2e6 if typed else 1e6
    assert best.memory == tuple(stage_bytes + slices * 1e4 / 4 for slices in (5, 4))
    assert best.timeline.costs.forward == 10 / 4


def test_a_candidate_that_does_not_fit_excludes_no_other():
    """zbv is shorter and its fullest rank holds less, but rank 1 has no room for it: interleaved is best."""
    cluster = "2 ranks; rank 0 memory 100B; rank 1 memory 60B"
    options: Any = {"schedules": ["interleaved", "zbv"], "checkpoint": ["never"]}
    plan = plan_run(WEIGHED, ranks=2, microbatches=[4], cluster=cluster, **options)
    assert [(row.schedule, row.fits) for row in plan] == [("interleaved", True), ("zbv", False)]


def test_ctrl_c_returns_the_candidates_so_far():
    def stop(done: int, total: int, label: str) -> None:
        if done == 2:
            raise KeyboardInterrupt

    plan = plan_run(COSTS, ranks=2, microbatches=[4], progress=stop, **FEW_SCHEDULES)
    assert (len(plan), plan.complete) == (2, False)
    with pytest.raises(KeyboardInterrupt):
        plan_run(COSTS, ranks=2, microbatches=[4], memory=0.5, progress=stop, **FEW_SCHEDULES)


def test_a_plan_is_drawn(tmp_path: Path):
    plan = plan_run(COSTS, ranks=2, microbatches=[4, 8], memory=3, **FEW_SCHEDULES)
    file = fpipe.plot(plan, file=tmp_path / "plan.svg")
    labels = [text.text or "" for text in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")]
    assert all(any(label.startswith(row.name) for label in labels) for row in plan.front)
    assert Path(fpipe.plot(plan, file=tmp_path / "plan.png")).read_bytes()[:4] == b"\x89PNG"
    assert fpipe.plot(plan) == str(plan)
    assert [record["front"] for record in plan.records()] == [row in plan.front for row in plan]
    assert {"m", "recompute"} < {*str(plan).split()}


def small_plan(costs: Any = COSTS, *example: Any, **changes: Any) -> fpipe.RunPlan:
    options: Any = {"ranks": 2, "microbatches": [4], "schedules": ["gpipe"], "checkpoint": ["never"]}
    return plan_run(costs, *example, **options | changes)


def with_bytes(named: dict[str, float]) -> fpipe.Costs:
    return replace(COSTS, bytes=named)


SEQUENTIAL = torch.nn.Sequential()
MODEL, *EXAMPLE = make_model()

test_refusals = refusals(
    globals(),
    """
small_plan(ranks=0)
    ValueError: ranks is a whole number, at least 1; found 0.
small_plan(checkpoint=["sometimes"])
    ValueError: some of never, except_last, always; found 'sometimes'.
small_plan(schedules=["zbw"])
    ValueError: there is no schedule 'zbw'; did you mean zbv
small_plan(memory=-1)
    ValueError: memory is the most that a rank may hold, above 0; found -1.
small_plan(search=-1)
    ValueError: search is seconds, from 0; found -1.
small_plan(cluster="1 rank")
    ValueError: there are 2 ranks, and the cluster has 1.
small_plan(fpipe.Costs(), cluster="2 ranks; each rank memory 1GB")
    ValueError: a cluster's memory needs bytes of values
small_plan(rows=16, microbatches=[4, 8])
    ValueError: microbatches of 4, 2 rows need {rows: costs}
small_plan({2: COSTS, 8: WEIGHED}, rows=16, microbatches=[2, 8])
    ValueError: all costs say bytes, or none do; those of 2 rows say none.
small_plan({2: COSTS, 8: COSTS}, rows=16, microbatches=[2, 16])
    ValueError: a microbatch has 1 rows, and costs are given for 2, 8;
small_plan(rows=0)
    ValueError: rows is a whole number, at least 1; found 0.
small_plan(stages=0)
    ValueError: stages is a whole number, at least 1; found 0.
small_plan(replicas=2)
    ValueError: replicas= needs shard=, some of step, run, use
small_plan(shard=["use"])
    ValueError: shard= needs replicas: say replicas=2
small_plan(shard=["each"], replicas=2)
    ValueError: shard lists some of step, run, use, never; found 'each'.
small_plan(shard=["use"], replicas=2, cluster="2 ranks; replicas 4 1us")
    ValueError: replicas=2, and the cluster has 4; say them once.
small_plan(flops=1e12)
    ValueError: go with a Model; costs are given, not measured.
small_plan(memory=0.1, checkpoint=["never", "always"])
    ValueError: nothing fits: rank 0 must hold 1 rows at least, by gpipe, m=4, recompute always, and may hold 0.1 rows.
# Rank 0 has room for anything, so what it holds says nothing of why rank 1 cannot hold its 40 bytes.
small_plan(WEIGHED, cluster="2 ranks; rank 0 memory 1000B; rank 1 memory 30B", schedules=["one_f_one_b"])
    ValueError: nothing fits: rank 1 must hold 40 B at least, by one_f_one_b, m=4, and may hold 30 B.
small_plan(schedules=["chimera"], microbatches=[3])
    ValueError: no schedule serves 2 ranks and these microbatches. chimera:
# Fewer stages than ranks ended the plan, and a cap below zero was what the search complained of.
small_plan(stages=1, search=0.01)
    ValueError: found: 2 ranks for 1 stages: each rank needs
small_plan(replace(COSTS, bytes=bytes_of), memory=90, search=0.01, microbatches=[2])
    ValueError: nothing fits: rank 1 must hold 204 B
# A table of bytes without wres served no schedule with a W, each with a reason that no other schedule mends.
small_plan(with_bytes(dict.fromkeys(["y", "dx", "res", "params", "g", "sum", "x", "t", "loss"], 4.0)))
    ValueError: the bytes of
# Only the search cuts backwards in two; that nobody had said the bytes of halves read as if nothing were found.
small_plan(with_bytes(dict.fromkeys(NAMES, 4.0)), search=0.01)
    ValueError: the bytes of wres
small_plan({4: COSTS})
    ValueError: {rows: costs} needs rows=, how many the batch has.
small_plan(MODEL)
    ValueError: a model needs example=(params, batch)
small_plan(MODEL, *EXAMPLE, profiled=[2])
    ValueError: costs are profiled at 2 microbatches, and 4 is not between them: add it
""",
)


@pytest.mark.parametrize("name", ["interleaved", "seq1f1b:slices=2", "one_f_one_b"])
def test_a_function_of_bytes_plans_like_a_table(name: str):
    """Used to plan two chunks with twice their bytes if a function gave the bytes of a whole rank."""
    names = [*NAMES, "wres", "carry", "dcarry"]
    table = {kind: float(position) for position, kind in enumerate(names, 3)}
    cost_pair = [replace(COSTS, bytes=bytes_option) for bytes_option in (table, lambda value: table[value.name])]
    plans = [plan_run(costs, ranks=2, microbatches=[4], schedules=[name], checkpoint=["never"]) for costs in cost_pair]
    assert plans[0].best.memory == plans[1].best.memory
    assert len({fpipe.compare([name], 2, 4, costs)[0].peak for costs in cost_pair}) == 1


def test_a_plan_prints_schedules_that_do_not_apply():
    plan = plan_run(COSTS, ranks=2, microbatches=[3], schedules=["gpipe", "chimera"])
    assert plan.refused[0][0] == "chimera"
    assert str(plan).endswith(f"\nchimera: {plan.refused[0][1]}")
