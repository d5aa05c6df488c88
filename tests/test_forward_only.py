"""Evaluation: the forwards of a training step, and nothing that is there for gradients."""

import itertools

import pytest
import torch
from torch import nn

import fpipe

NET = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.GELU()) for _ in range(4)))
MODEL, PARAMS, _ = fpipe.from_sequential(NET, stages=4, loss=nn.functional.mse_loss)
BATCH = torch.randn(10, 8), torch.randn(10, 8)
TRANSFORMS = {
    "checkpoint": fpipe.checkpoint("always"),
    "split_backward": fpipe.split_backward(),
    "schedule": fpipe.schedules.one_f_one_b(4),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_nothing_is_recomputed_and_no_residual_is_written(name: str):
    program = fpipe.chain(fpipe.split(4), TRANSFORMS[name], fpipe.merge(), fpipe.forward_only())(fpipe.program(MODEL))
    assert {op.kind for op in program.ops} == {"SPLIT", "F", "MERGE"}
    assert {value.name for op in program.ops for value in op.writes}.isdisjoint({"res", "wres", "g", "dx"})
    fpipe.check(fpipe.chain(fpipe.communicate(), fpipe.free())(program))


def test_it_holds_less_than_training():
    program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(4), fpipe.merge())(fpipe.program(MODEL))
    train, found = (fpipe.sizes(p, MODEL, PARAMS, BATCH).peak for p in (program, fpipe.forward_only()(program)))
    assert all(less < more for less, more in zip(found, train, strict=True))


def test_it_may_stand_anywhere_after_split():
    steps = [fpipe.forward_only(), fpipe.schedules.one_f_one_b(4), fpipe.merge(), fpipe.checkpoint()]
    split = fpipe.split(4)(fpipe.program(4))
    assert len({fpipe.chain(*road)(split) for road in itertools.permutations(steps)}) == 1


def test_a_pair_keeps_its_forward():
    table = [["0F0", "(0F1;0B0)", "0B1"]]
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(table), fpipe.forward_only())(fpipe.program(1))
    assert program.table() == [["0F0", "0F1"]]


def test_a_program_without_results_is_refused():
    program = fpipe.program(1)
    only = fpipe.Program(program.inputs, (), (fpipe.Output(fpipe.Value("grads", 0), fpipe.Value("params", 0), (0,)),))
    with pytest.raises(fpipe.ProgramError, match="neither outputs nor a loss; without gradients nothing is left"):
        fpipe.forward_only()(only)
