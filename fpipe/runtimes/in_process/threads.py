"""Run a program in this process with a thread for each rank: torch computes without the lock that Python holds.

    thread 0: 0F0 SEND(y)          thread 1: RECV(y) 1F0

A transfer is a hand-over: the receiver gets the tensors that were sent, or copies on its own device. The thread that
calls the step is rank 0.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import count, repeat
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from fpipe.meaning.devices import pinned
from fpipe.meaning.purity.ambient import raw_ops
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Op, Program, Value
from fpipe.runtimes.in_process.streams import Channel, ComputeStream, accelerator_of
from fpipe.runtimes.lowering.host_lanes import CPU, Parked, Source, made_async
from fpipe.runtimes.lowering.instructions import by_rule, pass_on
from fpipe.runtimes.lowering.lane import Watch
from fpipe.runtimes.lowering.lowered import Instruction
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.rank_part import RankPart, Slots, Tap, of_rank
from fpipe.runtimes.lowering.slots import ProcessContext, ResultLeaf
from fpipe.runtimes.lowering.stage_calls import Untraced
from fpipe.runtimes.lowering.untraced import under_autograd

Leaves = list[Any]


class Workers:
    """A thread for each rank but the first. They end with the step that they work for, or with the process."""

    def __init__(self, ranks: int) -> None:
        self.lock = threading.Lock()  # steps of several threads of the caller's come one after the other
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix=f"fpipe rank {rank}") for rank in range(1, ranks)]
        self._stop: Callable[[BaseException], None] | None = None

    def run(
        self, jobs: Sequence[Callable[[], None]], stop: Callable[[BaseException], None], settings: ThreadSettings
    ) -> None:
        """Run each job on its thread, until all are done; `stop` ends them early. A job raises Ctrl-C, nothing else."""
        futures: list[Future[None]] = []
        self._stop = stop
        try:
            pairs = zip(self._pools, jobs[1:], strict=False)  # the last ranks may have nothing but FREEs to do
            futures += [pool.submit(settings.call, job) for pool, job in pairs]
            jobs[0]()
            for future in futures:
                future.result()
        except BaseException as error:  # Ctrl-C
            stop(error)
            wait(futures)
        self._stop = None

    def settle(self) -> None:
        """Wait for jobs that a second Ctrl-C has left running."""
        if self._stop is not None:
            self._stop(KeyboardInterrupt())
            wait([pool.submit(int) for pool in self._pools])
            self._stop = None


class ThreadSettings(NamedTuple):
    """Settings that torch keeps for each thread: a worker computes under the caller's."""

    threads: int
    flushes: bool
    device: torch.device
    stream: torch.Stream | None = None

    @staticmethod
    def now(device: torch.device | None = None) -> ThreadSettings:
        """Read the settings of this thread, the stream of a device among them."""
        stream = None if device is None else torch.accelerator.current_stream(device)
        flushes = sys.float_info.min * _HALF == 0
        return ThreadSettings(torch.get_num_threads(), flushes, torch.get_default_device(), stream)

    def call(self, job: Callable[[], None]) -> None:
        """Call a job under these settings."""
        before = ThreadSettings.now()
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)
        if before.threads != self.threads:
            torch.set_num_threads(self.threads)
        if before.flushes != self.flushes:
            torch.set_flush_denormal(self.flushes)
        with ExitStack() as stack:
            if before.device != self.device:
                stack.enter_context(self.device)
            stack.enter_context(raw_ops())
            job()


_HALF = 0.5


class Stopped(Exception):
    """Another rank has failed."""


