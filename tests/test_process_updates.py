"""An update happens on all ranks or on none; all ranks start with equal parameters and take equal rates."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.meaning.purity.sharded import local_shard
from fpipe.runtimes.lowering.slots import Exit
from tests.processes import Processes, time_call
from tests.test_data_parallel import meshed, replicated, started
from tests.test_distributed import MSE, blocks, is_equal_tree, local_part, rows
from tests.test_update import updating_program


class Shift(nn.Module):
    """Add a constant buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def start_from_changed_leaf(rank: int, kind: str) -> list[str]:
    """Step on four processes after one process changed a parameter or a leaf of its optimizer state."""
    mesh, replica, stage = meshed()
    net = blocks(2)
    net[1][0].bias.requires_grad_(False)
    net[1].append(Shift())
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    shard = [fpipe.shard()] if kind == "shards" else []
    program = replicated(model, None, *shard, fpipe.update("AdamW"))
    step, mine = started(model, params, program, rows(), mesh)
    opt = fpipe.optimizer_state(program, mine)
    if rank == 3:
        leaves = {"params": mine[stage]["1.0.weight"], "frozen": net[1][0].bias, "buffers": net[1][-1].shift}
        changed_leaf = opt[stage]["1.0.weight"]["exp_avg"] if kind == "opt" else leaves.get(kind, leaves["params"])
        local_shard(changed_leaf).detach().add_(1e-6)
    return [time_call(lambda: step(mine, tuple(tensor + replica for tensor in rows()), opt=opt, lr=0.1))[0]]


LEAVES = {"params": "['1.0.weight']", "opt": "['1.0.weight']['exp_avg']", "frozen": "[0]", "buffers": "[0]"}


@pytest.mark.parametrize("kind", LEAVES)
def test_replicas_that_start_from_different_values_are_refused(four: Processes, kind: str):
    """Used to train replicas that differ. DistributedDataParallel broadcasts the first replica instead."""
    for (message,) in four.run(start_from_changed_leaf, kind):
        assert f"replica 1: rank 1 differs from replica 0: rank 1 in its {kind}[1]{LEAVES[kind]}: float32[8" in message
        assert "Replicas start from the same numbers" in message


def test_shards_may_differ_between_replicas(four: Processes):
    """The gradients of replicas are added up, however their shards differ."""
    assert four.run(start_from_changed_leaf, "shards") == [["worked"]] * 4


def start_from_changed_copy(rank: int) -> str:
    """Step under DualPipe, which has each stage on both ranks, with copies that differ."""
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    program = updating_program(model, fpipe.schedules.dualpipe(2), "SGD")
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(8)))
    if rank:
        params[0]["0.0.bias"].detach().add_(1)
    mine = local_part(program, rank, params)
    return time_call(lambda: step(mine, rows(8), opt=fpipe.optimizer_state(program, mine), lr=0.1))[0]


def test_copies_of_a_stage_that_differ_are_refused(pair: Processes):
    for message in pair.run(start_from_changed_copy):
        assert "rank 1 differs from rank 0 in its params[0]['0.0.bias']: float32[8]: " in message


def step_with_changed_numbers(rank: int, shape: tuple[int, int], kind: str) -> list[str]:
    """Step four times, with another rate, decay or scale on one process in the third step."""
    mesh = meshed(("dp", "pp"), shape)[0]
    stages = shape[1]
    model, params, _ = fpipe.from_sequential(blocks(stages), stages=stages, loss=MSE)
    scaled = {"loss_scale": "dynamic"} if kind == "scale" else {}
    program = replicated(model, fpipe.schedules.gpipe(stages), fpipe.update("AdamW", **scaled))
    step, mine = started(model, params, program, rows(), mesh)
    opt, batch = fpipe.optimizer_state(program, mine), tuple(tensor + mesh.get_local_rank("dp") for tensor in rows())
    outcomes = list[str]()
    for step_index in range(4):
        is_changed = rank == 1 and step_index == 2
        lr = {"lr": 0.1, "weight_decay": 0.2 if is_changed and kind == "decay" else 0.1}
        scale = {"scale": 8.0 if is_changed else 16.0} if scaled else {}
        lr = lr if kind == "decay" else (0.05 if is_changed and kind == "lr" else 0.1)
        outcomes.append(time_call(lambda lr=lr, scale=scale: step(mine, batch, opt=opt, lr=lr, **scale))[0])
    return outcomes


MESSAGES = {
    "lr": "in its lr: 0.05 instead of 0.1",
    "decay": "in its weight_decay: 0.2 instead of 0.1",
    "scale": "in its scale: 8.0 instead of 16.0",
}


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@pytest.mark.parametrize("kind", MESSAGES)
def test_rates_that_differ_on_one_rank_are_refused_on_all(pair: Processes, shape: tuple[int, int], kind: str):
    """Used to let replicas drift .043 apart in three steps with ReduceLROnPlateau on one rank."""
    for outcomes in pair.run(step_with_changed_numbers, shape, kind):
        assert outcomes[:2] == ["worked"] * 2
        assert MESSAGES[kind] in outcomes[2]
        assert "the run is over" in outcomes[3]


