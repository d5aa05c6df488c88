"""A thread for each rank: the bits of one thread, errors that say where, and nothing left behind."""

from __future__ import annotations

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
from tests.test_distributed import MSE, blocks, chained, rows

ROWS = torch.ones(4), torch.zeros(4)
PARAMS = {"w": torch.tensor(2.0)}, {"w": torch.tensor(3.0)}
ONE_F_ONE_B = fpipe.schedules.one_f_one_b(2)


def times_w(p: Any, x: Tensor) -> Tensor:
    return x * p["w"]


def both(*stages: Callable[..., Tensor], schedule: Any = ONE_F_ONE_B, microbatches: int = 4) -> tuple[Any, Any]:
    """Steps of two stages in one thread, and in two."""
    model = fpipe.from_functions(stages, lambda y, t: (y - t).square().mean())
    program = chained(model, schedule, microbatches=microbatches)
    return fpipe.build(program, model), fpipe.build(program, model, runtime="threads")


def same(one: fpipe.Result, other: fpipe.Result) -> bool:
    every = [[*map(leaves, (each.loss, each.grads, each.outputs, each.state or ()))] for each in (one, other)]
    return all(torch.equal(a, b) for pair in zip(*every, strict=True) for a, b in zip(*pair, strict=True))


MEETING: list[threading.Barrier] = []
MET: set[int] = set()


@torch.library.custom_op("fpipe_tests::meet", mutates_args=())
def meet(x: Tensor) -> Tensor:
    """What a trace keeps as one op: when it is first called on a thread, it waits for the other to call it too."""
    if MEETING and threading.get_ident() not in MET:
        MET.add(threading.get_ident())
        MEETING[0].wait()
    return x.clone()


meet.register_fake(lambda x: torch.empty_like(x))
meet.register_autograd(lambda ctx, dy: dy)


def test_ranks_run_at_the_same_time():
    """Each rank stays in its first forward until the other is in its own."""
    _, step = both(*[lambda p, x: meet(x * p["w"])] * 2, schedule=fpipe.schedules.dualpipe(2))
    step(PARAMS, ROWS)
    MET.clear()
    MEETING.append(threading.Barrier(2, timeout=20))
    try:
        assert step(PARAMS, ROWS).loss.item() == 36
    finally:
        MEETING.clear()
    assert len(MET) == 2


@pytest.mark.parametrize("runtime", ["local", "threads"])
def test_one_reading_of_the_clock_tells_when_an_op_began_and_when_it_ended(runtime: str):
    """The steps behind the first, which also counts bytes: on a rank ops follow each other, and what an op waited for
    is no part of it."""
    model, params, _ = fpipe.from_sequential(blocks(), stages=4, loss=MSE)
    program = chained(model, fpipe.schedules.zbv(2))
    step = fpipe.build(program, model, runtime=runtime, record=True)
    for _ in range(2):
        before = time.perf_counter()
        found = step(params, rows()).timeline
        whole = time.perf_counter() - before
    assert {op for op, _, _ in found.events} == {*program.ops}
    when = {op: (start, end) for op, start, end in found.events if op.kind in "FIW"}  # an ADD may be a part of its W
    for rank in range(2):
        times = sorted(times for op, times in when.items() if op.rank == rank)
        assert all(0 <= start < end < whole for start, end in times)
        assert all(end <= start for (_, end), (start, _) in pairwise(times))
    written = {value: op for op in when for value in op.writes}
    assert all(when[written[v]][1] <= start for op, (start, _) in when.items() for v in op.reads if v in written)


def shy(p: Any, x: Tensor, *, microbatch: int) -> Tensor:
    """A stage that looks at data, so it runs under autograd, and raises for one microbatch."""
    if microbatch == 2 and float(x.detach().sum()) > 1e3:
        raise KeyError("too much")
    return x * p["w"]


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_what_a_stage_raises_says_where_and_the_next_step_works():
    _, step = both(times_w, shy)
    right, wrong = (torch.ones(8), torch.zeros(8)), (torch.full((8,), 1e4), torch.zeros(8))
    expected = step(PARAMS, right)
    for _ in range(3):
        started = time.perf_counter()
        with pytest.raises(KeyError, match="too much") as raised:
            step(PARAMS, wrong)
        assert time.perf_counter() - started < SOON
        assert raised.value.__notes__ == ["in 1F2: stage 1 (shy), microbatch 2, rank 1"]
        assert same(step(PARAMS, right), expected)


@pytest.mark.usefixtures("small_heap")
def test_threads_end_with_their_step():
    model, params, _ = fpipe.from_sequential(blocks(), stages=4, loss=MSE)
    before = workers()
    step = fpipe.build(chained(model, fpipe.schedules.gpipe(4)), model, runtime="threads")
    for _ in range(50):
        step(params, rows())
    own = workers() - before
    assert {one.name for one in own} == {f"fpipe rank {rank}_0" for rank in (1, 2, 3)}
    del step
    gc.collect()
    for one in own:
        one.join(5)
    assert not any(one.is_alive() for one in own)