class HandOver:
    """Values in flight between ranks, on channels between their streams, and the error of the rank that failed."""

    def __init__(self, instructions: Iterable[Instruction], streams: Sequence[ComputeStream]) -> None:
        ops = [instruction.ops[0] for instruction in instructions]
        sent = {value: op.rank for op in ops if op.kind == "SEND" for value in op.writes}
        received = {value: op.rank for op in ops if op.kind == "RECV" for value in op.reads}
        pairs = {value: (sent[value], rank) for value, rank in received.items()}
        rows = {value: row for row, op in enumerate(ops) if op.kind == "SEND" for value in op.writes}
        kinds = [stream.device.type for stream in streams]
        fed = {(a, b) for a, b in pairs.values() if kinds and kinds[a] == "cpu" and kinds[b] not in ("cpu", "meta")}
        due = _due(ops, rows)
        self._hosted = {value: due[value] for value, pair in pairs.items() if pair in fed}
        direct = {*pairs.values()} - fed if streams else ()
        channels = {(a, b): Channel(streams[a], streams[b]) for a, b in direct}
        self.channels = [*channels.values()]
        self._channels = {value: channels.get(pair) for value, pair in pairs.items()}
        self._queues: dict[Value, SimpleQueue[Any]] = {value: SimpleQueue() for value in sent}
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def clear(self) -> None:
        """Drop what a failed step left in flight, once no rank runs."""
        self.error = None
        for queue in self._queues.values():
            while not queue.empty():
                queue.get()

    def stop(self, error: BaseException) -> None:
        """Wake all ranks that wait, so that they end."""
        with self._lock:
            if self.error is None and not isinstance(error, Stopped):
                self.error = error
        for queue in self._queues.values():
            queue.put(None)

    def send(self, op: Op, made_of: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a SEND: the leaves that it makes go to the receiver, who empties the lists."""
        puts = [*map(self._put, op.writes)]

        def send(*lists: Leaves) -> Sequence[Leaves]:
            if self.error is not None:
                raise Stopped
            for put, leaves in zip(puts, lists if made_of is pass_on else made_of(*lists), strict=True):
                put(leaves)
            return ()

        return send

    def receive(self, op: Op) -> Callable[..., Any]:
        """Return the function of a RECV, which waits for the sender."""
        ways = [(self._queues[value], self._channels.get(value)) for value in op.reads]
        gets = [partial(_receive, queue.get, channel) if channel else queue.get for queue, channel in ways]

        def receive() -> Sequence[Leaves]:
            lists: list[Any] = [get() for get in gets]
            if None in lists:
                raise Stopped
            return lists

        return receive

    @property
    def sources(self) -> dict[Value, tuple[int, Source]]:
        """The values that come from the host to an accelerator: the row behind which to wait for each, its source."""
        return {value: (row, partial(self._from_host, self._queues[value])) for value, row in self._hosted.items()}

    def _put(self, value: Value) -> Callable[[Leaves], None]:
        queue, channel = self._queues[value], self._channels.get(value)
        if value in self._hosted:
            return lambda leaves: queue.put(pinned(leaves))
        return (lambda leaves: queue.put(channel.send(leaves))) if channel else queue.put

    def _from_host(self, queue: SimpleQueue[Any], wait: bool) -> Parked | None:
        if not wait and queue.empty():
            return None
        leaves = queue.get()
        if leaves is None:
            raise Stopped
        return Parked(leaves, CPU)


def _due(ops: Sequence[Op], rows: Mapping[Value, int]) -> dict[Value, int]:
    """Return for each sent value the row behind which a wait for it cannot deadlock: its sender waits for no later."""
    due, last = dict[Value, int](), dict[int, int]()
    for op in ops:
        if op.kind == "RECV":
            last[op.rank] = max(last.get(op.rank, -1), *(rows[value] for value in op.reads))
        if op.kind == "SEND":
            due |= dict.fromkeys(op.writes, last.get(op.rank, -1))
    return due


def _receive(get: Callable[[], Any], channel: Channel) -> Leaves | None:
    sent = get()
    return None if sent is None else channel.receive(*sent)


class OnThreads(Prepared):
    """A program lowered for one signature, in parts for threads: made of workers and the arguments of `Prepared`."""

    def __init__(
        self,
        workers: Workers,
        *arguments: *tuple[Program, Model, StepInputs, Untraced, StepOptions, ProcessContext],
    ) -> None:
        super().__init__(*arguments)
        devices = arguments[-1].devices
        if self.lowered.collective:
            raise ValueError(
                "stages that talk to other processes (DTensors, collectives) must do so in the same order in each, "
                "which threads do not keep to; say runtime='distributed', or 'local'."
            )
        self.streams = [ComputeStream(device) for device in devices]
        self.workers, self.between = workers, HandOver(self.instructions, self.streams)
        self._under_way = False
        self._on = None if devices else accelerator_of(self.trees.values())
        instructions = [*map(_in_turn, self.instructions)]
        with_lanes = partial(made_async, lane_by_rank=self.lanes, devices=devices, sources=self.between.sources)
        carriers = self.between.send, self.between.receive, with_lanes, self.lanes
        self.parts = [of_rank(instructions, self.model, rank, *carriers) for rank in range(self.program.ranks)]
        begins = [slot for part in self.parts for slot in part.begins]
        self._several = {slot for slot in begins if begins.count(slot) > 1}
        wanted = {leaf.slot for leaf in self.exit.leaves if isinstance(leaf, ResultLeaf)}
        self._results = [
            (rank, part.at[slot], slot) for rank, part in enumerate(self.parts) for slot in wanted if slot in part.at
        ]

    @property
    def rank_parts(self) -> Sequence[RankPart]:
        """The parts of all ranks."""
        return self.parts

    def _execute(self, slots: Slots, watch: Watch | None, tap: Tap | None) -> None:
        """Run each rank's instructions on its thread, and put the results into their slots."""
        slots_by_rank = [[self._copied(slots[slot], slot) for slot in part.begins] for part in self.parts]
        watches = [watch and watch._replace(device=stream.clock) for stream in self.streams]
        watches = watches or [watch] * len(self.parts)

        def job(rank: int, part: RankPart, slots: Slots) -> None:
            try:
                with self.streams[rank].entered() if self.streams else nullcontext():
                    part.run(slots, watches[rank])
            except BaseException as error:
                self.between.stop(error)
                if isinstance(error, KeyboardInterrupt):
                    raise  # from here on the caller waits for the others, and no longer at a second one

        with self.workers.lock:
            self.workers.settle()
            if self._under_way:
                self.between.clear()
            self._under_way = True
            parts = self.parts if tap is None else [part.tapped(tap) for part in self.parts]
            jobs = [*map(partial, repeat(job), count(), parts, slots_by_rank)]
            held = [slots[slot][:] for slot, _ in self.entrance.homes]  # until the caller waits for readers
            for stream in self.streams:
                stream.after_caller()
            try:
                self.workers.run(jobs, self.between.stop, ThreadSettings.now(self._on))
            finally:
                for queue in (*self.streams, *self.between.channels):
                    queue.before_caller()
                del held
            error = self.between.error
            if error is not None:
                self.between.clear()
            self._under_way = False
            if error is not None:
                try:
                    raise error
                finally:
                    del error
        slots.extend([None] * (len(self.lowered.slots) - len(slots)))
        for rank, place, slot in self._results:
            slots[slot] = slots_by_rank[rank][place]
            if self.streams:
                self.streams[rank].hand_out(slots[slot])

    def _copied(self, leaves: Any, slot: int) -> Any:
        """Copy a list that several ranks read: the last reader empties it."""
        return [*leaves] if slot in self._several and isinstance(leaves, list) else leaves


def _in_turn(instruction: Instruction) -> Instruction:
    """Let the caller's Python run in one thread at a time: it may draw random numbers, which all threads share."""
    run = instruction.run
    if getattr(run, "func", None) not in (under_autograd, by_rule):
        return instruction

    def in_turn(*lists: Leaves) -> Sequence[Leaves]:
        with _PYTHON:
            return run(*lists)

    return instruction._replace(run=in_turn)


_PYTHON = threading.RLock()