def fail_one_update(rank: int, failing_rank: int, donate: bool) -> list[Any]:
    """Step with an UPDATE that raises on one rank, while other ranks may have finished theirs."""

    def rule(param: Tensor, grad: Tensor, state: Any, lr: float) -> Any:
        if lr > 1 and rank == failing_rank:
            raise ArithmeticError("no such rate")
        return param - lr * grad, state

    fpipe.register_update("Bad", rule)
    try:
        model, params, _ = fpipe.from_sequential(blocks(3), stages=3, loss=MSE)
        program = updating_program(model, fpipe.schedules.one_f_one_b(3), "Bad")
        step = fpipe.build(program, model, runtime="distributed", example=(params, rows(8)), donate=donate)
        mine = local_part(program, rank, params)
        opt = fpipe.optimizer_state(program, mine)
        results = list[Any]()
        step(mine, rows(8), opt=opt, lr=0.1)
        leaves_before = [leaf.clone() for leaf in fpipe.tree.leaves(mine) if leaf is not None]
        try:
            results.append(step(mine, rows(8), opt=opt, lr=2.0))
        except Exception as error:
            message = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        is_unchanged = is_equal_tree(leaves_before, [leaf for leaf in fpipe.tree.leaves(mine) if leaf is not None])
        return [len(results), message if not results else "", is_unchanged]
    finally:
        fpipe.meaning.optimizers.rules.RULES.pop("Bad")


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("failing_rank", [0, 2])
def test_an_update_that_fails_on_one_rank_happens_on_none(trio: Processes, failing_rank: int, donate: bool):
    """Used to leave the last ranks a step ahead of the first, with a result."""
    for rank, (result_count, message, is_unchanged) in enumerate(trio.run(fail_one_update, failing_rank, donate)):
        assert result_count == 0
        assert message.startswith(
            "ArithmeticError" if rank == failing_rank else f"RankError: rank {failing_rank} failed in UPDATE"
        )
        assert is_unchanged or donate
        assert ("were donated to this step" in message) == donate


def compare_step_grads(rank: int) -> list[bool]:
    """Compare gradients and parameters of a program of two training steps with the local runtime."""
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    transforms = fpipe.split(2), fpipe.merge(outputs=False), fpipe.update("SGD", grads=True)
    program = fpipe.chain(*transforms, fpipe.schedules.one_f_one_b(2), fpipe.steps(2))(fpipe.program(model))
    step_batches = [rows(6), tuple(tensor + 1 for tensor in rows(6))]
    opt = fpipe.optimizer_state(program, params)
    local_result = fpipe.build(program, model)(params, step_batches, opt=opt, lr=0.1)
    step = fpipe.build(program, model, runtime="distributed", example=(params, step_batches))
    mine = local_part(program, rank, params)
    rank_result = step(mine, step_batches, opt=fpipe.optimizer_state(program, mine), lr=0.1)
    grads = local_result.grads
    expected = (
        tuple(local_part(program, rank, step_grads) for step_grads in grads)
        if isinstance(grads[0], tuple)
        else local_part(program, rank, grads)
    )
    return [
        is_equal_tree(rank_result.grads, expected),
        is_equal_tree(rank_result.params, local_part(program, rank, local_result.params)),
    ]


def test_several_steps_return_gradients_and_updates(pair: Processes):
    assert pair.run(compare_step_grads) == [[True, True]] * 2


def fail_one_result(rank: int, failing_rank: int) -> str:
    """Step with a rank that finishes its ops and then fails to build its results."""
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    program = updating_program(model, fpipe.schedules.one_f_one_b(2), "SGD")
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(8)))
    mine = local_part(program, rank, params)
    opt = fpipe.optimizer_state(program, mine)
    step(mine, rows(8), opt=opt, lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == failing_rank:
            patch.setattr(Exit, "results", lambda *_: 1 / 0)
        return time_call(lambda: step(mine, rows(8), opt=opt, lr=0.1))[0]


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_a_rank_that_cannot_build_its_results_stops_all(pair: Processes, failing_rank: int):
    """Used to fail on the remaining ranks one step later, as a fault outside of ops."""
    outcomes = pair.run(fail_one_result, failing_rank)
    assert outcomes[failing_rank] == "ZeroDivisionError: division by zero"
    assert outcomes[1 - failing_rank].startswith(
        f"RankError: rank {failing_rank} failed in the results of the step: ZeroDivisionError"
    )
