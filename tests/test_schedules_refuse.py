"""What schedules refuse: one wrong input for each public function, and the sentence that it is answered with."""

import re
from collections.abc import Callable
from typing import Any

import pytest

import fpipe
from fpipe.program import Program, ProgramError
from fpipe.schedules import from_generator, from_priority, from_table, register

S = fpipe.schedules


def on(schedule: Callable[[Program], Program], stages: int, microbatches: int = 4) -> Program:
    return schedule(fpipe.split(microbatches)(fpipe.program(stages)))


def first_free(op: fpipe.Op, now: object) -> int:
    return 0


GROUP = "(with fewer, the ranks wait for each other for ever"
WRONG: list[tuple[str, Callable[[], Any], str]] = [
    ("gpipe", lambda: on(S.gpipe(4), 3), "4 ranks for 3 stages: each rank needs a stage."),
    ("one_f_one_b", lambda: on(S.one_f_one_b(4), 3), "4 ranks for 3 stages: each rank needs a stage."),
    ("eager_1f1b", lambda: on(S.eager_1f1b(4), 3), "4 ranks for 3 stages: each rank needs a stage."),
    ("zb_h1", lambda: on(S.zb_h1(4), 3), "4 ranks for 3 stages: each rank needs a stage."),
    ("zb_h2", lambda: on(S.zb_h2(4), 3), "4 ranks for 3 stages: each rank needs a stage."),
    ("bpipe", lambda: on(S.bpipe(4), 3), "4 ranks for 3 stages: each rank needs a stage."),
    ("interleaved", lambda: on(S.interleaved(2), 5), "cut the model into a multiple of 2 stages, such as 6."),
    ("interleaved", lambda: S.interleaved(4, group=3), f"at least 4 for 4 ranks {GROUP}); found 3."),
    ("interleaved_zb", lambda: S.interleaved_zb(4, group=1.5), f"at least 4 for 4 ranks {GROUP}); found 1.5."),
    ("group_interleaved", lambda: S.group_interleaved(4, group=5), f"from 2 to 4 for 4 ranks {GROUP}; more hold"),
    ("kimi_k2", lambda: on(S.kimi_k2(3), 4), "kimi_k2: 4 stages on 3 ranks leave some ranks more chunks than others;"),
    ("looped_bfs", lambda: on(S.looped_bfs(3), 4), "looped_bfs: 4 stages on 3 ranks leave some ranks more chunks"),
    (
        "one_f_one_b_v",
        lambda: on(S.one_f_one_b_v(2), 3),
        "a V over 2 ranks has 4 stages, down and up; this program has 3",
    ),
    ("pipe_offload", lambda: S.pipe_offload(2, cap=0), "cap is a number of microbatches above 0, found 0."),
    (
        "pipe_offload",
        lambda: on(S.pipe_offload(2, cap=0.4), 4),
        "cap=0.4 is less than rank 0 can keep to in this order",
    ),
    ("pipe_offload", lambda: S.pipe_offload(2, lead=-1), "lead is a whole number of ops, at least 0; found -1."),
    ("seq1f1b", lambda: on(S.seq1f1b(2, slices=0), 2), "slices is a whole number, at least 1; found 0."),
    ("chimera", lambda: on(S.chimera(3), 3), "chimera: the number of ranks is even, found 3: on an odd number the two"),
    (
        "dualpipe",
        lambda: on(S.dualpipe(2), 2, 2),
        "dualpipe: the number of microbatches is at least twice that of ranks",
    ),
    (
        "dualpipe",
        lambda: S.dualpipe(2, overlap=3),
        "overlap is True or False, whether a forward and a backward are one",
    ),
    (
        "dualpipev",
        lambda: on(S.dualpipev(2), 3),
        "dualpipev: each rank has an early and a late stage, 4 for 2 ranks; this",
    ),
    (
        "hanayo",
        lambda: on(S.hanayo(2), 3),
        "hanayo: a wave goes down the ranks and back up, through 4 stages on 2 ranks",
    ),
    ("hanayo", lambda: S.hanayo(2, waves=1.5), "waves is a whole number, at least 1; found 1.5."),
    (
        "roundpipe",
        lambda: on(S.roundpipe(2, forward=3), 4),
        "roundpipe: forward is a list of groups of stages, such as",
    ),
    ("roundpipe", lambda: on(S.roundpipe(2, homes="host"), 4), "homes is {stage: rank}, {stage: ranks} or f(stage)"),
    (
        "roundpipe",
        lambda: on(S.roundpipe(2, homes=lambda s: "host"), 4),
        "homes gives stage 0 'host'; a home is a rank",
    ),
    ("zb_auto", lambda: on(S.zb_auto(2, memory_cap=0.5), 2), "memory_cap is 0.5, below the minimum: one microbatch by"),
    ("zbv", lambda: on(S.zbv(2), 2), "zbv: two chunks on each rank, so 4 stages for 2 ranks; found 2."),
    (
        "v_half",
        lambda: S.v_half(2, costs={"F": 1}),
        "costs is an fpipe.Costs, such as fpipe.Costs(forward=2); found dict",
    ),
    (
        "v_min",
        lambda: S.v_min(2, kept=2),
        "kept is the share of an activation that W needs after I, from 0 to 1; found 2.",
    ),
    (
        "from_table",
        lambda: on(from_table("0F0,0B0\n1F0,1Bx"), 2, 1),
        "line 2, column 2: '1Bx' is not a cell: it does not",
    ),
    ("from_table", lambda: on(from_table("0F0,0B0\n1F0"), 2, 1), "the table has 1F0 without its backward: add 1B0, or"),
    (
        "from_generator",
        lambda: from_generator(None, 2),
        "from_generator takes f(rank, ranks, microbatches), which yields",
    ),
    ("from_priority", lambda: on(from_priority(first_free, 2, cap=0.2), 2), "cap is 0.2 on rank 0, below the minimum"),
    (
        "register",
        lambda: register("gpipe", S.gpipe),
        "'gpipe' is taken; known schedules: gpipe, one_f_one_b, eager_1f1b",
    ),
    ("get", lambda: S.get("one_f1b"), "there is no schedule 'one_f1b'; did you mean one_f_one_b or"),
    ("about", lambda: S.about("ZB-V"), "there is no schedule 'ZB-V'; did you mean zbv?"),
    (
        "about",
        lambda: S.about("1F1B"),
        "there is no schedule '1F1B'; did you mean one_f_one_b or one_f_one_b_v or seq1f1b?",
    ),
    (
        "Schedule",
        lambda: S.Schedule("gpipe", S.gpipe).program(2, 0),
        "microbatches is a whole number, at least 1; found 0",
    ),
]


