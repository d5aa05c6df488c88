"""A fault on one process ends all processes in time, names the rank to blame, and leaves nothing running."""

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
from fpipe.runtimes.faults.watchdog import watchdog_of_process
from fpipe.runtimes.processes import transfers
from tests.processes import SOON, Processes, receive_answer, several_groups, time_call
from tests.test_distributed import (
    MSE,
    TROUBLE,
    build_blocks,
    cut_blocks,
    differing_fields,
    fail_on_one_rank,
    kill,
    local_part,
    pipeline_program,
    raise_memory_error,
    rows,
    suspend,
    trouble_program,
)


def timed_error(call: Callable[[], Any]) -> tuple[str, bool]:
    """Return the error of a call, and whether it came soon enough."""
    message, seconds = time_call(call)
    return message, seconds < SOON


build_three_stages = partial(build_blocks, 3, "zb_h1")


RUN_IS_OVER = "RankError: the run is over, start all ranks again from a checkpoint: "


def refuse_arguments(rank: int, culprit: int, argument: str) -> list[tuple[str, bool]]:
    """Return the outcomes of a step whose arguments one rank refuses, and of the next step."""
    program, _, step, params = build_three_stages()
    local_params = local_part(program, rank, params)
    calls = {
        "nothing": lambda: step((None, None, None), rows()),
        "parameters": lambda: step(({}, {}, {}), rows()),
        "key": lambda: step(local_params, rows(), key="seven"),
        "rows": lambda: step(local_params, rows(3)),
    }
    step(local_params, rows())
    return [
        timed_error(calls[argument] if rank == culprit else lambda: step(local_params, rows())),
        timed_error(lambda: step(local_params, rows())),
    ]


ARGUMENT_REFUSALS = {
    "nothing": "and was handed None or a meta tensor",
    "parameters": "params",
    "key": "TypeError: a key is a whole number",
    "rows": "ValueError: 3 rows cannot fill 4 microbatches",
}


@pytest.mark.parametrize("argument", ARGUMENT_REFUSALS)
def test_arguments_that_one_rank_refuses_end_the_run_on_all(trio: Processes, argument: str):
    culprit = 2
    for rank, ((message, is_soon), (next_message, _)) in enumerate(trio.run(refuse_arguments, culprit, argument)):
        assert is_soon
        assert ARGUMENT_REFUSALS[argument] in message
        assert message.startswith(f"RankError: rank {culprit} failed outside of its ops: ") == (rank != culprit)
        assert next_message.startswith(f"{RUN_IS_OVER}rank {culprit} failed outside of its ops: ")


def refuse_build(rank: int, culprit: int, options: dict[str, Any]) -> tuple[str, bool]:
    """Return the error of a build in which the culprit passes a wrong option, and whether the error came soon."""
    program, model, *example = trouble_program()
    options = {"runtime": "distributed", "example": tuple(example), **(options if rank == culprit else {})}
    return timed_error(lambda: fpipe.build(program, model, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record": "yes"}, "record is True or False; found 'yes'"),
        ({"timeout": "5"}, "timeout is a number; found '5'"),
        ({"recrod": True}, "build() has no argument recrod; did you mean record?"),
    ],
)
def test_a_wrong_option_of_build_on_one_rank_ends_the_run_on_all(trio: Processes, options: Any, message: str):
    """All ranks once waited for the timeout, as the check of arguments came before the ranks met."""
    culprit = 1
    for rank, (outcome, is_soon) in enumerate(trio.run(refuse_build, culprit, options)):
        assert is_soon
        assert message in outcome
        assert outcome.startswith(f"RankError: rank {culprit} failed") == (rank != culprit)


def end_run_between_steps(rank: int) -> list[str]:
    """Return the errors of two steps after a fault that ended the run as the last wait of a step was over."""
    program, _, step, params = build_three_stages()
    local_params = local_part(program, rank, params)
    step(local_params, rows())
    watchdog = watchdog_of_process()
    watchdog.ended = watchdog.faults.write_fault("rank 2 failed in 2F0: MemoryError")
    return [time_call(lambda: step(local_params, rows()))[0] for _ in range(2)]


