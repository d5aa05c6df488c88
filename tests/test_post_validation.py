"""Updates that start before the norm that clips them is known: the same bits, and often a shorter time."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import fpipe
from tests.processes import Processes
from tests.test_distributed import MSE, local_part
from tests.test_steps import PERIODS, make_batches, run_plain_loop
from tests.test_update import addresses, differences, net_of

NORMS = {"below": 100.0, "one above": 0.42, "all above": 0.05}  # norms of the three steps: .445, .400, .384
VALID = {"below": [True, True, True], "one above": [False, True, True], "all above": [False, False, False]}


def validated_program(model: Any, *transforms: Any, clip: float = 1.0, microbatches: int = 4) -> fpipe.Program:
    update = fpipe.update("AdamW", clip=clip, validate="after")
    return fpipe.chain(fpipe.split(microbatches), fpipe.merge(outputs=False), update, *transforms)(fpipe.program(model))


def as_bools(valid: Any) -> list[bool]:
    return [bool(flag) for flag in (valid if isinstance(valid, tuple) else (valid,))]


BUILD_OPTIONS: list[dict[str, Any]] = [{}, {"trace": False}, {"runtime": "threads"}, {"donate": True}]


@pytest.mark.crossed
@pytest.mark.parametrize("case", NORMS)
@pytest.mark.parametrize(
    ("schedule", "options"),
    [*(("zb_h2", options) for options in BUILD_OPTIONS), *((name, {}) for name in ("one_f_one_b", "zbv", "roundpipe"))],
    ids=repr,
)
def test_late_validation_gives_the_bits_of_a_loop_that_clips(schedule: str, case: str, options: dict[str, Any]):
    net, step_batches, clip = net_of(), make_batches(3), NORMS[case]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=4 if schedule == "zbv" else 2, loss=MSE)
    program = validated_program(model, fpipe.schedules.get(schedule)(2), fpipe.steps(3), clip=clip)
    assert fpipe.Program.parse(str(program)) == program
    result = fpipe.build(program, model, **options)(
        params, step_batches, opt=fpipe.optimizer_state(program, params), lr=0.01
    )
    losses, optimizer = run_plain_loop(net, step_batches, [0] * 4, clip, 0.01)
    assert as_bools(result.valid) == VALID[case]
    assert all(map(torch.equal, result.loss, losses))
    assert differences(net, optimizer, result) == []


def test_only_a_redone_update_writes_donated_memory():
    model, params, _ = fpipe.from_sequential(net_of(), stages=2, loss=MSE)
    batch = make_batches(1)[0]
    for clip, is_valid in ((100.0, True), (0.05, False)):
        donated = fpipe.tree.tree_map(lambda leaf: leaf.detach().clone().requires_grad_(), params)
        before_step = addresses(donated), [leaf.detach().clone() for leaf in fpipe.tree.leaves(donated)]
        program = validated_program(model, clip=clip)
        step = fpipe.build(program, model, donate=True)
        result = step(donated, batch, opt=fpipe.optimizer_state(program, donated), lr=0.01)
        assert as_bools(result.valid) == [is_valid]
        assert all(map(torch.equal, fpipe.tree.leaves(donated), before_step[1])) is is_valid
        assert (addresses(result.params) == before_step[0]) is not is_valid


def test_a_nan_norm_is_not_valid():
    model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).sum())
    program = validated_program(model, microbatches=1)
    params, batch = ({"w": torch.tensor(3.0)},), (torch.full((2,), float("nan")), torch.ones(2))
    result = fpipe.build(program, model)(params, batch, opt=fpipe.optimizer_state(program, params), lr=0.1)
    assert as_bools(result.valid) == [False]
    assert result.params[0]["w"].isnan()  # as torch's own loop has it


@pytest.mark.parametrize("transform", [fpipe.communicate(), fpipe.free()], ids=["sent", "freed"])
def test_steps_rewrite_transfers_and_frees(transform: Any):
    net, step_batches = net_of(), make_batches(2)
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = validated_program(model, fpipe.schedules.zb_h2(2), fpipe.steps(2), transform, clip=0.05)
    result = fpipe.build(program, model)(params, step_batches, opt=fpipe.optimizer_state(program, params), lr=0.01)
    _, optimizer = run_plain_loop(net, step_batches, [0] * 4, 0.05, 0.01)
    assert differences(net, optimizer, result) == []


def compare_on_two_ranks(rank: int, case: str) -> tuple[list[bool], list[str]]:
    """Return which norms were valid, and the names of local params and state that differ from a plain loop."""
    net, step_batches, clip = net_of(), make_batches(3), NORMS[case]
    model, params, _ = fpipe.from_sequential(copy.deepcopy(net), stages=2, loss=MSE)
    program = validated_program(model, fpipe.schedules.zb_h2(2), fpipe.steps(3), clip=clip)
    mine = local_part(program, rank, params)
    step = fpipe.build(program, model, runtime="distributed", example=(params, step_batches))
    for _ in range(2):
        result = step(mine, step_batches, opt=fpipe.optimizer_state(program, mine), lr=0.01)
    losses, optimizer = run_plain_loop(net, step_batches, [0] * 4, clip, 0.01)
    local_losses = [loss for loss in result.loss if isinstance(loss, Tensor)]
    wrong = ["loss"] * (bool(local_losses) and not all(map(torch.equal, local_losses, losses)))
    return as_bools(result.valid), wrong + differences(net, optimizer, result)


@pytest.mark.parametrize("case", NORMS)
def test_all_ranks_redo_an_update_together(pair: Processes, case: str):
    assert pair.run(compare_on_two_ranks, case) == [(VALID[case], [])] * 2


@pytest.mark.parametrize("name", PERIODS)
def test_steps_that_do_not_clip_take_the_time_of_no_norm(name: str):
    share = 2 if name == "zbv" else 1
    costs = fpipe.Costs(1 / share, 1 / share, 1 / share, update=0.5 / share)

    def timeline(count: int) -> fpipe.Timeline:
        program = validated_program(4 * share, fpipe.schedules.get(name)(4), fpipe.steps(count), microbatches=8)
        return fpipe.simulate(program, costs)

    six, four = timeline(6), timeline(4)
    free, clipped, _ = PERIODS[name]
    assert ((six.makespan - four.makespan) / 2, (six.rerun_makespan - four.rerun_makespan) / 2) == (free, clipped)
    assert six.break_even_share == 1 - six.makespan / six.rerun_makespan
    assert f"({six.rerun_makespan:g} to do it again: pays below {six.break_even_share:.1%} of calls)" in str(six)
    assert fpipe.simulate(fpipe.program(2)).rerun_makespan is None
    assert fpipe.simulate(fpipe.program(2)).break_even_share is None


@pytest.mark.parametrize("options", [{}, {"clip": float("inf")}, {"clip": 1.0, "validate": "later"}], ids=repr)
def test_validate_without_a_finite_clip_is_refused(options: dict[str, Any]):
    with pytest.raises(ValueError, match="validate"):
        fpipe.update("AdamW", **{"validate": "after", **options})
