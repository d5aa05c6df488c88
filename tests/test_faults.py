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
from torch.distributed.device_mesh import DeviceMesh

import fpipe
from fpipe.runtimes.processes import communicators
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


def refusing(rank: int, who: int) -> list[Any]:
    """A rank that refuses what it alone is handed, in the first step and later; each time the next step works."""
    program, alone, step, params = three_stages()
    mine, whole = own(program, rank, params), alone(params, rows())
    calls = {
        "nothing": lambda: step((None, None, None), rows()),  # of a new signature, which ranks tell each other
        "parameters": lambda: step(({}, {}, {}), rows()),
        "key": lambda: step(mine, rows(), key="seven"),
        "rows": lambda: step(mine, rows(3)),
    }
    told: list[Any] = []
    for call in calls.values():
        told.append(caught(call if rank == who else lambda: step(mine, rows())))
        told.append(differs(rank, program, step(mine, rows()), whole))
    told.append(caught(calls["key"] if rank == who else lambda: step(mine, rows(7))))  # others trace for it
    return [*told, differs(rank, program, step(mine, rows(7)), alone(params, rows(7)))]


KEY = "TypeError: a key is a whole number"
WHY = ["and was handed None or a meta tensor", "params", KEY, "ValueError: 3 rows cannot fill 4 microbatches", KEY]


@pytest.mark.parametrize("who", [0, 1, 2])
def test_arguments_that_one_rank_refuses_end_all_and_the_next_step_works(trio: Processes, who: int):
    for rank, told in enumerate(trio.each(refusing, who)):
        assert told[1::2] == [[]] * 5
        assert all(soon for _, soon in told[:-2:2])  # at last, the others trace first
        for (said, _), why in zip(told[::2], WHY, strict=True):
            assert why in said
            assert said.startswith(f"RankError: rank {who} failed outside of its ops: ") == (rank != who)


def of_other_sizes(rank: int, who: int) -> list[Any]:
    """One rank is handed more rows than the others, or fewer: first sizes that are new, and then known ones."""
    program, alone, step, params = three_stages(check_batch="never")
    mine, told = own(program, rank, params), list[Any]()
    step(mine, rows())
    for _ in range(2):
        told += [caught(lambda n=n: step(mine, rows(n if rank == who else 10))) for n in (24, 4)]
        told += [differs(rank, program, step(mine, rows(n)), alone(params, rows(n))) for n in (24, 4, 10)]
    return told


@pytest.mark.parametrize("who", [0, 2])
def test_batches_of_different_sizes_end_all_ranks_and_the_next_step_works(trio: Processes, who: int):
    """A message too large for the memory that waits for it would end the process: gloo throws where nobody catches."""
    for told in trio.each(of_other_sizes, who):
        assert [one for one in told if isinstance(one, list)] == [[]] * 6
        ends = [one for one in told if isinstance(one, tuple)]
        assert all(soon for _, soon in ends[2:])  # what is new is traced first
        for said, _ in ends:
            assert said.startswith("RankError: rank ")
            assert "they were handed arguments of different structures, shapes or dtypes" in said


def recording(rank: int) -> list[Any]:
    """What goes wrong on one rank when another is over with its part, and waits to put a timeline together."""
    program, model, params, batch = troubled()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), record=True)
    step(own(program, rank, params), batch)
    broken = own(program, rank, params)
    if rank == 0:  # what comes last: the gradient of the last microbatch on rank 0
        TROUBLE["what"] = None
        broken = ({"w": torch.eye(5)}, None, None)
    return [caught(lambda: step(broken, batch)), step(own(program, rank, params), batch).timeline is not None]


def test_a_rank_that_fails_while_others_record(trio: Processes):
    for rank, ((said, soon), next_works) in enumerate(trio.each(recording)):
        assert soon
        assert next_works
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
    """A terminal sends it to all; who waits in C hears it of the others. Cut off in a SEND, one would send twice."""
    pids = tuple(trio.all[rank].pid for rank in who)  # itself last
    for rank, ((said, soon), after) in enumerate(trio.each(interrupted, who[-1], pids)):
        assert soon
        assert after[0] == "worked"
        assert said.startswith(
            "KeyboardInterrupt" if rank in who else f"RankError: rank {who[0]} failed in SEND(y[{who[0]},3]>"
        )


