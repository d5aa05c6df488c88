"""Updates that do not wait for the norm that clips them: the bits of those that do, and often a shorter time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.processes import Processes
from tests.test_distributed import MSE, own
from tests.test_steps import PERIODS, batches, loop
from tests.test_update import addresses, differences, net_of

NORMS = {"below": 100.0, "one above": 0.42, "all above": 0.05}  # norms of the three steps: .445, .400, .384
VALID = {"below": [True, True, True], "one above": [False, True, True], "all above": [False, False, False]}


def late(model: Any, *more: Any, clip: float = 1.0, microbatches: int = 4) -> fpipe.Program:
    update = fpipe.update("AdamW", clip=clip, validate="after")
    return fpipe.chain(fpipe.split(microbatches), fpipe.merge(outputs=False), update, *more)(fpipe.program(model))


def bools(valid: Any) -> list[bool]:
    return [bool(each) for each in (valid if isinstance(valid, tuple) else (valid,))]


HOW: list[dict[str, Any]] = [{}, {"trace": False}, {"runtime": "threads"}, {"donate": True}]


@pytest.mark.crossed
@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize(
    ("schedule", "how"),
    [*(("zb_h2", how) for how in HOW), *((name, {}) for name in ("one_f_one_b", "zbv", "roundpipe"))],
    ids=repr,
)
def test_steps_have_the_bits_of_a_loop_that_clips(schedule: str, case: str, how: dict[str, Any]):
    net, each, clip = net_of(), batches(3), NORMS[case]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4 if schedule == "zbv" else 2, loss=MSE)
    program = late(model, fpipe.schedules.get(schedule)(2), fpipe.steps(3), clip=clip)
    assert fpipe.Program.parse(str(program)) == program
    result = fpipe.build(program, model, **how)(params, each, opt=fpipe.optimizer_state(program, params), lr=0.01)
    losses, optimizer = loop(net, each, [0] * 4, clip, 0.01)
    assert bools(result.valid) == VALID[case]
    assert all(map(torch.equal, result.loss, losses))
    assert differences(net, optimizer, result) == []


def test_what_is_done_again_is_donated_and_what_is_tried_is_not():
    model, params, _ = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
    batch = batches(1)[0]
    for clip, kept in ((100.0, True), (0.05, False)):
        given = fpipe.tree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
        before = addresses(given), [leaf.detach().clone() for leaf in fpipe.tree.leaves(given)]
        program = late(model, clip=clip)
        step = fpipe.build(program, model, donate=True)
        result = step(given, batch, opt=fpipe.optimizer_state(program, given), lr=0.01)
        assert bools(result.valid) == [kept]
        assert all(map(torch.equal, fpipe.tree.leaves(given), before[1])) is kept
        assert (addresses(result.params) == before[0]) is not kept


def test_a_norm_that_is_no_number_is_not_valid():
    model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
    program = late(model, microbatches=1)
    params, batch = ({"w": torch.tensor(3.0)},), (torch.full((2,), float("nan")), torch.ones(2))
    result = fpipe.build(program, model)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.1)
    assert bools(result.valid) == [False]
    assert result.params[0]["w"].isnan()  # as torch's own loop has it


@pytest.mark.parametrize("last", [fpipe.communicate(), fpipe.free()], ids=["sent", "freed"])
def test_transfers_and_frees_that_are_written_down_are_put_anew(last: Any):
    net, each = net_of(), batches(2)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = late(model, fpipe.schedules.zb_h2(2), fpipe.steps(2), last, clip=0.05)
    result = fpipe.build(program, model)(params, each, opt=fpipe.optimizer_state(program, params), lr=0.01)
    _, optimizer = loop(net, each, [0] * 4, 0.05, 0.01)
    assert differences(net, optimizer, result) == []


def on_two(rank: int, case: str) -> tuple[list[bool], list[str]]:
    """Which norms were valid, and the names of this rank's parameters and state that differ from a plain loop."""
    net, each, clip = net_of(), batches(3), NORMS[case]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = late(model, fpipe.schedules.zb_h2(2), fpipe.steps(3), clip=clip)
    mine = own(program, rank, params)
    step = fpipe.build(program, model, runtime="distributed", example=(params, each))
    for _ in range(2):
        result = step(mine, each, opt=fpipe.optimizer_state(program, mine), lr=0.01)
    losses, optimizer = loop(net, each, [0] * 4, clip, 0.01)
    found = [loss for loss in result.loss if isinstance(loss, Tensor)]
    wrong = ["loss"] * (bool(found) and not all(map(torch.equal, found, losses)))
    return bools(result.valid), wrong + differences(net, optimizer, result)


@pytest.mark.parametrize("case", NORMS)
def test_all_ranks_do_it_again_together(pair: Processes, case: str):
    assert pair.each(on_two, case) == [(VALID[case], [])] * 2


@pytest.mark.parametrize("name", PERIODS)
def test_steps_that_do_not_clip_follow_each_other_as_without_a_norm(name: str):
    share = 2 if name == "zbv" else 1
    costs = fpipe.Costs(1 / share, 1 / share, 1 / share, update=0.5 / share)

    def timeline(count: int) -> fpipe.Timeline:
        program = late(4 * share, fpipe.schedules.get(name)(4), fpipe.steps(count), microbatches=8)
        return fpipe.simulate(program, costs)

    six, four = timeline(6), timeline(4)
    free, clipped, _ = PERIODS[name]
    assert ((six.makespan - four.makespan) / 2, (six.redone - four.redone) / 2) == (free, clipped)
    assert six.pays == 1 - six.makespan / six.redone
    assert f"({six.redone:g} to do it again: pays below {six.pays:.1%} of calls)" in str(six)
    assert fpipe.simulate(fpipe.program(2)).redone is None
    assert fpipe.simulate(fpipe.program(2)).pays is None


@pytest.mark.parametrize("how", [{}, {"clip": float("inf")}, {"clip": 1.0, "validate": "later"}], ids=repr)
def test_what_there_is_nothing_to_ask_about_is_refused(how: dict[str, Any]):
    with pytest.raises(ValueError, match="validate"):
        fpipe.update("AdamW", **{"validate": "after", **how})
