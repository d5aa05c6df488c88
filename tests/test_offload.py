"""Offloading residuals until their backward: the same bits, less memory, and no more time while copies are hidden."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import fpipe
from fpipe.program import Program
from property_tests.strategies import Net, plain_autograd
from tests.refusals import refusals

split, offload, schedules = fpipe.split, fpipe.offload, fpipe.schedules
NET = Net(("mlp", "attention", "mlp", "linear"), ("batch", 0, 1, 2))
POLICIES: dict[str, Callable[[], Callable[[Program], Program]]] = {
    "all": lambda: offload(),
    "what is worth it": lambda: offload("worthwhile"),
    "a stage": lambda: offload(lambda stage, microbatch: stage == 1),
    "every other microbatch, early": lambda: offload(lambda stage, microbatch: microbatch % 2 == 0, lead=2),
    "as few as needed": lambda: offload(cap=2),
    "to a partner": lambda: offload(cap=2, destination=lambda rank: 3 - rank),
    "in halves": lambda: fpipe.chain(fpipe.split_backward(), offload(values=("res", "wres"))),
    "recomputed, after communicate": lambda: fpipe.chain(
        fpipe.checkpoint(), fpipe.communicate(), offload(values=("y", "res"))
    ),
    "twice": lambda: fpipe.chain(offload(lambda stage, microbatch: stage == 0), offload()),
}


def program_of(policy: str, *transforms: Callable[[Program], Program]) -> Program:
    steps = (split(4), schedules.one_f_one_b(4), POLICIES[policy](), fpipe.merge(), *transforms)
    return fpipe.chain(*steps)(fpipe.program(NET.model))


@pytest.mark.crossed
@pytest.mark.parametrize("transforms", [(), (fpipe.communicate(), fpipe.free())], ids=["", "sent and freed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_offloading_changes_no_bits(policy: str, transforms: tuple[Any, ...]):
    if transforms and "communicate" in policy:
        transforms = transforms[1:]
    program = program_of(policy, *transforms)
    fpipe.check(program)
    assert Program.parse(str(program)) == program
    assert any(op.kind == "OFFLOAD" for op in program.ops)
    loss, grads = plain_autograd(NET, NET.params(), NET.batch(9), 4)
    result = fpipe.build(program, NET.model)(NET.params(), NET.batch(9))
    assert torch.equal(result.loss, loss)
    stage_grads = zip(result.grads, grads, strict=True)
    assert all(
        torch.equal(actual_grads[name], grad) for actual_grads, stage in stage_grads for name, grad in stage.items()
    )


@pytest.mark.parametrize("policy", POLICIES)
def test_recorded_peaks_equal_predicted_peaks(policy: str):
    program, params, batch = program_of(policy), NET.params(), NET.batch(9)
    timeline = fpipe.build(program, NET.model, record=True)(params, batch).timeline
    assert tuple(map(int, timeline.peak)) == fpipe.sizes(program, NET.model, params, batch).peak


def test_offloading_moves_memory_to_the_partner():
    params, batch = NET.params(), NET.batch(64)
    base = fpipe.chain(split(8), schedules.one_f_one_b(4), fpipe.merge(outputs=False))(fpipe.program(NET.model))
    offloaded = offload(cap=2, destination=lambda rank: 3 - rank)(base)
    base_peak, offloaded_peak = (fpipe.sizes(program, NET.model, params, batch).peak for program in (base, offloaded))
    assert offloaded_peak[0] < base_peak[0]
    assert offloaded_peak[3] > base_peak[3]


@pytest.mark.crossed
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0])
def test_bpipe_holds_about_half_of_the_deepest_rank_in_the_same_time(ranks: int, microbatches: int, seconds: float):
    program, costs = split(microbatches)(fpipe.program(ranks)), fpipe.Costs(offload=seconds)
    transforms = schedules.one_f_one_b(ranks), schedules.bpipe(ranks)
    base, bpipe = (fpipe.simulate(transform(program), costs) for transform in transforms)
    assert max(bpipe.peak) <= math.ceil((ranks + 2) / 2)
    assert bpipe.makespan == base.makespan


@pytest.mark.crossed
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, pytest.param(3, marks=pytest.mark.deep)])
def test_pipe_offload_holds_two_chunks_in_the_same_time(ranks: int, chunks: int, rounds: int):
    program = split(rounds * ranks)(fpipe.program(ranks * chunks))
    transforms = (
        schedules.group_interleaved(ranks),
        schedules.pipe_offload(ranks),
        schedules.pipe_offload(ranks, cap=2),
    )
    for seconds in (0.0, 0.5, 1.0):
        costs = fpipe.Costs(offload=seconds)
        base, offloaded, capped = (fpipe.simulate(transform(program), costs) for transform in transforms)
        assert max(offloaded.peak) <= 2 / chunks + 1e-9
        assert max(capped.peak) <= 2
        assert offloaded.makespan == capped.makespan == base.makespan


def test_lead_moves_loads_earlier():
    base = fpipe.chain(split(6), schedules.gpipe(1))(fpipe.program(1))
    rows = [offload("worthwhile", lead=lead)(base).table(comms=True)[0] for lead in range(3)]
    cells_from_load = [row[row.index("LOAD(res[0,3]@host@0)") :] for row in rows]
    assert [sum(cell.startswith("0B") for cell in row) for row in cells_from_load] == [3, 4, 5]


@pytest.mark.parametrize("destination", ["host", lambda rank: 1 - rank], ids=["host", "partner"])
@pytest.mark.parametrize("policy", ["always", "except_last", lambda stage, microbatch: (stage + microbatch) % 2 == 1])
@pytest.mark.parametrize("halves", [(), (fpipe.split_backward(),)], ids=["B", "I W"])
def test_recomputed_residuals_are_not_offloaded(policy, destination, halves):
    """Used to offload a residual that is recomputed: its OFFLOAD read it before any R had written it."""
    start = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), *halves)(fpipe.program(3))
    offload, recompute = fpipe.offload(destination=destination), fpipe.checkpoint(policy)
    program = recompute(offload(start))
    assert program == offload(recompute(start))
    recomputed = {value for op in program.ops if op.kind == "R" for value in op.writes}
    assert recomputed.isdisjoint(value for op in program.ops if op.kind == "OFFLOAD" for value in op.reads)
    assert (policy == "always") == all(op.kind != "OFFLOAD" for op in program.ops)


test_refusals = refusals(
    globals(),
    r"""
