"""Evaluation: the forwards of a training step, and nothing that is there for gradients."""

import itertools

import fpipe


def test_it_may_stand_anywhere_after_split():
    steps = [fpipe.forward_only(), fpipe.schedules.one_f_one_b(4), fpipe.merge(), fpipe.checkpoint()]
    split = fpipe.split(4)(fpipe.program(4))
    assert len({fpipe.chain(*road)(split) for road in itertools.permutations(steps)}) == 1


def test_a_pair_keeps_its_forward():
    table = [["0F0", "(0F1;0B0)", "0B1"]]
    program = fpipe.chain(fpipe.split(2), fpipe.schedules.from_table(table), fpipe.forward_only())(fpipe.program(1))
    assert program.table() == [["0F0", "0F1"]]