def test_the_first_error_after_a_fault_names_the_fault_alone(trio: Processes):
    """Where a rank had read the fault as its step ended, it used to say at first that the run was over already."""
    for message, next_message in trio.run(end_run_between_steps):
        assert message == "RankError: rank 2 failed in 2F0: MemoryError"
        assert next_message == f"{RUN_IS_OVER}rank 2 failed in 2F0: MemoryError"


def step_with_other_sizes(rank: int, culprit: int, is_known: bool) -> tuple[str, bool]:
    """Run a step in which one rank is handed more rows than the others."""
    program, plain_step, step, params = build_three_stages(check_batch="never")
    local_params = local_part(program, rank, params)
    for count in (10, 24) if is_known else (10,):
        assert not differing_fields(rank, program, step(local_params, rows(count)), plain_step(params, rows(count)))
    return timed_error(lambda: step(local_params, rows(24 if rank == culprit else 10)))


@pytest.mark.parametrize("is_known", [False, True])
@pytest.mark.parametrize("culprit", [0, 2])
def test_batches_of_different_sizes_end_all_ranks(trio: Processes, culprit: int, is_known: bool):
    """gloo throws where nobody catches when a message is larger than its buffer: this used to end the process."""
    for message, is_soon in trio.run(step_with_other_sizes, culprit, is_known):
        assert is_soon or not is_known  # a new signature is traced before it fails
        assert message.startswith("RankError: rank ")
        assert "they were handed arguments of different structures, shapes or dtypes" in message


def fail_while_recording(rank: int) -> tuple[str, bool]:
    """Let rank 0 fail while all others have finished and wait to join the timeline."""
    program, model, params, batch = trouble_program()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), record=True)
    step(local_part(program, rank, params), batch)
    wrong_params = local_part(program, rank, params)
    if rank == 0:  # the last op of all: the gradient of the last microbatch on rank 0
        TROUBLE["what"] = None
        wrong_params = ({"w": torch.eye(5)}, None, None)
    return timed_error(lambda: step(wrong_params, batch))


def test_a_rank_that_fails_while_others_record_ends_all(trio: Processes):
    for rank, (message, is_soon) in enumerate(trio.run(fail_while_recording)):
        assert is_soon
        assert ("rank 0 failed" in message) == (rank > 0)


def interrupt_steps(rank: int, slow_rank: int, pids: tuple[int, ...]) -> list[Any]:
    program, model, params, batch = trouble_program()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch))
    local_params = local_part(program, rank, params)

    def interrupt() -> None:
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        time.sleep(0.5)

    step(local_params, batch)
    TROUBLE["what"] = interrupt if rank == slow_rank else None
    return [timed_error(lambda: step(local_params, batch)), timed_error(lambda: step(local_params, batch))]


@pytest.mark.parametrize("interrupted_ranks", [(0,), (1,), (0, 2, 1)])
def test_ctrl_c_on_one_rank_or_all_ends_all_ranks(trio: Processes, interrupted_ranks: tuple[int, ...]):
    """A terminal sends SIGINT to all ranks; a rank that waits in C learns of it from the others."""
    pids = tuple(trio.all[rank].pid for rank in interrupted_ranks)  # its own process last
    for rank, ((message, is_soon), next_outcome) in enumerate(trio.run(interrupt_steps, interrupted_ranks[-1], pids)):
        assert is_soon
        assert next_outcome[0].startswith(RUN_IS_OVER)
        assert message.startswith(
            "KeyboardInterrupt"
            if rank in interrupted_ranks
            else f"RankError: rank {interrupted_ranks[0]} failed in {interrupted_ranks[0]}F3"
        )


