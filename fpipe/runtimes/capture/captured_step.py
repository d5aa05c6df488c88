"""Run the steps of one signature: a few without a graph, then one capture, then replays.

    step 1, 2     instructions, on the stream of the graphs, with fixed generators
    step 3        capture                 copy the batch in    replay    copy the results out
    step 4, ..                            copy the batch in    replay    copy the results out

A graph reads fixed memory. A leaf that is new in each step, such as the batch, is copied into memory of the graph. A
leaf that came at one address twice, such as a parameter that the caller updates in place, is read at that address.
When it comes at another one, the graph is captured again: with a copy of that leaf from then on, or, if a step
overwrites the leaf, at the new address, once that has come twice. So any tensors give the right result.

An audited step runs its instructions twice more, on copies of what is donated: a replay with other results is refused.

Processes capture once, all in the same step (`in_lockstep`): NCCL wants an operation to be captured by all of its
processes or by none, and one process cannot see the addresses of another. They copy every leaf but donated ones, which
stay where they are.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.profiler import record_function

from fpipe import tree
from fpipe.meaning.purity.ambient import raw_ops
from fpipe.meaning.purity.sharded import local_shard
from fpipe.meaning.purity.write_guard import storage_span
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs
from fpipe.program import Program
from fpipe.runtimes.audit.tensor_bits import copy_leaf, refuse_wrong_replay
from fpipe.runtimes.capture.device_graph import DeviceGraph, GraphStream, GraphStreams
from fpipe.runtimes.capture.refusals import refuse_uncapturable, single_accelerator
from fpipe.runtimes.lowering.instructions import InstructionGenerators
from fpipe.runtimes.lowering.lane import See
from fpipe.runtimes.lowering.prepared_step import PreparedStep, synchronize
from fpipe.runtimes.lowering.rank_part import Slots, Tap
from fpipe.torch_internals import is_profiled, version_of, warn

WARM_UPS = 2
"""Steps of a thread on the stream of graphs before it captures: at first libraries load kernels and make handles."""


class Recording(NamedTuple):
    """A graph, the leaves that it reads, and the slots that its replay fills."""

    graph: DeviceGraph
    leaves: Sequence[Any]
    slots: Slots


class StepGraph:
    """The graph of a step of one signature, which is captured when it is needed.

    The step is an argument of each method, so that a step may hold its graph and both are gone with the caller's last
    reference.
    """

    def __init__(self, stream: GraphStream, in_lockstep: bool) -> None:
        self._stream, self._generators, self._recording = stream, InstructionGenerators(), None
        self._warm_ups, self._addresses, self._in_lockstep = Counter[int](), list[Any](), in_lockstep
        self._copied: set[int] | None = None
        self._is_refused = False

    def run(self, step: CapturedStep, leaves: Sequence[Any], inputs: StepInputs, tap: Tap | None = None) -> Result:
        """Run one step on the leaves of its arguments, and return results that belong to the caller.

        A step with a tap is audited: so is its replay.
        """
        leaves, unreplayed = [*map(local_shard, leaves)], list[dict[str, Any]]()
        with self._stream.lock, raw_ops():
            step.entrance.check_key(leaves, inputs.key)
            self._generators.seed(inputs.key)
            moved_donated = self._note_addresses(step, leaves)
            slots: Slots
            is_warm = self._warm_ups[self._warm_up_thread()] >= WARM_UPS
            if self._recording is None and not moved_donated and is_warm and not self._is_refused:
                self._recording = self._capture_or_refuse(step, leaves)
            if self._recording is not None and tap is not None:
                # Twice, to know whether the bits of a step repeat at all; ranks cannot first ask whether some differ.
                unreplayed = [
                    self._run_on_copies(step, leaves, inputs, instruction_tap) for instruction_tap in (tap, None)
                ]
            if self._recording is None:
                slots = self._run_instructions(step, leaves, tap)
            elif unreplayed:
                slots = self._time_replay(step, self._recording, leaves)
            else:
                slots = self._replay(step, self._recording, leaves)
            results = step.exit.results(slots, inputs.state)
            # The next work on this stream writes what these copies read, and it may come from another stream.
            self._stream.wait_for_caller()
            if unreplayed:
                refuse_wrong_replay(results, *unreplayed)
        return Result(**results)

    def _run_on_copies(
        self, step: CapturedStep, leaves: Sequence[Any], inputs: StepInputs, tap: Tap | None
    ) -> dict[str, Any]:
        """Return the results of the instructions, which overwrite copies, so that a replay computes the same step."""
        donated = step.entrance.donated
        copies = [copy_leaf(leaf) if index in donated else leaf for index, leaf in enumerate(leaves)]
        results = step.exit.results(self._run_instructions(step, copies, tap), inputs.state)
        self._generators.seed(inputs.key)
        return results

    def _note_addresses(self, step: CapturedStep, leaves: Sequence[Any]) -> bool:
        """Compare addresses with the step before; return whether a leaf moved that can only be read where it is."""
        # 1. What a graph reads where it is: leaves that are not copied, and constants of stages.
        if self._copied is None:
            all_copied = {*range(len(leaves))} - step.entrance.donated
            self._copied = all_copied if self._in_lockstep else {*step.entrance.new_each_step}
        constants = [*step.entrance.constant_leaves(), *step.host_tensors]
        addresses = [_address(leaf) for leaf in (*leaves, *constants)]
        previous, self._addresses = self._addresses or addresses, addresses
        moved = {index for index, pair in enumerate(zip(previous, addresses, strict=True)) if pair[0] != pair[1]}
        moved -= self._copied
        if not moved or (self._in_lockstep and self._recording is None):
            return False
        if self._in_lockstep:
            if max(moved) >= len(leaves):
                raise ValueError("graph=True in processes captures once, and a constant has changed: build a new step.")
            raise ValueError(
                "graph=True in processes reads donated tensors where they were captured: copy new numbers into them."
            )
        # 2. A leaf that moves is copied from now on, but for one that is overwritten in place, and for constants.
        self._recording = None
        fixed = moved & ({*step.entrance.donated} | {*range(len(leaves), len(addresses))})
        self._copied |= moved - fixed
        return bool(fixed)

    def _warm_up_thread(self) -> int:
        # A thread makes a handle of cuBLAS at its first product, which no capture allows (pytorch/pytorch#99397).
        return 0 if self._in_lockstep else threading.get_ident()

    def _run_instructions(self, step: CapturedStep, leaves: Sequence[Any], tap: Tap | None) -> Slots:
        self._warm_ups[self._warm_up_thread()] += 1
        with self._stream.between_callers_work():
            slots = step.entrance.fill_slots(leaves, self._generators)
            step.execute(slots, tap=tap)
        return slots

    def _capture_or_refuse(self, step: CapturedStep, leaves: Sequence[Any]) -> Recording | None:
        """Return the recording; None if a process cannot capture, so that all run without a graph from now on."""
        recording, failure = None, None
        try:
            recording = self._capture(step, leaves)
        except RuntimeError as error:
            failure = error
        reason = step.agree_on_capture(failure)
        if not reason:
            return recording
        warn(f"this step runs without a graph, which cannot be captured: {reason}", stacklevel=2)
        self._is_refused = True
        return None

    def _capture(self, step: CapturedStep, leaves: Sequence[Any]) -> Recording:
        assert self._copied is not None
        # On the stream of graphs: the allocator gives the memory of a leaf that is gone to others of its stream alone.
        with self._stream.stream:
            static_leaves = [
                torch.empty_like(_flat(leaf)).as_strided(leaf.shape, leaf.stride())
                if index in self._copied and isinstance(leaf, Tensor)
                else leaf
                for index, leaf in enumerate(leaves)
            ]

        def run() -> Slots:
            slots = step.entrance.fill_slots(static_leaves, self._generators)
            step.execute(slots)
            return slots

        try:
            graph, slots = self._stream.capture(run, self._generators.registered())
        except BaseException as error:
            error.add_note(
                "while the step was captured as one graph, which computes nothing: its arguments are intact."
            )
            raise
        return Recording(graph, static_leaves, slots)

    def _replay(self, step: CapturedStep, recording: Recording, leaves: Sequence[Any]) -> Slots:
        with self._stream.between_callers_work():
            step.begin_replay()
            for static_leaf, leaf in zip(recording.leaves, leaves, strict=True):
                if isinstance(leaf, Tensor) and static_leaf.data_ptr() != leaf.data_ptr():
                    _flat(static_leaf).copy_(_flat(leaf))
            # The ops of a replay have no ranges of their own, since it runs no Python.
            with record_function("fpipe graph") if is_profiled() else nullcontext():
                recording.graph.replay()
            step.end_replay()
        return recording.slots

    def _time_replay(self, step: CapturedStep, recording: Recording, leaves: Sequence[Any]) -> Slots:
        synchronize(leaves)
        start = time.perf_counter()
        slots = self._replay(step, recording, leaves)
        synchronize(leaves)
        step.replay_seconds = time.perf_counter() - start
        return slots


class CapturedStep(PreparedStep):
    """A program lowered for one signature, whose steps are replays of one graph.

    Attributes:
        in_lockstep: whether other processes capture and replay their graphs in the same steps.
    """

    in_lockstep = False

    def __init__(self, streams: GraphStreams, *arguments: Any) -> None:
        super().__init__(*arguments)
        device = single_accelerator(self)
        refuse_uncapturable(self, self.in_lockstep)
        self._graph = StepGraph(streams[device], self.in_lockstep)

    def begin_replay(self) -> None:
        """Queue what comes before a replay, and depends on the step."""

    def end_replay(self) -> None:
        """Finish a step whose replay is queued."""

    def agree_on_capture(self, failure: RuntimeError | None) -> str:
        """Return why a process of the step cannot capture it, empty if all have; or raise this one's failure."""
        if failure is not None:
            raise failure
        return ""

    def run(
        self,
        leaves: Sequence[Any],
        inputs: StepInputs,
        *,
        recorded: Program | None,
        see: See | None = None,
        tap: Tap | None = None,
    ) -> Result:
        """Run one step as `PreparedStep.run` does; by a graph, unless something looks at its values."""
        if see is not None:
            return super().run(leaves, inputs, recorded=recorded, see=see, tap=tap)
        self.check_call(inputs)
        return self._graph.run(self, leaves, inputs, tap)


