"""One thread per rank: the bits of one thread, errors that name their place, and no threads left."""

import _thread
import gc
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from itertools import pairwise
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fpipe
from fpipe.tree import leaves
from tests.processes import SOON
from tests.test_distributed import MSE, blocks, pipeline_program, rows

ROWS = torch.ones(4), torch.zeros(4)
PARAMS = {"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)}
ONE_F_ONE_B = fpipe.schedules.one_f_one_b(2)


def times_w(p: Any, x: Tensor) -> Tensor:
    return x * p["w"]


def local_and_threaded_steps(
    *functions: Callable[..., Tensor], schedule: Any = ONE_F_ONE_B, microbatches: int = 4
) -> tuple[Any, Any]:
    """Build a step of two stages for one thread and for two."""
    model = fpipe.from_functions(functions, lambda y, t: (y - t).square().mean())
    program = pipeline_program(model, schedule, microbatches=microbatches)
    return fpipe.build(program, model), fpipe.build(program, model, runtime="threads")


def equal_bits(result: fpipe.Result, expected: fpipe.Result) -> bool:
    leaves_by_result = [
        [*map(leaves, (value.loss, value.grads, value.outputs, value.state or ()))] for value in (result, expected)
    ]
    return all(torch.equal(a, b) for pair in zip(*leaves_by_result, strict=True) for a, b in zip(*pair, strict=True))


MEETING: list[threading.Barrier] = []
MET: set[int] = set()


@torch.library.custom_op("fpipe_tests::meet", mutates_args=())
def meet(x: Tensor) -> Tensor:
    """Copy x in an op that a trace keeps; its first call on a thread waits for a call on the second thread."""
    if MEETING and threading.get_ident() not in MET:
        MET.add(threading.get_ident())
        MEETING[0].wait()
    return x.clone()


meet.register_fake(lambda x: torch.empty_like(x))
meet.register_autograd(lambda ctx, dy: dy)


def test_ranks_run_at_the_same_time():
    """Each rank blocks in its first forward until both ranks are there."""
    _, step = local_and_threaded_steps(*[lambda p, x: meet(x * p["w"])] * 2, schedule=fpipe.schedules.dualpipe(2))
    step(PARAMS, ROWS)
    MET.clear()
    MEETING.append(threading.Barrier(2, timeout=20))
    try:
        assert step(PARAMS, ROWS).loss.item() == 36
    finally:
        MEETING.clear()
    assert len(MET) == 2


@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_recorded_ops_of_a_rank_do_not_overlap(runtime: str):
    """From the second step on (the first also counts bytes), ops of a rank follow each other, without their waits."""
    model, params, _ = fpipe.from_sequential(blocks(), stages=4, loss=MSE)
    program = pipeline_program(model, fpipe.schedules.zbv(2))
    step = fpipe.build(program, model, runtime=runtime, record=True)
    for _ in range(2):
        started = time.perf_counter()
        timeline = step(params, rows()).timeline
        seconds = time.perf_counter() - started
    assert {op for op, _, _ in timeline.events} == {*program.ops}
    times_by_op = {
        op: (start, end) for op, start, end in timeline.events if op.kind in "FIW"
    }  # an ADD may be a part of its W
    for rank in range(2):
        times = sorted(times for op, times in times_by_op.items() if op.rank == rank)
        assert all(0 <= start < end < seconds for start, end in times)
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
    writer_by_value = {value: op for op in times_by_op for value in op.writes}
    assert all(
        times_by_op[writer_by_value[v]][1] <= start
        for op, (start, _) in times_by_op.items()
        for v in op.reads
        if v in writer_by_value
    )


def raise_for_microbatch_2(p: Any, x: Tensor, *, microbatch: int) -> Tensor:
    """Raise for one microbatch, in a stage that looks at data and so runs under autograd."""
    if microbatch == 2 and float(x.detach().sum()) > 1e3:
        raise KeyError("too much")
    return x * p["w"]


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_an_error_of_a_stage_names_its_op_and_the_next_step_works():
    _, step = local_and_threaded_steps(times_w, raise_for_microbatch_2)
    good_batch, bad_batch = (torch.ones(8), torch.zeros(8)), (torch.full((8,), 1e4), torch.zeros(8))
    expected = step(PARAMS, good_batch)
    for _ in range(3):
        started = time.perf_counter()
        with pytest.raises(KeyError, match="too much") as error_info:
            step(PARAMS, bad_batch)
        assert time.perf_counter() - started < SOON
        assert error_info.value.__notes__ == ["in 1F2: stage 1 (raise_for_microbatch_2), microbatch 2, rank 1"]
        assert equal_bits(step(PARAMS, good_batch), expected)


@pytest.mark.usefixtures("small_heap")
def test_threads_end_with_their_step():
    model, params, _ = fpipe.from_sequential(blocks(), stages=4, loss=MSE)
    threads_before = worker_threads()
    step = fpipe.build(pipeline_program(model, fpipe.schedules.gpipe(4)), model, runtime="threads")
    for _ in range(50):
        step(params, rows())
    new_threads = worker_threads() - threads_before
    assert {thread.name for thread in new_threads} == {f"fpipe rank {rank}_0" for rank in (1, 2, 3)}
    del step
    gc.collect()
    for thread in new_threads:
        thread.join(5)
    assert not any(thread.is_alive() for thread in new_threads)


def worker_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("fpipe rank")}