BUILD_REFUSALS: dict[str, dict[str, Any]] = {
    "ValueError: loss_scale is a finite number above 0; found -1.": {"loss_scale": -1},
    "ValueError: runtime='distributed' needs example=(params, batch)": {"example": None},
    "ValueError: the program has 2 stages and the model 3; start from": {
        "program": pipeline_program(2, fpipe.schedules.gpipe(2))
    },
    "differs from rank 0 in its options": {"record": True},
    "a run on zeros, to know what it writes, ended in ZeroDivisionError": {
        "model": fpipe.from_functions([lambda p, x: x / (1 / x.sum().item())] * 3, loss=MSE)
    },
    "ValueError: timeout is a number of seconds above 0; found 0.": {"timeout": 0},
}


def build_with_refusal(rank: int, culprit: int, message: str) -> tuple[str, bool]:
    """Build a step on all ranks, with refused options on a single rank."""
    build_three_stages()
    model, params, _ = cut_blocks(3, 3)
    defaults = {
        "program": pipeline_program(model, fpipe.schedules.zb_h1(3)),
        "model": model,
        "example": (params, rows()),
    }
    options: Any = defaults | (BUILD_REFUSALS[message] if rank == culprit else {})
    return timed_error(lambda: fpipe.build(runtime="distributed", **options))


@pytest.mark.parametrize("message", BUILD_REFUSALS)
def test_a_build_refused_by_one_rank_is_refused_on_all(trio: Processes, message: str):
    """Used to leave all others waiting until their timeout."""
    culprit = 1
    for rank, (actual_message, is_soon) in enumerate(trio.run(build_with_refusal, culprit, message)):
        assert message in actual_message
        assert is_soon
        if "differs" not in message:  # a rank that starts to build later hears that the run is over
            assert (f"rank {culprit} failed outside of its ops: " in actual_message) == (rank != culprit)


def die_tracing(rank: int, culprit: int) -> tuple[str, bool]:
    def deadly(p: Any, x: Tensor) -> Tensor:
        kill()
        return x @ p["w"]

    def multiply(p: Any, x: Tensor) -> Tensor:
        return x @ p["w"]

    def build(stage: Any) -> Any:
        model = fpipe.from_functions([stage] * 3, MSE)
        program, example = pipeline_program(model, fpipe.schedules.zb_h1(3)), (({"w": torch.eye(8)},) * 3, rows())
        return fpipe.build(program, model, runtime="distributed", example=example)

    build(multiply)  # traces are cached: the next build costs the other ranks no time
    return timed_error(lambda: build(deadly if rank == culprit else multiply))


def die_connecting(rank: int, culprit: int) -> tuple[str, bool]:
    if rank == culprit:
        transfers.PrefixStore = lambda *_: kill()
    message, seconds = time_call(lambda: build_three_stages(timeout=1))
    return message, seconds < 1 + 2 * SOON


@pytest.mark.parametrize(
    "cases", [[(die_tracing, 0), (die_connecting, 1)], pytest.param([(die_tracing, 2)], marks=pytest.mark.deep)]
)
def test_a_rank_that_is_killed_while_it_builds_is_named_soon(cases: list[tuple[Callable[..., Any], int]]):
    with several_groups(len(cases), 3) as groups:
        for processes, (build, culprit) in zip(groups, cases, strict=True):
            processes.start(build, culprit)
        for processes, (build, culprit) in zip(groups, cases, strict=True):
            reason = "is gone and did not come to building the step, after the trace"
            reason = "did not connect to the others in time" if build is die_connecting else reason
            results = processes.results()
            assert results.pop(culprit) is None
            assert all(text.startswith(f"RankError: rank {culprit} {reason}") and is_soon for text, is_soon in results)


def run_without_rank_1(rank: int, phase: str) -> Any:
    build_three_stages()  # traces are cached: the next build costs the other ranks no time
    if phase == "building":
        return None if rank == 1 else time_call(lambda: build_three_stages(timeout=2))
    program, _, step, params = build_three_stages(timeout=2)
    return None if rank == 1 else time_call(lambda: step(local_part(program, rank, params), rows()))


