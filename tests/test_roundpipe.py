"""RoundPipe keeps weights on a host, sends groups round the ranks, and cuts forward and backward differently."""

from typing import Any

import pytest

import fpipe
from fpipe.program import Op, Program
from tests.refusals import refusals

Plan = Any
PAPER: dict[str, Plan] = {"forward": [range(3)], "backward": [[3], [2], [1], [0]]}


def pipeline(stages: int, ranks: int = 2, microbatches: int = 3, **plans: Plan) -> Program:
    return fpipe.schedules.about("roundpipe").program(ranks, microbatches, stages, **plans)


def stages_by_rank(program: Program, *kinds: str) -> list[set[int]]:
    """Return for each rank the stages whose ops of these kinds it runs."""
    return [{op.stage or 0 for op in program.ops if op.rank == r and op.kind in kinds} for r in range(program.ranks)]


def test_four_stages_are_cut_as_in_the_paper():
    assert pipeline(4) == pipeline(4, **PAPER)


def test_groups_go_round_the_ranks_and_weights_live_on_a_host():
    program = pipeline(4, ranks=5, **PAPER)
    assert stages_by_rank(program, "F") == [{0, 1, 2}, {3}, set(), set(), set(), set()]
    assert stages_by_rank(program, "B") == [set(), {3}, {2}, {1}, {0}, set()]
    homes = [end.homes for end in (*program.inputs, *program.outputs) if end[0].name in ("params", "grads")]
    assert homes == [(5,)] * 8


def test_only_inputs_of_backward_groups_are_kept_between_the_passes():
    program = pipeline(6, forward=[range(4)], backward=[[4, 5], [2, 3], [0, 1]])
    reread_values = {value for op in program.ops if op.kind == "R" for value in op.reads if value.name == "y"}
    assert {value.stage for value in reread_values} == {1}


def test_weights_travel_once_a_pass_and_gradients_once():
    resend_by_name = {"params": lambda op: op.kind == "F"}  # pyright: ignore[reportUnknownLambdaType]
    program = fpipe.communicate(again=resend_by_name)(pipeline(4, ranks=2, microbatches=5, **PAPER))
    sends = [op for op in program.ops if op.kind == "SEND"]
    assert sum(op.reads[0].name == "params" for op in sends) == 3 + 2 + 3
    assert sorted(str(op.reads[0]) for op in sends if op.reads[0].name in ("g", "sum")) == [
        f"sum[{stage},4]" for stage in range(4)
    ]


@pytest.mark.parametrize("stages", [4, 7, 16])
@pytest.mark.parametrize("microbatches", [7, 11])
def test_balanced_groups_idle_for_at_most_p_minus_1_groups(stages: int, microbatches: int):
    groups = stages + (stages - 1) // 3
    as_one = fpipe.Costs([1] * (stages - 1) + [0], 1.5, 1.5, recompute=0)  # else a recomputation may run ahead
    for ranks in (ranks for ranks in range(1, 8) if groups % ranks == 0):
        program = pipeline(stages, ranks, microbatches)
        assert fpipe.simulate(program).idle <= (ranks - 1) * 3
        assert fpipe.simulate(program, as_one).idle == pytest.approx((ranks - 1) * 3)


WRONG = """
pipeline(4, forward=[[0], [2]])
    ProgramError: roundpipe: the forward plan misses stage 1, before [2].
pipeline(4, forward=[[1, 2]])
    ProgramError: roundpipe: the forward plan misses stage 0, before [1-2].
pipeline(4, backward=[[3], [2], [0]])
    ProgramError: roundpipe: the backward plan misses stage 1, before [2].
pipeline(4, backward=[[2, 3], [1, 2], [0]])
    ProgramError: roundpipe: the backward plan has stage 2 twice, or out of order, in [2-3].
pipeline(4, backward=[[0], [1], [2], [3]])
    ProgramError: roundpipe: the backward plan goes down from stage 3, but starts with stage 0.
pipeline(4, backward=[])
    ProgramError: roundpipe: the backward plan goes down from stage 3, but is empty.
pipeline(4, forward=[range(2), range(2, 2)])
    ProgramError: roundpipe: forward group 1 is empty.
pipeline(4, backward=[[3, 1]])
    ProgramError: roundpipe: backward group 0 is [3, 1]; its stages are adjacent, in order.
pipeline(4, forward=[[0, 1]], backward=[[3], [2], [1], [0]])
    ProgramError: roundpipe: the first backward group starts with stage 2, where the forward plan ends; found [3].
pipeline(4, forward=[[0, 1, 2]], backward=[[2, 3], [1], [0]])
    ProgramError: the first backward group starts with stage 3, where the forward plan ends; found [2-3].
pipeline(4, forward=[range(4)])
    ProgramError: roundpipe: the forward plan ends with the last stage, 3. Leave that to the first backward group.
pipeline(4, forward=[range(5)])
    ProgramError: roundpipe: forward group 0 is [0-4]; the stages are 0..3.
pipeline(4, backward=[range(4)])
    ProgramError: roundpipe: groups: 1, ranks: 2; each rank runs a group. Use smaller groups or fewer ranks.
"""
test_refusals = refusals(globals(), WRONG)


def test_readers_with_equal_keys_in_again_share_a_transfer():
    def parity(op: Op) -> object:
        return (op.microbatch or 0) % 2

    placed = fpipe.chain(fpipe.split(4), fpipe.place("linear", homes={0: 1}, ranks=1), fpipe.merge())(fpipe.program(1))
    for resend_option, trips in ((["params"], 8), ({"params": parity}, 2), ((), 1)):
        program = fpipe.communicate(again=resend_option)(placed)
        assert sum(op.kind == "SEND" and op.reads[0].name == "params" for op in program.ops) == trips


def test_a_peak_counts_the_stages_whose_residuals_a_rank_makes():
    """Used to read a peak of 1/3. Rank 0 forwards a group of three stages without residuals, and later holds one of the
    two stages that it recomputes: a half."""
    assert fpipe.simulate(pipeline(4)).peak == (0.5, 0.5, 0)
    program = fpipe.schedules.about("one_f_one_b").program(2, 4)
    recomputed = fpipe.checkpoint("always")(program)
    assert fpipe.simulate(recomputed).peak == (1, 1)