ODD: dict[str, dict[str, Any]] = {
    "ValueError: loss_scale is a finite number above 0, such as 2.0**16; found -1.": {"loss_scale": -1},
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


def building(rank: int, who: int) -> list[Any]:
    """What one rank alone is handed that is refused when the step is built; each time the next build works."""
    three_stages()
    model, params, _ = fpipe.from_sequential(blocks(3), stages=3, loss=MSE)
    usual = {"program": chained(model, fpipe.schedules.zb_h1(3)), "model": model, "example": (params, rows())}
    told: list[Any] = []
    for how in ODD.values():
        given: Any = usual | (how if rank == who else {})
        told.append(caught(lambda given=given: fpipe.build(runtime="distributed", **given)))
    return [*told, caught(three_stages)]


@pytest.mark.parametrize("who", [0, 1])
def test_what_one_rank_refuses_to_build_is_told_to_all_and_the_next_build_works(trio: Processes, who: int):
    """Before there was a meeting the others waited until their timeout, and never met that rank again."""
    for rank, told in enumerate(trio.each(building, who)):
        assert told[-1][0] == "worked"
        for (said, soon), words in zip(told, ODD, strict=False):
            assert words in said
            assert soon
            if "differs" not in words:
                assert said.startswith(f"RankError: rank {who} failed outside of its ops: ") == (rank != who)


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
        communicators.PrefixStore = lambda *_: kill()
    said, took = timed(lambda: three_stages(timeout=1))
    return said, took < 1 + 2 * SOON


@pytest.mark.parametrize(
    ("how", "who"), [(dies, 0), pytest.param(dies, 2, marks=pytest.mark.deep), (dies_connecting, 1)]
)
def test_a_rank_that_is_killed_while_it_builds_is_named_soon(how: Callable[..., tuple[str, bool]], who: int):
    said = f"LostRank: rank {who} is gone, on the way to building the step, after the trace"
    with Processes(3) as three:
        three.start(how, who)
        for rank, told in enumerate(three.results()):
            assert told == (None if rank == who else (said, True))


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
        for three, where in zip(groups, ("", "come to building the step in 2 s"), strict=True):
            first, second, third = three.results()
            assert second is None
            for said, took in (first, third):
                assert said.startswith("LostRank: rank 1 did not ")
                assert took < 2 + SOON
                assert said.endswith(where)


def test_the_rank_that_keeps_the_store_is_named():
    """Who is to blame is found through the store, which is gone with it."""
    with beside_each_other(2, 3, tcp=True) as groups:
        for three, how in zip(groups, (kill, stop), strict=True):
            three.start(one_in_trouble, 0, how, 2.0)
        for three in groups:
            for told in [result(pipe) for pipe in three.pipes[1:]]:
                assert told[0].startswith("LostRank: rank 0 ")
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


@pytest.mark.parametrize("how", WHY_LEFT)
def test_the_rank_that_keeps_the_store_leaves_once_others_have_read_why(how: str):
    """Started by hand, rank 0 keeps the store: the others heard that it is gone, and not why."""
    with Processes(2, tcp=True) as pair:
        pair.start(leaving, how)
        gone, told = pair.results()
    assert gone is None
    assert str(told).startswith(WHY_LEFT[how])


def settled(rank: int) -> list[str]:
    """Steps under another autocast or number of threads on one rank, compared at first and later by their marks."""
    program, _, step, params = three_stages()
    mine, told = own(program, rank, params), list[str]()
    for number in range(1, 13):
        with torch.autocast("cpu", enabled=bool(rank) and number in (3, 12)):
            torch.set_num_threads(2 if rank and number == 5 else 1)
            told.append(timed(lambda: step(mine, rows()))[0])
    torch.set_num_threads(1)
    return told


def test_settings_that_differ_in_a_step_are_told(trio: Processes):
    """They were called structures, shapes or dtypes."""
    for told in trio.each(settled):
        assert told[2].startswith(
            "ValueError: rank 1 differs from rank 0 in its autocast: cpu to torch.bfloat16 instead"
        )
        assert told[4].startswith("ValueError: rank 1 differs from rank 0 in its number of threads: 2 instead of 1")
        assert "or run under another autocast, other settings or numbers of threads" in told[11]
        assert [said for at, said in enumerate(told) if at not in (2, 4, 11)] == ["worked"] * 9


@pytest.mark.parametrize("words", ["word " * 300 + "end", "word" * 300 + "end"], ids=["words", "one word"])
def test_what_an_op_raises_is_told_whole(trio: Processes, words: str):
    """Others had its first 255 bytes, and of one long word "ValueError: .."."""
    first, _, last = trio.each(one_in_trouble, 1, partial(raising, words), None)
    assert first[0].endswith(words)
    assert last[0] == first[0]
    assert first[2] == "worked"


def in_vain(rank: int, pids: tuple[int, ...], timeout: float) -> tuple[list[Any], float, float]:
    """A step in which rank 1 hangs until the others have ended it, by Ctrl-C or since they wait no longer. The group is
    one of its own, which is lost."""
    mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("pp",))
    program, model, params, batch = troubled()
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch), timeout=timeout)
    mine, store, pressed = own(program, rank, params), dist.distributed_c10d._get_default_store(), 0.0
    name = dist.get_process_group_ranks(mesh.get_group()), mesh.get_group().group_name
    step(mine, batch)

    def hang() -> None:
        nonlocal pressed
        time.sleep(0.3)
        pressed = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        while time.time() < pressed + 10 and not store.check([f"{name} {rank}" for rank in (0, 2)]):
            time.sleep(0.02)

    TROUBLE["what"] = hang if rank == 1 else None
    told = [caught(lambda: step(mine, batch))[0]]
    ended = time.time()
    store.set(f"{name} {rank}", "")
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
    others = third[0] if len(who) == 1 else first[1]
    assert re.match(r"LostRank: rank \d was interrupted by Ctrl-C in its RECV\(\S+ of step 2", others)
    if len(who) > 1:
        assert third[0].startswith("KeyboardInterrupt")
        assert second[0].startswith("KeyboardInterrupt")
    else:
        assert second[0] == third[0]
    assert all(after.endswith("start all ranks again.") for _, after in (first, third))
    assert second[1].startswith("LostRank: rank ")


def test_a_rank_that_hung_says_that_the_others_gave_up_on_it(trio: Processes):
    """It blamed them: they had closed their connections."""
    (first, _, _), (second, _, _), (third, _, _) = trio.each(in_vain, (), 1.0)
    seen = r"LostRank: rank 1 did not send what its 1\S+ writes in time; it was last seen in its 1F3 of step 2$"
    assert re.match(seen, first[0])
    assert first[0] == third[0]
    assert second[0] == first[0].replace("LostRank: ", "LostRank: the others gave up on this rank: ")