def test_a_rank_that_never_comes_is_named():
    with several_groups(2, 3) as groups:
        for processes, phase in zip(groups, ("step", "building"), strict=True):
            processes.start(run_without_rank_1, phase)
        for processes, place in zip(groups, ("step 1 in time", "building the step in time"), strict=True):
            rank_0_outcome, rank_1_outcome, rank_2_outcome = processes.results()
            assert rank_1_outcome is None
            for message, seconds in (rank_0_outcome, rank_2_outcome):
                assert message.startswith(f"RankError: rank 1 did not come to {place}")
                assert seconds < 2 + SOON


def test_the_rank_that_keeps_the_store_is_named():
    """The blame is settled through the store, which dies with the rank that keeps it."""
    with several_groups(2, 3, tcp=True) as groups:
        for processes, action in zip(groups, (kill, suspend), strict=True):
            processes.start(fail_on_one_rank, 0, action, 2.0)
        for processes in groups:
            for outcome in [receive_answer(pipe) for pipe in processes.pipes[1:]]:
                assert outcome[0].startswith("RankError: rank 0 ")
                assert "the store of the process group" in outcome[0]
                assert outcome[1] < 2 + SOON
                assert "start all ranks again" in outcome[2]
            processes.all[0].kill()
    assert not any(process.is_alive() for processes in groups for process in processes.all)


def leave_after_refusal(rank: int, reason: str) -> str:
    """Build a step that fails on both ranks, and end the process of rank 0 at once."""
    model, params, _ = cut_blocks(2, 2)
    program = pipeline_program(model, fpipe.schedules.gpipe(2), microbatches=4 if reason == "refused" or rank else 5)
    try:
        example = None if reason == "refused" and rank == 0 else (params, rows())
        fpipe.build(program, model, runtime="distributed", example=example)
    except (ValueError, RuntimeError) as error:
        if rank == 0:
            os._exit(1)
        time.sleep(0.2)
        return str(error)
    return "nothing"


LEAVING_MESSAGES = {
    "refused": "rank 0 failed outside of its ops: ValueError: runtime='distributed' needs example=(params, batch)",
    "other": "rank 1 differs from rank 0 in its program: ",
}


def test_the_rank_that_keeps_the_store_leaves_after_others_read_its_error():
    """Used to say only that the store is gone: rank 0 keeps it where ranks are started by hand."""
    with several_groups(len(LEAVING_MESSAGES), 2, tcp=True) as groups:
        for pair, reason in zip(groups, LEAVING_MESSAGES, strict=True):
            pair.start(leave_after_refusal, reason)
        for pair, expected_message in zip(groups, LEAVING_MESSAGES.values(), strict=True):
            dead_result, message = pair.results()
            assert dead_result is None
            assert str(message).startswith(expected_message)


def steps_with_other_settings(rank: int, differing_step: int, setting: str) -> list[str]:
    """Run steps; in the last one a rank has another autocast or number of threads."""
    program, _, step, params = build_three_stages()
    local_params, outcomes = local_part(program, rank, params), list[str]()
    for step_number in range(1, differing_step + 1):
        differs = bool(rank) and step_number == differing_step
        with torch.autocast("cpu", enabled=differs and setting == "autocast"):
            torch.set_num_threads(2 if differs and setting == "threads" else 1)
            outcomes.append(time_call(lambda: step(local_params, rows()))[0])
    torch.set_num_threads(1)
    return outcomes


SETTINGS_MESSAGES = {
    (3, "autocast"): "ValueError: rank 1 differs from rank 0 in its autocast: cpu to torch.bfloat16 instead",
    (5, "threads"): "ValueError: rank 1 differs from rank 0 in its number of threads: 2 instead of 1",
    (12, "autocast"): "or run under another autocast, other settings or numbers of threads",
}