def workers() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name.startswith("fpipe rank")}


@pytest.mark.usefixtures("small_heap")
def test_a_step_keeps_nothing_alive():
    model, params, _ = fpipe.from_sequential(blocks(), stages=2, loss=MSE)
    step = fpipe.build(chained(model, fpipe.schedules.zb_h1(2)), model, runtime="threads")
    given = rows()
    step(params, given)
    step(params, given)
    gc.collect()
    before = tensors()
    for _ in range(5):
        step(params, given)
    assert tensors() == before


def tensors() -> int:
    """How many tensors there are, without a look at what each object does with `isinstance`."""
    return sum(issubclass(type(one), Tensor) for one in gc.get_objects())


def test_one_step_in_several_threads_at_once():
    model, params, _ = fpipe.from_sequential(blocks(), stages=2, loss=MSE)
    step = fpipe.build(chained(model, fpipe.schedules.one_f_one_b(2)), model, runtime="threads")
    given = [(torch.full((10, 8), float(n)), rows()[1]) for n in range(8)]
    expected = [step(params, one) for one in given]
    with ThreadPoolExecutor(4) as pool:
        found = [*pool.map(lambda one: step(params, one), given)]
    assert all(map(same, found, expected))


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_ctrl_c_ends_every_rank_and_the_next_step_works():
    def stage(p: Any, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e3:
            _thread.interrupt_main()
            time.sleep(0.05)
        return x * p["w"]

    _, step = both(times_w, stage)
    expected = step(PARAMS, ROWS)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            step(PARAMS, (ROWS[0] * 1e4, ROWS[1]))
        assert same(step(PARAMS, ROWS), expected)


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_a_second_ctrl_c_does_not_wait_and_leaves_the_next_step_right(monkeypatch: pytest.MonkeyPatch):
    """It left a worker in its op and a step that had failed, which the next step took for its own."""
    inside, go, waited = threading.Event(), threading.Event(), list[Any]()

    class Queue(SimpleQueue[Any]):
        def get(self) -> Any:  # type: ignore[override]
            if not go.is_set() and threading.current_thread() is threading.main_thread():
                assert inside.wait(10)
                raise KeyboardInterrupt  # the first, in a RECV of the caller's thread
            return super().get()

    def long(p: Any, x: Tensor) -> Tensor:
        if float(x.detach().sum()) > 1e3:
            inside.set()
            go.wait(10)
        return x * p["w"]

    def again(left: Any) -> Any:
        """A second Ctrl-C, while the caller's thread waits for the others."""
        waited.append(left)
        if len(waited) % 2:
            raise KeyboardInterrupt
        return wait(left)

    go.set()
    monkeypatch.setattr("fpipe.runtimes.in_process.threads.wait", again)
    monkeypatch.setattr("fpipe.runtimes.in_process.threads.SimpleQueue", Queue)
    _, step = both(times_w, long)
    expected = [(given, step(PARAMS, given)) for given in (ROWS, (torch.ones(8), torch.zeros(8)))]
    for given, result in expected:
        inside.clear()
        go.clear()
        with pytest.raises(KeyboardInterrupt):
            step(PARAMS, (ROWS[0] * 1e4, ROWS[1]))
        assert len(waited) % 2 == 1
        assert not go.is_set()
        threading.Timer(0.05, go.set).start()
        assert same(step(PARAMS, given), result)


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_stages_under_autograd_take_turns_with_random_numbers():
    """Torch has one generator for all threads: two stages that draw at once would each see the other's numbers."""

    def noisy(p: Any, x: Tensor, *, key: int) -> Tensor:
        return nn.functional.dropout(x, 0.5) * p["w"] + (0 if x.detach().sum() > 1e9 else 1)

    alone, together = both(noisy, noisy, schedule=fpipe.schedules.dualpipe(2), microbatches=8)
    given = torch.ones(32, 64), torch.zeros(32, 64)
    for key in range(3):
        assert same(together(PARAMS, given, key=key), alone(PARAMS, given, key=key))


@pytest.mark.filterwarnings("ignore:a stage runs under autograd")
def test_workers_have_the_callers_number_of_threads():
    """The bits of a matrix product depend on it, and torch has one number for each thread."""
    seen: list[tuple[int, int]] = []

    def stage(p: Any, x: Tensor) -> Tensor:
        seen.append((threading.get_ident(), torch.get_num_threads()))
        return x * p["w"] if x.detach().sum() > 0 else x

    _, step = both(stage, stage, microbatches=2)
    for threads in (2, 1):
        torch.set_num_threads(threads)
        step(PARAMS, ROWS)
        seen.clear()
        step(PARAMS, ROWS)
        assert {number for _, number in seen} == {threads}
    assert len({thread for thread, _ in seen}) == 2