offload(cap=0)
    ValueError: cap is a number of microbatches above 0, found 0
offload(lead=-1)
    ValueError: lead is a whole number, at least 0; found -1
offload(cap=2, values=("y",))
    ValueError: values=("res",) goes with it
fpipe.chain(split(4), schedules.one_f_one_b(2), offload(cap=1))(fpipe.program(2))
    ProgramError: cap=1 is less than rank 0 can keep to in this order: the least is 2 microbatches.
fpipe.chain(split(4), schedules.gpipe(2), offload(destination=lambda rank: rank))(fpipe.program(2))
    ProgramError: destination(0) is another rank that takes what rank 0 offloads, found 0
fpipe.chain(split(4), offload(), schedules.gpipe(2))(fpipe.program(2))
    ProgramError: put fpipe.offload() after what places the program
fpipe.chain(split(4), fpipe.free(), offload())(fpipe.program(2))
    ProgramError: apply fpipe.free() last
Program.parse("inputs @ 0\ntarget @ 0\ninputs@host = OFFLOAD[] inputs target @ 0\nloss = inputs@host @ 0")
    ProgramError: does not read one value and write one
Program.parse("inputs @ 0\ninputs@0 = OFFLOAD[] inputs @ 0\nloss = inputs@0 @ 0")
    ProgramError: moves inputs into the memory of its own rank
""",
)


def test_checkpoint_places_recomputes_around_an_early_load():
    """Used to write each recompute after its reader, since an R was taken for an op that the order had placed."""
    recompute_one = fpipe.checkpoint(lambda stage, microbatch: microbatch == 1)
    offload_early = fpipe.offload("worthwhile", lead=1)
    program = fpipe.chain(fpipe.split(3), recompute_one, fpipe.schedules.gpipe(1), offload_early)(fpipe.program(1))
    assert program.table(comms=True)[0][7:] == ["0B0", "LOAD(res[0,2]@host@0)", "0R1", "0B1", "0B2"]
    assert fpipe.checkpoint("always")(program).table() == [
        ["0F0", "0F1", "0F2", "0R0", "0B0", "0R1", "0B1", "0R2", "0B2"]
    ]