@pytest.mark.parametrize(("differing_step", "setting"), SETTINGS_MESSAGES)
def test_settings_that_differ_in_a_step_are_named(trio: Processes, differing_step: int, setting: str):
    """Used to blame structures, shapes or dtypes."""
    for outcomes in trio.run(steps_with_other_settings, differing_step, setting):
        assert outcomes[:-1] == ["worked"] * (differing_step - 1)
        assert SETTINGS_MESSAGES[differing_step, setting] in outcomes[-1]


@pytest.mark.parametrize("message", ["word " * 300 + "end", "word" * 300 + "end"], ids=["words", "one word"])
def test_an_error_message_reaches_other_ranks_uncut(trio: Processes, message: str):
    """Used to be cut at 255 bytes, and one long word became "ValueError: .."."""
    rank_0_outcome, _, rank_2_outcome = trio.run(fail_on_one_rank, 1, partial(raise_memory_error, message), None)
    assert rank_0_outcome[0].endswith(message)
    assert rank_2_outcome[0] == rank_0_outcome[0]


def wait_for_hanging_rank(rank: int, pids: tuple[int, ...], timeout: float) -> tuple[list[Any], float, float]:
    """Run a step in which rank 1 hangs until the others have ended it, by Ctrl-C or by their timeout."""
    program, model, params, batch = trouble_program()
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), timeout=timeout)
    local_params, store = local_part(program, rank, params), dist.distributed_c10d._get_default_store()
    interrupt_time = 0.0
    step(local_params, batch)

    def hang() -> None:
        nonlocal interrupt_time
        time.sleep(0.3)
        interrupt_time = time.time()
        for pid in pids:
            os.kill(pid, signal.SIGINT)
        while time.time() < interrupt_time + 10 and not store.check(["0", "2"]):
            time.sleep(0.02)

    TROUBLE["what"] = hang if rank == 1 else None
    messages = [timed_error(lambda: step(local_params, batch))[0]]
    end_time = time.time()
    store.set(f"{rank}", "")
    messages.append(timed_error(lambda: step(local_params, batch))[0])
    return messages, interrupt_time, end_time


@pytest.mark.parametrize("interrupted_ranks", [(0,), (0, 2, 1)])
def test_ctrl_c_ends_a_wait_for_a_rank_that_hangs(trio: Processes, interrupted_ranks: tuple[int, ...]):
    """Used to do nothing until the hang was over, as did a second Ctrl-C. All other ranks end too."""
    pids = tuple(trio.all[rank].pid for rank in interrupted_ranks)
    (rank_0, _, rank_0_end), (rank_1, interrupt_time, _), (rank_2, _, rank_2_end) = trio.run(
        wait_for_hanging_rank, pids, 30.0
    )
    assert rank_0_end - interrupt_time < SOON
    assert rank_2_end - rank_0_end < SOON
    assert rank_0[0].startswith("KeyboardInterrupt")
    if len(interrupted_ranks) > 1:
        assert rank_2[0].startswith("KeyboardInterrupt")
        assert rank_1[0].startswith("KeyboardInterrupt")
    else:
        assert re.match(r"RankError: rank 0 was interrupted by Ctrl-C in its RECV\(\S+ of step 2", rank_2[0])
        assert rank_1[0] == rank_2[0]
    assert all(next_message.startswith(RUN_IS_OVER) for _, next_message in (rank_0, rank_1, rank_2))


def test_a_rank_that_hung_reports_that_the_others_gave_up_on_it(trio: Processes):
    """Used to blame all others for having closed their connections."""
    (rank_0, _, _), (rank_1, _, _), (rank_2, _, _) = trio.run(wait_for_hanging_rank, (), 1.0)
    pattern = r"RankError: rank 1 did not send what its 1\S+ writes in time; it was last seen in its 1F3 of step 2$"
    assert re.match(pattern, rank_0[0])
    assert rank_0[0] == rank_2[0]
    assert rank_1[0] == rank_0[0].replace("RankError: ", "RankError: the others gave up on this rank: ")
