"""Each public function of schedules refuses a wrong input with one sentence."""

import re
from collections.abc import Callable

import pytest

import fpipe
from fpipe.program import Program, ProgramError
from tests.refusals import refusals

S = fpipe.schedules


def apply(schedule: Callable[[Program], Program], stages: int, microbatches: int = 4) -> Program:
    return schedule(fpipe.split(microbatches)(fpipe.program(stages)))


def first_free(op: fpipe.Op, now: object) -> int:
    return 0


WRONG = r"""
apply(S.gpipe(4), 3)
    ProgramError: 4 ranks for 3 stages: each rank needs a stage.
apply(S.interleaved(2), 5)
    ProgramError: cut the model into a multiple of 2 stages, such as 6.
S.interleaved(4, group=3)
    ValueError: at least 4 for 4 ranks (with fewer, the ranks wait for each other for ever); found 3.
S.group_interleaved(4, group=5)
    ValueError: from 2 to 4 for 4 ranks (with fewer, the ranks wait for each other for ever; more hold
S.interleaved_overlap(2, chunks=0)
    ValueError: chunks is a whole number, at least 1; found 0.
apply(S.interleaved_overlap(2, chunks=3), 4)
    ProgramError: 6 ranks for 4 stages: each rank needs a stage.
apply(S.one_f_one_b_v(2), 3)
    ProgramError: a V over 2 ranks has 4 stages, down and up; this program has 3
S.pipe_offload(2, cap=0)
    ValueError: cap is a number of microbatches above 0, found 0.
apply(S.pipe_offload(2, cap=0.4), 4)
    ProgramError: cap=0.4 is less than rank 0 can keep to in this order
S.pipe_offload(2, lead=-1)
    ValueError: lead is a whole number, at least 0; found -1.
apply(S.seq1f1b(2, slices=0), 2)
    ValueError: slices is a whole number, at least 1; found 0.
apply(S.chimera(3), 3)
    ProgramError: chimera: the number of ranks is even, found 3: on an odd number the two
apply(S.chimera(4), 4, 3)
    ProgramError: chimera: the number of microbatches is even, found 3: one half goes down, the other half up.
apply(S.dualpipe(3), 3, 8)
    ProgramError: dualpipe: the number of ranks is even, found 3: each direction has one half of them.
apply(S.dualpipe(2), 2, 5)
    ProgramError: dualpipe: the number of microbatches is even, found 5: each direction has one half of them.
apply(S.dualpipe(4), 4, 6)
    ProgramError: dualpipe: the number of microbatches is at least twice that of ranks, 8 for 4, found 6
apply(S.dualpipev(2), 3)
    ProgramError: dualpipev: each rank has an early and a late stage, 4 for 2 ranks; this
apply(S.hanayo(1), 2)
    ProgramError: hanayo: a wave turns at the first and the last of at least 2 ranks, found 1.
apply(S.hanayo(3), 5)
    ProgramError: hanayo: a wave goes down the ranks and back up, through 6 stages on 3 ranks; this program has 5
apply(S.hanayo(2, waves=2), 4)
    ProgramError: hanayo: waves=2 on 2 ranks passes 8 stages, found 4.
apply(S.pipedream(2, steps=2), 2)
    ProgramError: steps hand on updated parameters: put fpipe.update() before.
S.get("pipedream")
    ValueError: there is no schedule 'pipedream'; fpipe.schedules.pipedream(ranks, steps=k) behind fpipe.update() orders
    several training steps; fpipe.schedules.names() lists them all.
S.pipedream_2bw(2, steps=0)
    ValueError: steps is a whole number, at least 1; found 0.
apply(S.roundpipe(2, homes=lambda s: "host"), 4)
    ProgramError: homes gives stage 0 'host'; a home is a rank
apply(S.zb_auto(2, memory_cap=0.5), 2)
    ProgramError: memory_cap is 0.5, below one microbatch
apply(S.zbv(2), 2)
    ProgramError: zbv: a V over 2 ranks has 4 stages, down and up; this program has 2. Cut the model into 4.
apply(S.zb_auto(2, costs=fpipe.Costs(forward=[1.0])), 2)
    ValueError: forward lists 1 costs, but the program has a stage 1
S.v_min(2, wres_share=2)
    ValueError: wres_share is the share that W needs after I, from 0 to 1; found 2.
apply(S.from_table("0F0,0B0\n1F0,1Bx"), 2, 1)
    ProgramError: line 2, column 2: '1Bx' is not a cell: it does not
apply(S.from_table("0F0,0B0\n1F0"), 2, 1)
    ProgramError: the table has 1F0 without its backward: add 1B0, or
S.from_generator(print, 0)
    ValueError: ranks is a whole number, at least 1; found 0.
S.from_priority(first_free, 0)
    ValueError: ranks is a whole number, at least 1; found 0.
apply(S.from_priority(first_free, 2, cap=0.2), 2)
    ProgramError: cap is 0.2 on rank 0, but one microbatch holds
S.register("gpipe", S.gpipe)
    ValueError: 'gpipe' is taken; known schedules: gpipe, one_f_one_b, eager_1f1b
S.register("nothing_to_do", S.gpipe, stages_per_rank=0)
    ValueError: stages_per_rank is a whole number, at least 1; found 0
S.get("one_f1b")
    ValueError: there is no schedule 'one_f1b'; did you mean one_f_one_b or
S.about("1F1B")
    ValueError: there is no schedule '1F1B'; did you mean one_f_one_b or one_f_one_b_overlap or one_f_one_b_v?
S.Schedule("gpipe", S.gpipe).program(2, 0)
    ValueError: microbatches is a whole number, at least 1; found 0
"""
test_refusals = refusals(globals(), WRONG)


def test_every_public_function_has_a_refusal():
    """Named schedules are left out: other tests cover their ranks and sizes."""
    assert {*S.__all__} - {*S.names()} - {*re.findall(r"\bS\.(\w+)", WRONG)} == {"names", "RankState"}  # handed nothing


@pytest.mark.parametrize("name", S.names())
@pytest.mark.parametrize("ranks", [0, -1])
def test_ranks_that_are_no_positive_integer_are_refused(name: str, ranks: object):
    with pytest.raises(ValueError, match=re.escape(f"ranks is a whole number, at least 1; found {ranks!r}.")):
        S.get(name)(ranks)


@pytest.mark.parametrize("name", [name for name in S.names() if name != "seq1f1b"])
def test_schedules_that_do_not_order_slices_refuse_them(name: str):
    """Used to say of chimera, dualpipe, hanayo and roundpipe: this program has no 0F0."""
    sliced = fpipe.split(4, slices=2)(fpipe.program(2 * S.about(name).stages_per_rank))
    sentence = f"{name}: this program has sequence slices, which it does not order; use seq1f1b or from_table."
    with pytest.raises(ProgramError, match=re.escape(sentence)):
        S.get(name)(2)(sliced)


@pytest.mark.parametrize("name", S.names())
def test_a_schedule_refuses_what_is_no_program(name: str):
    with pytest.raises(TypeError, match="program is a Program; found 3"):
        S.get(name)(2)(3)
