"""Run a program in this process with a thread for each rank; torch releases Python's lock while it computes.

    thread 0: 0F0 SEND(y)          thread 1: RECV(y) 1F0

The receiver of a transfer gets the tensors that were sent, or copies of them on its own device. The thread that calls
the step runs rank 0.
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

from fpipe.meaning.devices import pin_leaves
from fpipe.meaning.purity.ambient import raw_ops
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Op, Program, Value
from fpipe.runtimes.in_process.streams import Channel, ComputeStream, accelerator_of
from fpipe.runtimes.lowering.host_lanes import CPU, Parked, Source, made_async
from fpipe.runtimes.lowering.instructions import run_rule, send_locally
from fpipe.runtimes.lowering.lane import Watch
from fpipe.runtimes.lowering.lowered import Instruction
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.rank_part import RankPart, Slots, Tap, part_of_rank
from fpipe.runtimes.lowering.slots import ProcessContext, ResultLeaf
from fpipe.runtimes.lowering.stage_calls import UntracedStages
from fpipe.runtimes.lowering.untraced_stages import under_autograd

Leaves = list[Any]


class Workers:
    """A thread for each rank but the first, which ends with the step that owns it, or with the process."""

    def __init__(self, ranks: int) -> None:
        # Steps that several threads of the caller start run one after the other.
        self.lock = threading.Lock()
        self._pools = [ThreadPoolExecutor(1, thread_name_prefix=f"fpipe rank {rank}") for rank in range(1, ranks)]
        self._stop_jobs: Callable[[BaseException], None] | None = None

    def run(
        self, jobs: Sequence[Callable[[], None]], stop: Callable[[BaseException], None], settings: ThreadSettings
    ) -> None:
        """Run each job on its thread, and wait until all are done.

        Args:
            jobs: one for each rank. A job raises KeyboardInterrupt, and no other error.
            stop: ends the jobs early.
            settings: under which the jobs compute.
        """
        futures: list[Future[None]] = []
        self._stop_jobs = stop
        try:
            # Not strict: the last ranks may have no work but FREEs, and then there is no job for them.
            pool_jobs = zip(self._pools, jobs[1:], strict=False)
            futures += [pool.submit(settings.call, job) for pool, job in pool_jobs]
            jobs[0]()
            for future in futures:
                future.result()
        # Ctrl-C: stop the other ranks before it reaches the caller.
        except BaseException as error:
            stop(error)
            wait(futures)
        self._stop_jobs = None

    def wait_for_leftovers(self) -> None:
        """Wait for jobs that a second Ctrl-C has left running."""
        if self._stop_jobs is not None:
            self._stop_jobs(KeyboardInterrupt())
            wait([pool.submit(int) for pool in self._pools])
            self._stop_jobs = None


class ThreadSettings(NamedTuple):
    """The settings that torch keeps for each thread; a worker computes under the caller's."""

    threads: int
    flushes_denormals: bool
    device: torch.device
    stream: torch.Stream | None = None

    @staticmethod
    def of_this_thread(device: torch.device | None = None) -> ThreadSettings:
        """Return the settings of this thread, and its stream on a device."""
        # Torch has no getter for flush_denormal. Half of the smallest normal number is denormal, and 0 if flushed.
        stream = None if device is None else torch.accelerator.current_stream(device)
        flushes = sys.float_info.min * _HALF == 0
        return ThreadSettings(torch.get_num_threads(), flushes, torch.get_default_device(), stream)

    def call(self, job: Callable[[], None]) -> None:
        """Call a job under these settings."""
        worker_settings = ThreadSettings.of_this_thread()
        if self.stream is not None:
            torch.accelerator.set_stream(self.stream)
        if worker_settings.threads != self.threads:
            torch.set_num_threads(self.threads)
        if worker_settings.flushes_denormals != self.flushes_denormals:
            torch.set_flush_denormal(self.flushes_denormals)
        with ExitStack() as stack:
            if worker_settings.device != self.device:
                stack.enter_context(self.device)
            stack.enter_context(raw_ops())
            job()


_HALF = 0.5


class OtherRankFailed(Exception):
    """Raised in a rank that waits for another one that has failed."""


