"""What waits for its backward waits elsewhere: the same bits, less held, and no more time while copies are hidden."""

from __future__ import annotations

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
    "to a partner": lambda: offload(cap=2, to=lambda rank: 3 - rank),
    "in halves": lambda: fpipe.chain(fpipe.split_backward(), offload(values=("res", "wres"))),
    "recomputed, after communicate": lambda: fpipe.chain(
        fpipe.checkpoint(), fpipe.communicate(), offload(values=("y", "res"))
    ),
    "twice": lambda: fpipe.chain(offload(lambda stage, microbatch: stage == 0), offload()),
}


def program_of(policy: str, *last: Callable[[Program], Program]) -> Program:
    steps = (split(4), schedules.one_f_one_b(4), POLICIES[policy](), fpipe.merge(), *last)
    return fpipe.chain(*steps)(fpipe.program(NET.model))


@pytest.mark.crossed
@pytest.mark.parametrize("last", [(), (fpipe.communicate(), fpipe.free())], ids=["", "sent and freed"])
@pytest.mark.parametrize("policy", POLICIES)
def test_offloading_changes_no_bits(policy: str, last: tuple[Any, ...]):
    if last and "communicate" in policy:
        last = last[1:]
    program = program_of(policy, *last)
    fpipe.check(program)
    assert Program.parse(str(program)) == program
    assert any(op.kind == "OFFLOAD" for op in program.ops)
    loss, grads = plain_autograd(NET, NET.params(), NET.batch(9), 4)
    result = fpipe.build(program, NET.model)(NET.params(), NET.batch(9))
    assert torch.equal(result.loss, loss)
    pairs = zip(result.grads, grads, strict=True)
    assert all(torch.equal(ours[name], grad) for ours, stage in pairs for name, grad in stage.items())


@pytest.mark.parametrize("policy", POLICIES)
def test_the_bytes_held_are_those_told_before(policy: str):
    program, params, batch = program_of(policy), NET.params(), NET.batch(9)
    ran = fpipe.build(program, NET.model, record=True)(params, batch).timeline
    assert tuple(map(int, ran.peak)) == fpipe.sizes(program, NET.model, params, batch).peak


def test_a_partner_holds_what_it_takes():
    params, batch = NET.params(), NET.batch(64)
    base = fpipe.chain(split(8), schedules.one_f_one_b(4), fpipe.merge(outputs=False))(fpipe.program(NET.model))
    moved = offload(cap=2, to=lambda rank: 3 - rank)(base)
    before, after = (fpipe.sizes(program, NET.model, params, batch).peak for program in (base, moved))
    assert after[0] < before[0]
    assert after[3] > before[3]


@pytest.mark.crossed
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("microbatches", [1, 3, 8, 20])
@pytest.mark.parametrize("seconds", [0.0, 0.5, 1.0])
def test_bpipe_holds_about_half_of_the_deepest_rank_in_the_same_time(ranks: int, microbatches: int, seconds: float):
    program, costs = split(microbatches)(fpipe.program(ranks)), fpipe.Costs(offload=seconds)
    makes = schedules.one_f_one_b(ranks), schedules.bpipe(ranks)
    base, moved = (fpipe.simulate(make(program), costs) for make in makes)
    assert max(moved.peak) <= math.ceil((ranks + 2) / 2)
    assert moved.makespan == base.makespan


@pytest.mark.crossed
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("rounds", [1, 2, pytest.param(3, marks=pytest.mark.deep)])
def test_pipe_offload_holds_two_chunks_in_the_same_time(ranks: int, chunks: int, rounds: int):
    program = split(rounds * ranks)(fpipe.program(ranks * chunks))
    makes = (schedules.group_interleaved(ranks), schedules.pipe_offload(ranks), schedules.pipe_offload(ranks, cap=2))
    for seconds in (0.0, 0.5, 1.0):
        costs = fpipe.Costs(offload=seconds)
        base, found, capped = (fpipe.simulate(make(program), costs) for make in makes)
        assert max(found.peak) <= 2 / chunks + 1e-9
        assert max(capped.peak) <= 2
        assert found.makespan == capped.makespan == base.makespan


def test_a_load_may_come_earlier():
    base = fpipe.chain(split(6), schedules.gpipe(1))(fpipe.program(1))
    rows = [offload("worthwhile", lead=lead)(base).table(comms=True)[0] for lead in range(3)]
    behind = [row[row.index("LOAD(res[0,3]@host@0)") :] for row in rows]
    assert [sum(cell.startswith("0B") for cell in row) for row in behind] == [3, 4, 5]


@pytest.mark.parametrize("to", ["host", lambda rank: 1 - rank], ids=["host", "partner"])
@pytest.mark.parametrize("policy", ["always", "except_last", lambda stage, microbatch: (stage + microbatch) % 2 == 1])
@pytest.mark.parametrize("halves", [(), (fpipe.split_backward(),)], ids=["B", "I W"])
def test_what_is_computed_again_waits_nowhere(policy, to, halves):
    """Recomputed after it was offloaded, a residual was read by its OFFLOAD before any R had written it; or R stood
    right behind F, and kept what it was to spare."""
    start = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2), *halves)(fpipe.program(3))
    offload, again = fpipe.offload(to=to), fpipe.checkpoint(policy)
    program = again(offload(start))
    assert program == offload(again(start))
    recomputed = {value for op in program.ops if op.kind == "R" for value in op.writes}
    assert recomputed.isdisjoint(value for op in program.ops if op.kind == "OFFLOAD" for value in op.reads)
    assert (policy == "always") == all(op.kind != "OFFLOAD" for op in program.ops)


test_refusals = refusals(
    globals(),
    r"""
offload("sometimes")
    ValueError: policy is 'always', 'worthwhile' or f(stage, microbatch) -> bool
offload(cap=0)
    ValueError: cap is a number of microbatches above 0, found 0
offload(lead=-1)
    ValueError: lead is a whole number, at least 0; found -1
offload(to="disk")
    ValueError: to is 'host' or f(rank) -> rank, found 'disk'
offload(cap=2, values=("y",))
    ValueError: values=("res",) goes with it
fpipe.chain(split(4), schedules.one_f_one_b(2), offload(cap=1))(fpipe.program(2))
    ProgramError: cap=1 is less than rank 0 can keep to in this order: the least is 2 microbatches.
fpipe.chain(split(4), schedules.gpipe(2), offload(to=lambda rank: rank))(fpipe.program(2))
    ProgramError: to(0) is another rank that takes what rank 0 offloads, found 0
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


def test_a_load_that_stands_early_holds_no_recompute_in_its_place():
    """The recomputes that checkpoint() wrote behind it came after their readers: an R too was taken for placed."""
    some = fpipe.checkpoint(lambda stage, microbatch: microbatch == 1)
    early = fpipe.offload("worthwhile", lead=1)
    program = fpipe.chain(fpipe.split(3), some, fpipe.schedules.gpipe(1), early)(fpipe.program(1))
    assert program.table(comms=True)[0][7:] == ["0B0", "LOAD(res[0,2]@host@0)", "0R1", "0B1", "0B2"]
    assert fpipe.checkpoint("always")(program).table() == [
        ["0F0", "0F1", "0F2", "0R0", "0B0", "0R1", "0B1", "0R2", "0B2"]
    ]
