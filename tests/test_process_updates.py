"""An update happens on all ranks or on none, and all begin with the same parameters and take the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor

import fpipe
from fpipe.meaning.purity.sharded import local_shard
from fpipe.runtimes.lowering.slots import Exit
from tests.processes import Processes, timed
from tests.test_data_parallel import meshed, replicated, started
from tests.test_distributed import MSE, alike, blocks, own, rows
from tests.test_update import updating


def of_seeds(rank: int, what: str) -> list[str]:
    """What a process is told that starts from another parameter, or from another state of its optimizer."""
    mesh, replica, place = meshed()
    net = blocks(2)
    net[1][0].bias.requires_grad_(False)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=MSE)
    shard = [fpipe.shard()] if what == "shards" else []
    program = replicated(model, None, *shard, fpipe.update("AdamW"))
    step, mine = started(model, params, program, rows(), mesh)
    opt = fpipe.optimizer_state(program, mine)
    if rank == 3:
        leaves = {"params": mine[place]["1.0.weight"], "frozen": net[1][0].bias}
        odd = opt[place]["1.0.weight"]["exp_avg"] if what == "opt" else leaves.get(what, leaves["params"])
        local_shard(odd).detach().add_(1e-6)
    return [timed(lambda: step(mine, tuple(half + replica for half in rows()), opt=opt, lr=0.1))[0]]


LEAVES = {"params": "['1.0.weight']", "opt": "['1.0.weight']['exp_avg']", "frozen": "[0]"}


@pytest.mark.parametrize("what", LEAVES)
def test_replicas_that_start_from_other_numbers_are_refused_by_the_leaf(four: Processes, what: str):
    """They trained apart: torch's DistributedDataParallel sends those of the first to all."""
    for (said,) in four.each(of_seeds, what):
        assert f"replica 1: rank 1 differs from replica 0: rank 1 in its {what}[1]{LEAVES[what]}: float32[8" in said
        assert "Replicas start from the same numbers" in said


def test_shards_are_no_copies_of_each_other(four: Processes):
    """Each replica has others; their sum over a step is the same, whatever they are."""
    assert four.each(of_seeds, "shards") == [["worked"]] * 4


def of_two_homes(rank: int) -> str:
    """Under DualPipe each stage is on both ranks."""
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    program = updating(model, fpipe.schedules.dualpipe(2), "SGD")
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(8)))
    if rank:
        params[0]["0.0.bias"].detach().add_(1)
    mine = own(program, rank, params)
    return timed(lambda: step(mine, rows(8), opt=fpipe.optimizer_state(program, mine), lr=0.1))[0]


def test_copies_of_a_stage_on_two_ranks_start_from_the_same_numbers(pair: Processes):
    for said in pair.each(of_two_homes):
        assert "rank 1 differs from rank 0 in its params[0]['0.0.bias']: float32[8]: " in said


def scheduled(rank: int, shape: tuple[int, int], what: str) -> list[str]:
    """A scheduler that one process alone steps: its numbers are others in the third step."""
    mesh = meshed(("dp", "pp"), shape)[0]
    stages = shape[1]
    model, params, _ = fpipe.from_sequential(blocks(stages), stages=stages, loss=MSE)
    scaled = {"loss_scale": "dynamic"} if what == "scale" else {}
    program = replicated(model, fpipe.schedules.gpipe(stages), fpipe.update("AdamW", **scaled))
    step, mine = started(model, params, program, rows(), mesh)
    opt, batch = fpipe.optimizer_state(program, mine), tuple(half + mesh.get_local_rank("dp") for half in rows())
    told = list[str]()
    for number in range(4):
        odd = rank == 1 and number == 2
        lr = {"lr": 0.1, "weight_decay": 0.2 if odd and what == "decay" else 0.1}
        scale = {"scale": 8.0 if odd else 16.0} if scaled else {}
        lr = lr if what == "decay" else (0.05 if odd and what == "lr" else 0.1)
        told.append(timed(lambda lr=lr, scale=scale: step(mine, batch, opt=opt, lr=lr, **scale))[0])
    return told


SCHEDULED = {
    "lr": "in its lr: 0.05 instead of 0.1",
    "decay": "in its weight_decay: 0.2 instead of 0.1",
    "scale": "in its scale: 8.0 instead of 16.0",
}