@pytest.mark.parametrize(
    ("name", "call", "sentence"), WRONG, ids=[f"{name}-{at}" for at, (name, *_) in enumerate(WRONG)]
)
def test_a_wrong_input_is_answered_with_a_sentence(name: str, call: Callable[[], Any], sentence: str):
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        call()


def test_every_public_function_has_its_wrong_input():
    said = {name for name, _, _ in WRONG}
    assert set(S.__all__) - said == {"names"}  # which takes nothing


@pytest.mark.parametrize("name", S.names())
@pytest.mark.parametrize("ranks", [0, -1, 2.0, "4", True, None])
def test_ranks_are_a_number(name: str, ranks: object):
    with pytest.raises(ValueError, match=re.escape(f"ranks is a whole number, at least 1; found {ranks!r}.")):
        S.get(name)(ranks)


@pytest.mark.parametrize("name", [name for name in S.names() if name != "seq1f1b"])
def test_sequence_slices_are_refused_by_what_does_not_order_them(name: str):
    """chimera, dualpipe, hanayo and roundpipe said: this program has no 0F0."""
    sliced = fpipe.split(4, slices=2)(fpipe.program(2 * S.about(name).stages_per_rank))
    sentence = f"{name}: this program has sequence slices, which it does not order; use seq1f1b or from_table."
    with pytest.raises(ProgramError, match=re.escape(sentence)):
        S.get(name)(2)(sliced)


@pytest.mark.parametrize("name", S.names())
def test_a_schedule_is_applied_to_a_program(name: str):
    with pytest.raises(TypeError, match=r"a Program is wanted here, such as fpipe\.program\(model\); found int\."):
        S.get(name)(2)(3)
