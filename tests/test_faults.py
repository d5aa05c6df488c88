"""What goes wrong on one of several processes ends all of them in time, with who is to blame; nothing is left."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fpipe
from fpipe.runtimes.processes import transfers
from tests.processes import SOON, Processes, beside_each_other, result, timed
from tests.test_distributed import (
    MSE,
    TROUBLE,
    blocks,
    built,
    chained,
    differs,
    kill,
    one_in_trouble,
    own,
    raising,
    rows,
    stop,
    troubled,
)


def caught(call: Callable[[], Any]) -> tuple[str, bool]:
    """What a call raises, and whether it took no longer than it should."""
    said, took = timed(call)
    return said, took < SOON


three_stages = partial(built, 3, "zb_h1")


OVER = "RankError: the run is over, start all ranks again from a checkpoint: "


def refusing(rank: int, who: int, what: str) -> list[tuple[str, bool]]:
    """A rank that refuses what it alone is handed, and the next step."""
    program, _, step, params = three_stages()
    mine = own(program, rank, params)
    calls = {
        "nothing": lambda: step((None, None, None), rows()),
        "parameters": lambda: step(({}, {}, {}), rows()),
        "key": lambda: step(mine, rows(), key="seven"),
        "rows": lambda: step(mine, rows(3)),
    }
    step(mine, rows())
    return [caught(calls[what] if rank == who else lambda: step(mine, rows())), caught(lambda: step(mine, rows()))]


WHY = {
    "nothing": "and was handed None or a meta tensor",
    "parameters": "params",
    "key": "TypeError: a key is a whole number",
    "rows": "ValueError: 3 rows cannot fill 4 microbatches",
}


@pytest.mark.parametrize("what", WHY)
def test_arguments_that_one_rank_refuses_end_the_run_on_all(trio: Processes, what: str):
    who = 2
    for rank, ((said, soon), (after, _)) in enumerate(trio.each(refusing, who, what)):
        assert soon
        assert WHY[what] in said
        assert said.startswith(f"RankError: rank {who} failed outside of its ops: ") == (rank != who)
        assert after.startswith(f"{OVER}rank {who} failed outside of its ops: ")


def of_other_sizes(rank: int, who: int, is_known: bool) -> tuple[str, bool]:
    """One rank is handed more rows than the others."""
    program, alone, step, params = three_stages(check_batch="never")
    mine = own(program, rank, params)
    for count in (10, 24) if is_known else (10,):
        assert not differs(rank, program, step(mine, rows(count)), alone(params, rows(count)))
    return caught(lambda: step(mine, rows(24 if rank == who else 10)))


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("who", [0, 2])
def test_batches_of_different_sizes_end_all_ranks(trio: Processes, who: int, is_known: bool):
    """A message too large for the memory that waits for it would end the process: gloo throws where nobody catches."""
    for said, soon in trio.each(of_other_sizes, who, is_known):
        assert soon or not is_known  # what is new is traced first
        assert said.startswith("RankError: rank ")
        assert "they were handed arguments of different structures, shapes or dtypes" in said


def recording(rank: int) -> tuple[str, bool]:
    """What goes wrong on one rank when another is over with its part, and waits to put a timeline together."""
    program, model, params, batch = troubled()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), record=True)
    step(own(program, rank, params), batch)
    broken = own(program, rank, params)
    if rank == 0:  # what comes last: the gradient of the last microbatch on rank 0
        TROUBLE["what"] = None
        broken = ({"w": torch.eye(5)}, None, None)
    return caught(lambda: step(broken, batch))


def test_a_rank_that_fails_while_others_record(trio: Processes):
    for rank, (said, soon) in enumerate(trio.each(recording)):
        assert soon
        assert ("rank 0 failed" in said) == (rank > 0)


def interrupted(rank: int, who: int, pids: tuple[int, ...]) -> list[Any]:
    program, model, params, batch = troubled()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch))
    mine = own(program, rank, params)

    def interrupt() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.5)

    step(mine, batch)
    TROUBLE["what"] = interrupt if rank == who else None
    return [caught(lambda: step(mine, batch)), caught(lambda: step(mine, batch))]


@pytest.mark.parametrize("who", [(0,), (1,), (0, 2, 1)])
def test_ctrl_c_on_one_rank_or_all_ends_all(trio: Processes, who: tuple[int, ...]):
    """A terminal sends it to all; who waits in C hears it of the others."""
    pids = tuple(trio.all[rank].pid for rank in who)  # itself last
    for rank, ((said, soon), after) in enumerate(trio.each(interrupted, who[-1], pids)):
        assert soon
        assert after[0].startswith(OVER)
        assert said.startswith("KeyboardInterrupt" if rank in who else f"RankError: rank {who[0]} failed in {who[0]}F3")


ODD: dict[str, dict[str, Any]] = {
    "ValueError: loss_scale is a finite number above 0; found -1.": {"loss_scale": -1},
    "ValueError: runtime='distributed' needs example=(params, batch)": {"example": None},
    "ValueError: the program has 2 stages and the model 3; start from": {
        "program": chained(2, fpipe.schedules.gpipe(2))
    },
    "differs from rank 0 in its options": {"record": True},
    "a run on zeros, to know what it writes, ended in ZeroDivisionError": {
        "model": fpipe.from_functions([lambda p, x: x / (1 / x.sum().item())] * 3, loss=MSE)
    },
    "ValueError: timeout is a number of seconds above 0; found 0.": {"timeout": 0},
}


def building(rank: int, who: int, words: str) -> tuple[str, bool]:
    """What one rank alone is handed that is refused when the step is built."""
    three_stages()
    model, params, _ = fpipe.from_sequential(blocks(3), stages=3, loss=MSE)
    usual = {"program": chained(model, fpipe.schedules.zb_h1(3)), "model": model, "example": (params, rows())}
    given: Any = usual | (ODD[words] if rank == who else {})
    return caught(lambda: fpipe.build(runtime="distributed", **given))


@pytest.mark.parametrize("words", ODD)
def test_what_one_rank_refuses_to_build_is_told_to_all(trio: Processes, words: str):
    """Before there was a meeting the others waited until their timeout."""
    who = 1
    for rank, (said, soon) in enumerate(trio.each(building, who, words)):
        assert words in said
        assert soon
        if "differs" not in words:  # who begins to build once that is told says that the run is over
            assert (f"rank {who} failed outside of its ops: " in said) == (rank != who)


def dies(rank: int, who: int) -> tuple[str, bool]:
    def deadly(p: Any, x: Tensor) -> Tensor:
        kill()
        return x @ p["w"]

    def multiply(p: Any, x: Tensor) -> Tensor:
        return x @ p["w"]

    def build(stage: Any) -> Any:
        model = fpipe.from_functions([stage] * 3, MSE)
        program, example = chained(model, fpipe.schedules.zb_h1(3)), (({"w": torch.eye(8)},) * 3, rows())
        return fpipe.build(program, model, runtime="distributed", example=example)

    build(multiply)  # what is traced already takes no time of the others
    return caught(lambda: build(deadly if rank == who else multiply))


def dies_connecting(rank: int, who: int) -> tuple[str, bool]:
    if rank == who:
        transfers.PrefixStore = lambda *_: kill()
    said, took = timed(lambda: three_stages(timeout=1))
    return said, took < 1 + 2 * SOON


@pytest.mark.parametrize(
    "cases", [[(dies, 0), (dies_connecting, 1)], pytest.param([(dies, 2)], marks=pytest.mark.deep)]
)
def test_a_rank_that_is_killed_while_it_builds_is_named_soon(cases: list[tuple[Callable[..., Any], int]]):
    with beside_each_other(len(cases), 3) as groups:
        for three, (how, who) in zip(groups, cases, strict=True):
            three.start(how, who)
        for three, (how, who) in zip(groups, cases, strict=True):
            what = "is gone and did not come to building the step, after the trace"
            what = "did not connect to the others in time" if how is dies_connecting else what
            results = three.results()
            assert results.pop(who) is None
            assert all(told.startswith(f"RankError: rank {who} {what}") and soon for told, soon in results)


def never(rank: int, how: str) -> Any:
    three_stages()  # what is traced already takes no time of the others
    if how == "building":
        return None if rank == 1 else timed(lambda: three_stages(timeout=2))
    program, _, step, params = three_stages(timeout=2)
    return None if rank == 1 else timed(lambda: step(own(program, rank, params), rows()))


def test_a_rank_that_never_comes_is_named():
    with beside_each_other(2, 3) as groups:
        for three, how in zip(groups, ("step", "building"), strict=True):
            three.start(never, how)
        for three, where in zip(groups, ("step 1 in time", "building the step in time"), strict=True):
            first, second, third = three.results()
            assert second is None
            for said, took in (first, third):
                assert said.startswith(f"RankError: rank 1 did not come to {where}")
                assert took < 2 + SOON


def test_the_rank_that_keeps_the_store_is_named():
    """Who is to blame is found through the store, which is gone with it."""
    with beside_each_other(2, 3, tcp=True) as groups:
        for three, how in zip(groups, (kill, stop), strict=True):
            three.start(one_in_trouble, 0, how, 2.0)
        for three in groups:
            for told in [result(pipe) for pipe in three.pipes[1:]]:
                assert told[0].startswith("RankError: rank 0 ")
                assert "the store of the process group" in told[0]
                assert told[1] < 2 + SOON
                assert "start all ranks again" in told[2]
            three.all[0].kill()
    assert not any(one.is_alive() for three in groups for one in three.all)


def leaving(rank: int, how: str) -> str:
    """A build that rank 0 ends, and its process with it at once."""
    model, params, _ = fpipe.from_sequential(blocks(2), stages=2, loss=MSE)
    program = chained(model, fpipe.schedules.gpipe(2), microbatches=4 if how == "refused" or rank else 5)
    try:
        example = None if how == "refused" and rank == 0 else (params, rows())
        fpipe.build(program, model, runtime="distributed", example=example)
    except (ValueError, RuntimeError) as error:
        if rank == 0:
            os._exit(1)
        time.sleep(0.2)
        return str(error)
    return "nothing"


WHY_LEFT = {
    "refused": "rank 0 failed outside of its ops: ValueError: runtime='distributed' needs example=(params, batch)",
    "other": "rank 1 differs from rank 0 in its program: ",
}


def test_the_rank_that_keeps_the_store_leaves_once_others_have_read_why():
    """Started by hand, rank 0 keeps the store: the others heard that it is gone, and not why."""
    with beside_each_other(len(WHY_LEFT), 2, tcp=True) as groups:
        for pair, how in zip(groups, WHY_LEFT, strict=True):
            pair.start(leaving, how)
        for pair, words in zip(groups, WHY_LEFT.values(), strict=True):
            gone, told = pair.results()
            assert gone is None
            assert str(told).startswith(words)


def settled(rank: int, odd: int, what: str) -> list[str]:
    """Steps of which one is under another autocast or number of threads on one rank: compared, or told by its mark."""
    program, _, step, params = three_stages()
    mine, told = own(program, rank, params), list[str]()
    for number in range(1, odd + 1):
        is_odd = bool(rank) and number == odd
        with torch.autocast("cpu", enabled=is_odd and what == "autocast"):
            torch.set_num_threads(2 if is_odd and what == "threads" else 1)
            told.append(timed(lambda: step(mine, rows()))[0])
    torch.set_num_threads(1)
    return told


SETTLED = {
    (3, "autocast"): "ValueError: rank 1 differs from rank 0 in its autocast: cpu to torch.bfloat16 instead",
    (5, "threads"): "ValueError: rank 1 differs from rank 0 in its number of threads: 2 instead of 1",
    (12, "autocast"): "or run under another autocast, other settings or numbers of threads",
}


@pytest.mark.parametrize(("odd", "what"), SETTLED)
def test_settings_that_differ_in_a_step_are_told(trio: Processes, odd: int, what: str):
    """They were called structures, shapes or dtypes."""
    for told in trio.each(settled, odd, what):
        assert told[:-1] == ["worked"] * (odd - 1)
        assert SETTLED[odd, what] in told[-1]


@pytest.mark.parametrize("words", ["word " * 300 + "end", "word" * 300 + "end"], ids=["words", "one word"])
def test_what_an_op_raises_is_told_whole(trio: Processes, words: str):
    """Others had its first 255 bytes, and of one long word "ValueError: .."."""
    first, _, last = trio.each(one_in_trouble, 1, partial(raising, words), None)
    assert first[0].endswith(words)
    assert last[0] == first[0]


def in_vain(rank: int, pids: tuple[int, ...], timeout: float) -> tuple[list[Any], float, float]:
    """A step in which rank 1 hangs until the others have ended it, by Ctrl-C or since they wait no longer."""
    program, model, params, batch = troubled()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), timeout=timeout)
    mine, store, pressed = own(program, rank, params), dist.distributed_c10d._get_default_store(), 0.0
    step(mine, batch)

    def hang() -> None:
        nonlocal pressed
        time.sleep(0.3)
        pressed = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        while time.time() < pressed + 10 and not store.check(["0", "2"]):
            time.sleep(0.02)

    TROUBLE["what"] = hang if rank == 1 else None
    told = [caught(lambda: step(mine, batch))[0]]
    ended = time.time()
    store.set(f"{rank}", "")
    told.append(caught(lambda: step(mine, batch))[0])
    return told, pressed, ended


@pytest.mark.parametrize("who", [(0,), (0, 2, 1)])
def test_ctrl_c_ends_a_wait_for_a_rank_that_hangs(trio: Processes, who: tuple[int, ...]):
    """It did nothing, nor did a second one, until the hang was over. All others end too."""
    pids = tuple(trio.all[rank].pid for rank in who)
    (first, _, ended), (second, pressed, _), (third, _, last) = trio.each(in_vain, pids, 30.0)
    assert ended - pressed < SOON
    assert last - ended < SOON
    assert first[0].startswith("KeyboardInterrupt")
    if len(who) > 1:
        assert third[0].startswith("KeyboardInterrupt")
        assert second[0].startswith("KeyboardInterrupt")
    else:
        assert re.match(r"RankError: rank 0 was interrupted by Ctrl-C in its RECV\(\S+ of step 2", third[0])
        assert second[0] == third[0]
    assert all(after.startswith(OVER) for _, after in (first, second, third))


def test_a_rank_that_hung_says_that_the_others_gave_up_on_it(trio: Processes):
    """It blamed them: they had closed their connections."""
    (first, _, _), (second, _, _), (third, _, _) = trio.each(in_vain, (), 1.0)
    seen = r"RankError: rank 1 did not send what its 1\S+ writes in time; it was last seen in its 1F3 of step 2$"
    assert re.match(seen, first[0])
    assert first[0] == third[0]
    assert second[0] == first[0].replace("RankError: ", "RankError: the others gave up on this rank: ")