@pytest.mark.parametrize("shape", [(2, 1), (1, 2)])
@pytest.mark.parametrize("what", SCHEDULED)
def test_numbers_that_one_process_alone_was_handed_are_refused_on_all(
    pair: Processes, shape: tuple[int, int], what: str
):
    """ReduceLROnPlateau on one rank: replicas were .043 apart after three steps."""
    for told in pair.each(scheduled, shape, what):
        assert told[:2] == ["worked"] * 2
        assert SCHEDULED[what] in told[2]
        assert "the run is over" in told[3]


def updating_badly(rank: int, who: int, donate: bool) -> list[Any]:
    """An UPDATE that raises on one rank, when others may be done with theirs."""

    def rule(param: Tensor, grad: Tensor, state: Any, lr: float) -> Any:
        if lr > 1 and rank == who:
            raise ArithmeticError("no such rate")
        return param - lr * grad, state

    fpipe.register_update("Bad", rule)
    try:
        model, params, _ = fpipe.from_sequential(blocks(3), stages=3, loss=MSE)
        program = updating(model, fpipe.schedules.one_f_one_b(3), "Bad")
        step = fpipe.build(program, model, runtime="distributed", example=(params, rows(8)), donate=donate)
        mine = own(program, rank, params)
        opt = fpipe.optimizer_state(program, mine)
        taken = list[Any]()
        step(mine, rows(8), opt=opt, lr=0.1)
        before = [leaf.clone() for leaf in fpipe.tree.leaves(mine) if leaf is not None]
        try:
            taken.append(step(mine, rows(8), opt=opt, lr=2.0))
        except Exception as error:
            said = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        kept = alike(before, [leaf for leaf in fpipe.tree.leaves(mine) if leaf is not None])
        return [len(taken), said if not taken else "", kept]
    finally:
        fpipe.meaning.optimizers.rules.RULES.pop("Bad")


@pytest.mark.parametrize("donate", [False, True])
@pytest.mark.parametrize("who", [0, 2])
def test_an_update_that_fails_on_one_rank_is_taken_on_none(trio: Processes, who: int, donate: bool):
    """The last ranks were a step ahead of the first, with a result in hand."""
    for rank, (taken, said, kept) in enumerate(trio.each(updating_badly, who, donate)):
        assert taken == 0
        assert said.startswith("ArithmeticError" if rank == who else f"RankError: rank {who} failed in UPDATE")
        assert kept or donate
        assert ("were donated to this step" in said) == donate


def summed(rank: int) -> list[bool]:
    """Gradients beside updates, in two training steps of one program."""
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    parts = fpipe.split(2), fpipe.merge(outputs=False), fpipe.update("SGD", grads=True)
    program = fpipe.chain(*parts, fpipe.schedules.one_f_one_b(2), fpipe.steps(2))(fpipe.program(model))
    each = [rows(6), tuple(half + 1 for half in rows(6))]
    opt = fpipe.optimizer_state(program, params)
    whole = fpipe.build(program, model)(params, each, opt=opt, lr=0.1)
    step = fpipe.build(program, model, runtime="distributed", example=(params, each))
    mine = own(program, rank, params)
    found = step(mine, each, opt=fpipe.optimizer_state(program, mine), lr=0.1)
    grads = whole.grads
    expected = (
        tuple(own(program, rank, one) for one in grads) if isinstance(grads[0], tuple) else own(program, rank, grads)
    )
    return [alike(found.grads, expected), alike(found.params, own(program, rank, whole.params))]


def test_gradients_of_several_steps_come_with_their_updates(pair: Processes):
    assert pair.each(summed) == [[True, True]] * 2


def handing_out(rank: int, who: int) -> str:
    """A rank whose ops are done, and which cannot put its results together."""
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    program = updating(model, fpipe.schedules.one_f_one_b(2), "SGD")
    step = fpipe.build(program, model, runtime="distributed", example=(params, rows(8)))
    mine = own(program, rank, params)
    opt = fpipe.optimizer_state(program, mine)
    step(mine, rows(8), opt=opt, lr=0.1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == who:
            patch.setattr(Exit, "results", lambda *_: 1 / 0)
        return timed(lambda: step(mine, rows(8), opt=opt, lr=0.1))[0]


@pytest.mark.parametrize("who", [0, 1])
def test_results_that_one_rank_cannot_put_together_are_told_to_all(pair: Processes, who: int):
    """The others had theirs, and heard of it in the next step, as of something outside of ops."""
    said = pair.each(handing_out, who)
    assert said[who] == "ZeroDivisionError: division by zero"
    assert said[1 - who].startswith(f"RankError: rank {who} failed in the results of the step: ZeroDivisionError")