class HandOver:
    """Values in flight between ranks, on channels between their streams, and the error of the rank that failed."""

    def __init__(self, instructions: Iterable[Instruction], streams: Sequence[ComputeStream]) -> None:
        ops = [instruction.ops[0] for instruction in instructions]
        sender_by_value = {value: op.rank for op in ops if op.kind == "SEND" for value in op.writes}
        receiver_by_value = {value: op.rank for op in ops if op.kind == "RECV" for value in op.reads}
        pair_by_value = {value: (sender_by_value[value], rank) for value, rank in receiver_by_value.items()}
        row_by_send = {value: row for row, op in enumerate(ops) if op.kind == "SEND" for value in op.writes}
        # A value from a CPU rank to an accelerator goes through pinned memory in the lane of host copies; a value
        # between two accelerators, or on one device, through a channel.
        device_types = [stream.device.type for stream in streams]
        host_to_device_pairs = {
            (source, target)
            for source, target in pair_by_value.values()
            if device_types and device_types[source] == "cpu" and device_types[target] not in ("cpu", "meta")
        }
        wait_rows = _wait_rows_of_sends(ops, row_by_send)
        self._wait_row_by_value = {
            value: wait_rows[value] for value, pair in pair_by_value.items() if pair in host_to_device_pairs
        }
        direct_pairs = {*pair_by_value.values()} - host_to_device_pairs if streams else ()
        channels = {(source, target): Channel(streams[source], streams[target]) for source, target in direct_pairs}
        self.channels = [*channels.values()]
        self._channel_by_value = {value: channels.get(pair) for value, pair in pair_by_value.items()}
        self._queue_by_value: dict[Value, SimpleQueue[Any]] = {value: SimpleQueue() for value in sender_by_value}
        self._lock = threading.Lock()
        self.error: BaseException | None = None

    def clear(self) -> None:
        """Drop the values that a failed step left in flight; called while no rank runs."""
        self.error = None
        for queue in self._queue_by_value.values():
            while not queue.empty():
                queue.get()

    def stop(self, error: BaseException) -> None:
        """Wake all ranks that wait, so that they end, and keep the first error."""
        with self._lock:
            if self.error is None and not isinstance(error, OtherRankFailed):
                self.error = error
        for queue in self._queue_by_value.values():
            queue.put(None)

    def send(self, op: Op, compute_leaves: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function that runs a SEND, whose `compute_leaves` makes the leaves that are sent."""
        put_functions = [*map(self._put_function, op.writes)]

        def send(*operands: Leaves) -> Sequence[Leaves]:
            if self.error is not None:
                raise OtherRankFailed
            # A SEND within one thread makes new lists. Here the receiver gets the lists themselves, and empties them.
            leaves_by_value = operands if compute_leaves is send_locally else compute_leaves(*operands)
            for put_leaves, leaves in zip(put_functions, leaves_by_value, strict=True):
                put_leaves(leaves)
            return ()

        return send

    def receive(self, op: Op) -> Callable[..., Any]:
        """Return the function that runs a RECV, which waits for the sender."""
        routes = [(self._queue_by_value[value], self._channel_by_value.get(value)) for value in op.reads]
        get_functions = [
            partial(_receive_on_channel, queue.get, channel) if channel else queue.get for queue, channel in routes
        ]

        def receive() -> Sequence[Leaves]:
            received_leaves: list[Any] = [get() for get in get_functions]
            if None in received_leaves:
                raise OtherRankFailed
            return received_leaves

        return receive

    @property
    def sources(self) -> dict[Value, tuple[int, Source]]:
        """The values that come from the host to an accelerator, each with the row behind which to wait and a source."""
        return {
            value: (row, partial(self._from_host, self._queue_by_value[value]))
            for value, row in self._wait_row_by_value.items()
        }

    def _put_function(self, value: Value) -> Callable[[Leaves], None]:
        queue, channel = self._queue_by_value[value], self._channel_by_value.get(value)
        if value in self._wait_row_by_value:
            return lambda leaves: queue.put(pin_leaves(leaves))
        return (lambda leaves: queue.put(channel.send(leaves))) if channel else queue.put

    def _from_host(self, queue: SimpleQueue[Any], wait: bool) -> Parked | None:
        if not wait and queue.empty():
            return None
        leaves = queue.get()
        if leaves is None:
            raise OtherRankFailed
        return Parked(leaves, CPU)


def _wait_rows_of_sends(ops: Sequence[Op], row_by_send: Mapping[Value, int]) -> dict[Value, int]:
    """Return for each sent value the row behind which a rank may wait for it without a deadlock."""
    # That is the last row from which the sender itself receives before it sends: the sender waits for no later one.
    wait_row_by_value, last_row = dict[Value, int](), dict[int, int]()
    for op in ops:
        if op.kind == "RECV":
            last_row[op.rank] = max(last_row.get(op.rank, -1), *(row_by_send[value] for value in op.reads))
        if op.kind == "SEND":
            wait_row_by_value |= dict.fromkeys(op.writes, last_row.get(op.rank, -1))
    return wait_row_by_value


def _receive_on_channel(get: Callable[[], Any], channel: Channel) -> Leaves | None:
    sent_leaves = get()
    return None if sent_leaves is None else channel.receive(*sent_leaves)


class ThreadedStep(PreparedStep):
    """A program lowered for one signature, with a part for each thread."""

    def __init__(
        self,
        workers: Workers,
        *arguments: *tuple[Program, Model, StepInputs, UntracedStages, StepOptions, ProcessContext],
    ) -> None:
        super().__init__(*arguments)
        devices = arguments[-1].devices
        if self.lowered.is_collective:
            raise ValueError(
                "stages that talk to other processes (DTensors, collectives) must do so in the same order in each; "
                "say runtime='distributed' or 'local'."
            )
        self.streams = [ComputeStream(device) for device in devices]
        self.workers, self.hand_over = workers, HandOver(self.instructions, self.streams)
        self._is_running = False
        self._caller_device = None if devices else accelerator_of(self.trees.values())
        # Each rank's part of the instructions, with its transfers through the hand-over.
        instructions = [*map(_run_exclusively, self.instructions)]
        with_lanes = partial(made_async, lane_by_rank=self.lanes, devices=devices, sources=self.hand_over.sources)
        transfer_functions = self.hand_over.send, self.hand_over.receive, with_lanes, self.lanes
        ranks = range(self.program.ranks)
        self.parts = [part_of_rank(instructions, self.model, rank, *transfer_functions) for rank in ranks]
        initial_slots = [slot for part in self.parts for slot in part.initial_slots]
        self._shared_slots = {slot for slot in initial_slots if initial_slots.count(slot) > 1}
        result_slots = {leaf.slot for leaf in self.exit.leaves if isinstance(leaf, ResultLeaf)}
        self._result_slots = [
            (rank, part.local_slots[slot], slot)
            for rank, part in enumerate(self.parts)
            for slot in result_slots
            if slot in part.local_slots
        ]

    @property
    def rank_parts(self) -> Sequence[RankPart]:
        """The parts of all ranks."""
        return self.parts

    def execute(self, slots: Slots, watch: Watch | None = None, tap: Tap | None = None) -> None:
        """Run the instructions on filled slots."""
        # 1. Give each rank its own slots, and notes on the clock of its device.
        slots_by_rank = [[self._own_copy(slots[slot], slot) for slot in part.initial_slots] for part in self.parts]
        watches = [watch and watch._replace(device=stream.clock_device) for stream in self.streams]
        watches = watches or [watch] * len(self.parts)

        def run_rank(rank: int, part: RankPart, slots: Slots) -> None:
            try:
                with self.streams[rank].queue_here() if self.streams else nullcontext():
                    part.run(slots, watches[rank])
            except BaseException as error:
                self.hand_over.stop(error)
                # The caller waits for the other ranks then. A second Ctrl-C ends that wait.
                if isinstance(error, KeyboardInterrupt):
                    raise

        # 2. Run. A step that was interrupted twice may have left ranks running, and values in flight.
        with self.workers.lock:
            self.workers.wait_for_leftovers()
            if self._is_running:
                self.hand_over.clear()
            self._is_running = True
            parts = self.parts if tap is None else [part.with_tap(tap) for part in self.parts]
            jobs = [*map(partial, repeat(run_rank), count(), parts, slots_by_rank)]
            # Inputs stay alive until the caller's stream waits for the ranks' streams, which read them.
            kept_inputs = [slots[slot][:] for slot, _ in self.entrance.homes]
            for stream in self.streams:
                stream.wait_for_caller()
            try:
                self.workers.run(jobs, self.hand_over.stop, ThreadSettings.of_this_thread(self._caller_device))
            finally:
                for queue in (*self.streams, *self.hand_over.channels):
                    queue.make_caller_wait()
                del kept_inputs
            error = self.hand_over.error
            if error is not None:
                self.hand_over.clear()
            self._is_running = False
            # `del`: a frame that its own error refers to would be a cycle, and keep all values until it is collected.
            if error is not None:
                try:
                    raise error
                finally:
                    del error
        # 3. Collect the results.
        slots.extend([None] * (len(self.lowered.slots) - len(slots)))
        for rank, local_slot, slot in self._result_slots:
            slots[slot] = slots_by_rank[rank][local_slot]
            if self.streams:
                self.streams[rank].keep_for_caller(slots[slot])

    def _own_copy(self, leaves: Any, slot: int) -> Any:
        """Copy a list that several ranks read, since the last reader of each rank empties its list."""
        return [*leaves] if slot in self._shared_slots and isinstance(leaves, list) else leaves


def _run_exclusively(instruction: Instruction) -> Instruction:
    """Return an instruction whose Python of the user's runs in one thread at a time."""
    # It may draw random numbers, from generators that all threads share.
    run = instruction.run
    if getattr(run, "func", None) not in (under_autograd, run_rule):
        return instruction

    def run_exclusively(*operands: Leaves) -> Sequence[Leaves]:
        with _PYTHON_LOCK:
            return run(*operands)

    return instruction._replace(run=run_exclusively)


_PYTHON_LOCK = threading.RLock()