def with_device_numbers(inputs: StepInputs, device: torch.device | None = None) -> StepInputs:
    """Return the arguments of a step with the numbers of its update on a device, by default its parameters' device.

    These are learning rates, the loss scale and the step counts of optimizer state. A rate is of the default dtype, as
    `torch.tensor(3e-4)` is.
    """
    if inputs.optim is None:
        return inputs
    param_devices = (leaf.device for leaf in tree.leaves(inputs.params) if isinstance(leaf, Tensor))
    device = device or next(param_devices, None)

    def move_number(leaf: Any, dtype: torch.dtype | None = None) -> Any:
        if not isinstance(leaf, Tensor) or leaf.ndim or leaf.device.type != "cpu":
            return leaf
        # Filled by a kernel: a copy from memory that is not pinned would wait for the device.
        return torch.full((), leaf.item(), dtype=dtype or leaf.dtype, device=device)

    state, rates, scale = inputs.optim
    # The results of a replay are on the device already: nothing is left to do for a state of many leaves.
    if any(isinstance(leaf, Tensor) and leaf.device.type == "cpu" for leaf in tree.leaves(state)):
        state = tree.tree_map(move_number, state)
    rates = tree.tree_map(partial(move_number, dtype=torch.get_default_dtype()), rates)
    return replace(inputs, optim=(state, rates, tree.tree_map(move_number, scale)))


def _flat(leaf: Tensor) -> Tensor:
    """Return a view from the first to the last element: a tensor that overlaps itself cannot be written otherwise."""
    return leaf.detach().as_strided((storage_span(leaf.shape, leaf.stride()),), (1,))


def _address(leaf: Any) -> Any:
    """Return the address of a tensor; of one on the host also its version, since a graph holds the number itself."""
    if not isinstance(leaf, Tensor):
        return None
    return (leaf.data_ptr(), version_of(leaf)) if leaf.device.type == "cpu" else leaf.data_ptr()
