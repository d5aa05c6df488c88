"""Run the part of one rank as a graph: its compute, its messages, and its collectives over shards and replicas.

    rank 0: header in    replay: 0F0 send .. all_reduce    wait for its end, check the header, vote
    rank 1: header in    replay: receive 1F0 .. all_reduce  wait for its end, check the header, vote

NCCL wants an operation to be captured by all of its processes or by none, and the same of its replays ("Using NCCL with
CUDA Graphs" in its user guide). So all ranks capture in the same step of a signature, and are audited in the same
steps. Headers of messages, hashes of batches and votes are work of the host around a replay.

A replay runs no Python that could say where it is. So a graph copies the number of each instruction to pinned memory
before it: the host reads there, without asking the device, in which op a rank hangs, and if it waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.program import Op, Program, parts_of
from fpipe.runtimes.capture.captured_step import CapturedStep
from fpipe.runtimes.capture.device_graph import GraphStreams, is_capturing
from fpipe.runtimes.faults.fault_store import RankError
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import PeerWait
from fpipe.runtimes.lowering.lane import Watch
from fpipe.runtimes.lowering.rank_part import Slots, Tap
from fpipe.runtimes.processes.rank_step import RankStep
from fpipe.timing.simulate import simulate
from fpipe.torch_private.processes import is_on_streams

_COMPUTING = frozenset("FRBIW")


class CapturedRankStep(CapturedStep, RankStep):
    """The step of one rank, whose part of the program is captured and replayed in lockstep with all ranks.

    Args:
        streams: the streams of graphs.
        meeting: the ranks of all replicas.
        arguments: of `RankStep`.
    """

    in_lockstep = audits_by_number = True

    def __init__(self, streams: GraphStreams, meeting: Meeting, *arguments: object) -> None:
        super().__init__(streams, *arguments)
        self._meeting, self._captured_header = meeting, torch.empty(0)
        peers = tuple(dist.get_process_group_ranks(self.group))
        ops = [instruction.ops[0] for instruction in self.part.instructions]
        self._numbers = torch.arange(len(ops), device=self.transfers.device)
        self._reached_number = torch.zeros((), dtype=torch.int64, device="cpu").pin_memory()
        # Messages are waited for in RECVs, and at the end; collectives in whatever reads their results.
        has_collectives = self.replicas is not None or self.lowered.is_collective or bool(self.exchange_lines)
        is_waiting = [has_collectives or op.kind not in _COMPUTING or op is ops[-1] for op in ops]
        descriptions = [(f"in its {op.cell}, ", waits) for op, waits in zip(ops, is_waiting, strict=True)]
        # A view of numpy, since an op of torch would be work of the watchdog's thread.
        find_place = partial(_place_of, descriptions, self._reached_number.numpy())
        self._replay_wait = PeerWait(
            peers, "did not come to the end of the step", "in the graph of", False, 0.0, self.group, find_place
        )

    def execute(self, slots: Slots, watch: Watch | None = None, tap: Tap | None = None) -> None:
        """Run or capture the instructions on filled slots."""
        if is_capturing(self.transfers.device):
            tap = partial(_mark_instruction, self._reached_number, iter(self._numbers.unbind()))
        super().execute(slots, watch, tap)
        if self.transfers.is_captured:
            self._captured_header: Tensor = self.transfers.received_header

    def agree_on_capture(self, failure: RuntimeError | None) -> str:
        """Compare between all ranks whether they have captured the step, and return why not."""
        self.watchdog.wait, self.watchdog.is_capturing = None, False
        # The processes along the axes of a stage's collectives are in other pipelines, which do not meet here.
        if failure is not None and (isinstance(failure, RankError) or self.lowered.is_collective):
            raise failure
        reason = "" if failure is None else str(failure)
        try:
            self._meeting.agree(f"the capture in step {self.step}", {"capture": reason or "done"})
        except ValueError as error:
            return reason or str(error)
        return reason

    def begin_replay(self) -> None:
        """Queue the copy of this step's header into the memory that the graph sends."""
        self.transfers.begin_replay(self.step, self.signature_number, self.key_number)
        # A launch may wait too, for room in the queue of the device.
        self.watchdog.wait = self._replay_wait

    def end_replay(self) -> None:
        """Wait until the replay is over, for as long as no rank is dead or late; then check what has come in."""
        end_event = torch.accelerator.current_stream(self.transfers.device).record_event()
        self.watchdog.wait_on_host(_ReplayWork(end_event), self._replay_wait)
        self.watchdog.wait = None
        self.transfers.check_header(self._captured_header)


def refuse_uncapturable_messages(program: Program, group: ProcessGroup, device: torch.device) -> None:
    """Raise ValueError for messages that the host sends, and for a program whose messages wait for one another."""
    if not is_on_streams(group, device):
        raise ValueError("graph=True needs a group that sends from the device, such as NCCL; this one sends by gloo.")
    # A graph queues all messages before the first has arrived. Ranks send and receive in one order, that of all SENDs,
    # so a program ends if it ends with one queue for all. One with SENDs of its own is put into that order by `build`.
    if not any(op.kind == "SEND" for op in parts_of(program.ops)):
        simulate(program, messages="nccl")


def _mark_instruction(
    reached_number: Tensor, numbers: Iterator[Tensor], op: Op, run: Callable[..., Any]
) -> Callable[..., Any]:
    number = next(numbers)

    def run_marked(*operands: Any) -> Any:
        reached_number.copy_(number, non_blocking=True)
        return run(*operands)

    return run_marked


def _place_of(descriptions: Sequence[tuple[str, bool]], reached_number: Any) -> tuple[str, bool]:
    return descriptions[int(reached_number)]


class _ReplayWork:
    """The event behind a replay, with the question that a wait of the watchdog asks."""

    def __init__(self, end_event: torch.Event) -> None:
        self.is_completed = end_event.query