@pytest.mark.usefixtures("small_heap")
def test_a_step_keeps_nothing_alive():
    model, params, _ = fpipe.from_sequential(blocks(), stages=2, loss=MSE)
    step = fpipe.build(pipeline_program(model, fpipe.schedules.zb_h1(2)), model, runtime="threads")
    batch = rows()
    step(params, batch)
    step(params, batch)
    gc.collect()
    tensors_before = count_tensors()
    for _ in range(5):
        step(params, batch)
    assert count_tensors() == tensors_before


def count_tensors() -> int:
    """Count live tensors by their type alone: isinstance would call __class__ of other objects."""
    return sum(issubclass(type(value), Tensor) for value in gc.get_objects())


def test_one_step_in_several_threads_at_once():
    model, params, _ = fpipe.from_sequential(blocks(), stages=2, loss=MSE)
    step = fpipe.build(pipeline_program(model, fpipe.schedules.one_f_one_b(2)), model, runtime="threads")
    batches = [(torch.full((10, 8), float(n)), rows()[1]) for n in range(8)]
    expected = [step(params, batch) for batch in batches]
    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(lambda batch: step(params, batch), batches)]
    assert all(map(equal_bits, results, expected))


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_ctrl_c_ends_every_rank_and_the_next_step_works():
    def stage(p: Any, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e3:
            _thread.interrupt_main()
            time.sleep(0.05)
        return x * p["w"]

    _, step = local_and_threaded_steps(times_w, stage)
    expected = step(PARAMS, ROWS)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            step(PARAMS, (ROWS[0] * 1e4, ROWS[1]))
        assert equal_bits(step(PARAMS, ROWS), expected)


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_a_second_ctrl_c_does_not_wait_and_leaves_the_next_step_right(monkeypatch: pytest.MonkeyPatch):
    """It used to leave a worker in its op, and a failed step that the next step took for its own."""
    is_inside, may_go_on, waits = threading.Event(), threading.Event(), list[Any]()

    class Queue(SimpleQueue[Any]):
        def get(self) -> Any:  # type: ignore[override]
            if not may_go_on.is_set() and threading.current_thread() is threading.main_thread():
                assert is_inside.wait(10)
                raise KeyboardInterrupt  # the first, in a RECV of the caller's thread
            return super().get()

    def wait_in_op(p: Any, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e3:
            is_inside.set()
            may_go_on.wait(10)
        return x * p["w"]

    def interrupt_again(futures: Any) -> Any:
        """A second Ctrl-C, while the caller's thread waits for the others."""
        waits.append(futures)
        if len(waits) % 2:
            raise KeyboardInterrupt
        return wait(futures)

    may_go_on.set()
    monkeypatch.setattr("fpipe.runtimes.in_process.threads.wait", interrupt_again)
    monkeypatch.setattr("fpipe.runtimes.in_process.threads.SimpleQueue", Queue)
    _, step = local_and_threaded_steps(times_w, wait_in_op)
    expected = [(batch, step(PARAMS, batch)) for batch in (ROWS, (torch.ones(8), torch.zeros(8)))]
    for batch, result in expected:
        is_inside.clear()
        may_go_on.clear()
        with pytest.raises(KeyboardInterrupt):
            step(PARAMS, (ROWS[0] * 1e4, ROWS[1]))
        assert len(waits) % 2 == 1
        assert not may_go_on.is_set()
        threading.Timer(0.05, may_go_on.set).start()
        assert equal_bits(step(PARAMS, batch), result)


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_stages_under_autograd_take_turns_with_random_numbers():
    """Torch has one generator for all threads, so stages that draw at once would mix their numbers."""

    def noisy(p: Any, x: Tensor, *, key: int) -> Tensor:
        return nn.functional.dropout(x, 0.5) * p["w"] + (0 if x.detach().sum() > 1e9 else 1)

    local_step, threaded_step = local_and_threaded_steps(
        noisy, noisy, schedule=fpipe.schedules.dualpipe(2), microbatches=8
    )
    batch = torch.ones(32, 64), torch.zeros(32, 64)
    for key in range(3):
        assert equal_bits(threaded_step(PARAMS, batch, key=key), local_step(PARAMS, batch, key=key))


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_workers_have_the_callers_number_of_threads():
    """The bits of a matrix product depend on this number, and torch has one for each thread."""
    calls: list[tuple[int, int]] = []

    def stage(p: Any, x: Tensor) -> Tensor:
        calls.append((threading.get_ident(), torch.get_num_threads()))
        return x * p["w"] if x.detach().sum() > 0 else x

    _, step = local_and_threaded_steps(stage, stage, microbatches=2)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        step(PARAMS, ROWS)
        calls.clear()
        step(PARAMS, ROWS)
        assert {torch_threads for _, torch_threads in calls} == {threads}
    assert len({thread for thread, _ in calls}) == 2
