"""Lower the part of a program that one process runs: its instructions, its messages and its results.

    0F0 SEND(y) RECV(y) 1F0 1B0 ..        --> rank 1 -->        RECV(y) 1F0 1B0 ..    loss, None for stage 0's gradients

Each process lowers the whole program, and so knows the shapes of all messages without asking.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe import tree
from fpipe.graphs.language.graph import Fact
from fpipe.graphs.tracing.collective_stage import CollectiveStage
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.recorder import HeldBytes, Notes, Recorder
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Program, Value, parts_of
from fpipe.runtimes.faults.agreement import claims_of_stages, describe_inputs
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog
from fpipe.runtimes.lowering.host_lanes import made_async
from fpipe.runtimes.lowering.lane import Watch
from fpipe.runtimes.lowering.lowered import AbstractTree
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.rank_part import Slots, Tap, part_of_rank
from fpipe.runtimes.lowering.shard_shapes import is_share
from fpipe.runtimes.lowering.slots import Exit, ProcessContext, ResultLeaf
from fpipe.runtimes.lowering.stage_calls import UntracedStages
from fpipe.runtimes.lowering.untraced_stages import RESIDUALS
from fpipe.runtimes.processes.exchange_lane import ExchangeLane
from fpipe.runtimes.processes.message_layout import Layout
from fpipe.runtimes.processes.replicas import NO_EXCHANGES, Replicas
from fpipe.runtimes.processes.transfers import Transfers

# On a busy machine the shortest of ten round trips was off by more than an op took.
_ROUND_TRIPS = 50


def seconds_ahead_of_rank_0(group: ProcessGroup, rank: int, device: torch.device) -> float:
    """Return the seconds that this process's clock is ahead of rank 0's; all ranks call it."""
    # As NTP: rank 0 asks at `start`, and the answer arrives `seconds` later. If both ways took equally long, the peer
    # read its clock at start + seconds / 2. The shortest of many round trips is the least disturbed one.
    backend: Any = group
    message = torch.zeros((), dtype=torch.float64, device=device)
    seconds_ahead = 0.0
    for peer in range(1, group.size()):
        shortest = float("inf")
        for _ in range(_ROUND_TRIPS) if rank in (0, peer) else ():
            if rank == peer:
                _transfer_number(backend.recv, message, 0)
                _transfer_number(backend.send, message.fill_(time.perf_counter()), 0)
                continue
            start = time.perf_counter()
            _transfer_number(backend.send, message, peer)
            peer_time = _transfer_number(backend.recv, message, peer)
            seconds = time.perf_counter() - start
            if seconds < shortest:
                shortest, seconds_ahead = seconds, peer_time - start - seconds / 2
        if rank == 0:
            _transfer_number(backend.send, message.fill_(seconds_ahead), peer)
        elif rank == peer:
            seconds_ahead = _transfer_number(backend.recv, message, 0)
    return 0.0 if rank == 0 else seconds_ahead


def _transfer_number(transfer: Callable[..., Any], message: Tensor, peer: int) -> float:
    transfer([message], peer, 0).wait()
    # On a device `wait` alone does not block the host, whose clock is measured; reading the number does.
    return message.item()


def merge_notes(
    recorder: Recorder, notes: Notes, group: ProcessGroup, rank: int, seconds_ahead: float, device: torch.device
) -> None:
    """Merge the notes of all ranks into this rank's, on the clock of rank 0; all ranks call it.

    In the first step the memory that the ranks hold is merged too. `device` is one whose tensors the group carries.
    """
    if recorder.held is None:
        held_by_rank: list[Any] = [None] * group.size()
        dist.all_gather_object(held_by_rank, recorder.count_bytes(notes), group=group)
        # Each rank knows its own memory only: take rank r's changes and peak from rank r.
        changes = [change for r, memory in enumerate(held_by_rank) for change in memory.changes if change[1] == r]
        recorder.held = HeldBytes(tuple(memory.peak[owner] for owner, memory in enumerate(held_by_rank)), changes)
    start_by_rank = [notes.step_start - seconds_ahead if owner == rank else 0.0 for owner in range(group.size())]
    # The times of a row are 0 on all ranks but the one that ran it, so a sum has them all.
    row_times = [row_time - seconds_ahead if row_time else 0.0 for row_time in notes.times]
    all_times = torch.tensor([*row_times, *start_by_rank], dtype=torch.float64, device=device)
    dist.all_reduce(all_times, group=group)
    (*notes.times,) = all_times[: len(row_times)].tolist()
    notes.step_start = all_times[len(row_times) :].min().item()


# Results that are a tuple over the stages.
_PER_STAGE = ("grads", "state", "params", "opt")


class RankLinks(NamedTuple):
    """The connections of this process.

    Attributes:
        rank, group: the rank of this process, and the ranks of its pipeline.
        watchdog: of this process.
        transfers, replicas, lane: messages, collectives of replicas, and collectives that are stages.
        first_microbatch: the index of this replica's first microbatch; None if all replicas have equally many.
    """

    rank: int
    group: ProcessGroup
    watchdog: Watchdog
    transfers: Transfers
    replicas: Replicas | None
    lane: ExchangeLane
    first_microbatch: int | None = None


class RankStep(PreparedStep):
    """The step of one rank, lowered for one signature.

    Attributes:
        input_lines, stage_claims, message_lines: what all ranks must agree on: inputs, traced stages and messages.
        exchange_lines: by axis, what the processes along it must agree on.
    """

    def __init__(
        self,
        links: RankLinks,
        program: Program,
        model: Model,
        inputs: StepInputs,
        untraced: UntracedStages,
        options: StepOptions,
    ) -> None:
        rank, group, watchdog, transfers, replicas, lane, first_microbatch = links
        self.lane, self.watchdog = lane, watchdog
        self.rank, self.group, self.transfers, self.replicas = rank, group, transfers, replicas
        self.seconds_ahead: float | None = None
        self.signature_number = self.step = 0
        self.key_number: int | None = None
        replica = (0, 1) if replicas is None else (replicas.number, replicas.count)
        share = None if replicas is None else replicas.share
        device = transfers.device
        process = ProcessContext(device, replica=replica, share=share, first_microbatch=first_microbatch)
        super().__init__(program, model, inputs, untraced, options, process)
        # 1. Lay out the messages of all ranks, equally on each.
        first_ops = [instruction.ops[0] for instruction in self.instructions]
        sent_values = [value for op in first_ops if op.kind == "SEND" for value in op.writes]
        for value in sent_values:
            if value.name in RESIDUALS and value.stage in self.untraced.stages:
                raise ValueError(
                    f"{value} is autograd's own, which no message carries: {self.untraced.stages[value.stage]}. Place "
                    "its backward on the forward's rank, or use fpipe.checkpoint()."
                )
        self.layouts = {value: Layout(self.trees[value].leaves, device) for value in sent_values}
        # 2. Make the collectives and copies of this rank asynchronous, and cut its part out of the instructions.
        self.exchanges = NO_EXCHANGES
        if replicas is not None:
            self.instructions, self.exchanges = replicas.made_async(self.lowered, self.shared, self.weighed_rows)
        self.instructions = lane.made_async(self.instructions, self.lowered, rank)
        transfer_functions = partial(transfers.send, self.layouts), partial(transfers.receive, self.layouts)
        with_lanes = partial(made_async, lane_by_rank=self.lanes)
        self.part = part_of_rank(self.instructions, self.model, rank, *transfer_functions, with_lanes, self.lanes)
        rows = zip(self.part.rows, self.part.instructions, strict=True)
        self._sends = [row for row, instruction in rows if instruction.ops[0].kind == "SEND"]
        # 3. Keep of the step's inputs and results what this rank reads and returns.
        self.exit = self._local_exit(self.exit)
        result_slots = {leaf.slot for leaf in self.exit.leaves if isinstance(leaf, ResultLeaf)}
        local_slots = self.part.local_slots
        self._handed_out = [(slot, local_slots[slot]) for slot in result_slots if slot in local_slots]
        read_slots = {*self.part.initial_slots}
        value_by_slot = {slot: value for value, slot in self.lowered.slots.items()}
        inputs_by_slot = [(slot, positions) for slot, positions in self.entrance.inputs if slot in read_slots]
        self._read_inputs = [(value_by_slot[slot], positions) for slot, positions in inputs_by_slot]
        # 4. State what the ranks agree on before they run it.
        self.input_lines = describe_inputs(self.program, self.trees)
        self.stage_claims = claims_of_stages(self.model, self.lowered, device, self.input_lines, replica[0])
        self.message_lines = [f"{value}: {layout.size} bytes" for value, layout in self.layouts.items()]
        self.exchange_lines = describe_exchanges(rank, self.program, self.trees, self.model)

    def refuse_missing(self, leaves: Sequence[Any]) -> None:
        """Raise ValueError if an argument that this rank reads is missing."""
        for value, leaf_positions in self._read_inputs:
            value_leaves = [leaves[position] for position in leaf_positions]
            missing = [index for index, leaf in enumerate(value_leaves) if isinstance(leaf, Tensor) and leaf.is_meta]
            if missing:
                path = self._leaf_path(value, missing[0]) if len(missing) < len(leaf_positions) else ""
                raise ValueError(
                    f"rank {self.rank} reads {value}{path}, and was handed None or a meta tensor: pass "
                    "local_params(program, params, rank), and the batch."
                )
            if self.replicas is None or value not in self.shared:
                continue
            axis = self.replicas.share.axis
            unsharded = [leaf for leaf in value_leaves if isinstance(leaf, Tensor) and not is_share(leaf, axis)]
            if unsharded:
                kind = "DTensor" if is_sharded(unsharded[0]) else "plain tensor"
                raise ValueError(
                    f"stage {value.stage} is sharded, and a step was handed a {kind} of shape "
                    f"{tuple(unsharded[0].shape)} that is none of {axis!r}: fpipe.shard_params(local_params(program, "
                    f"params, rank), mesh[{axis!r}]) makes a replica's shards."
                )

    def _leaf_path(self, value: Value, index: int) -> str:
        spec, leaves = self.trees[value].spec, self.trees[value].leaves
        return "" if spec is None else tree.paths(tree.unflatten(spec, range(len(leaves))))[index][0]

    def _program_with_outputs(self, program: Program) -> Program:
        """Keep one output of each name: this rank's copy, where it has one."""
        output_by_name = {output.name: output for output in program.outputs}
        output_by_name |= {output.name: output for output in program.outputs if self.rank in output.homes}
        return Program.trusted(program.inputs, program.ops, tuple(output_by_name.values()))

    def _local_exit(self, exit_of_all: Exit) -> Exit:
        """Put None in place of results that are at home on other ranks."""
        results: dict[str, Any] = tree.unflatten(exit_of_all.containers, exit_of_all.leaves)
        # By result, such as "grads", and by microbatch and slice: the names of outputs that are on other ranks.
        remote_by_part = defaultdict[str, dict[tuple[Any, Any], list[Value]]](dict)
        for output in self._program_with_outputs(self.program).outputs:
            name, part = output.name, (output.name.microbatch, output.name.slice)
            remote_names = remote_by_part[name.name].setdefault(part, [])
            remote_names += [name] if self.rank not in output.homes else []

        def without_remote(result: Any, remote_names: Sequence[Value]) -> Any:
            if not remote_names or remote_names[0].name not in _PER_STAGE:
                return None if remote_names else result
            stages = {value.stage for value in remote_names}
            return tuple(None if stage in stages else leaf for stage, leaf in enumerate(result))

        for name, result in results.items():
            by_part = remote_by_part[name]
            if (None, None) in by_part:
                results[name] = without_remote(result, by_part[None, None])
                continue
            # A tuple over microbatches and their slices, or over training steps.
            parts = sorted(by_part, key=lambda part: (part[0], part[1] or 0))
            pairs = zip(result, parts, strict=True)
            results[name] = tuple(without_remote(part_result, by_part[part]) for part_result, part in pairs)
        leaves, spec = tree.flatten(results)
        return replace(exit_of_all, containers=spec, leaves=leaves)

    def execute(self, slots: Slots, watch: Watch | None = None, tap: Tap | None = None) -> None:
        """Run the instructions on filled slots."""
        part_slots, watchdog = [slots[slot] for slot in self.part.initial_slots], self.watchdog
        notes = watch and watch.notes
        self.transfers.begin_step(self.step, self.signature_number, self.key_number, keeps=notes is not None)
        watchdog.is_capturing = self.transfers.is_captured
        if self.replicas is not None:
            self.replicas.begin(self.exchanges, watch)
        watchdog.part = part = self.part if tap is None else self.part.with_tap(tap)
        self.lane.lane.begin(watch)
        part.run(part_slots, watch)
        is_captured = self.transfers.is_captured
        self.lane.lane.end(is_captured=is_captured)
        if notes is not None:
            # A SEND writes no slot here: the memory that it holds is that of its message.
            for row in self._sends:
                messages = [[self.transfers.sent_message(value)] for value in self.instructions[row].written_values]
                notes.note_storages(row, messages)
        self.transfers.wait_for_sends()
        if self.replicas is not None:
            self.replicas.end(is_captured)
        if notes is not None and self.recorder is not None:
            processes = tuple(dist.get_process_group_ranks(self.group))
            watchdog.wait = PeerWait(processes, "did not come to the end of the step", "at the end of")
            if self.seconds_ahead is None:
                self.seconds_ahead = seconds_ahead_of_rank_0(self.group, self.rank, self.transfers.carrier_device)
            merge_notes(self.recorder, notes, self.group, self.rank, self.seconds_ahead, self.transfers.carrier_device)
            watchdog.wait = None
        slots.extend([None] * (len(self.lowered.slots) - len(slots)))
        for slot, local_slot in self._handed_out:
            slots[slot] = part_slots[local_slot]


def describe_exchanges(
    rank: int, program: Program, trees: Mapping[Value, AbstractTree], model: Model
) -> dict[str, list[str]]:
    """Describe by axis the forward exchanges of a rank, which must be equal on all processes of the axis."""
    lines_by_axis: dict[str, list[str]] = {}
    for op in parts_of(program.ops):
        exchange: Any = model.stages[op.stage or 0].forward
        if op.kind == "F" and op.rank == rank and isinstance(exchange, CollectiveStage):
            leaves = [leaf for value in op.reads if value.name != "params" for leaf in trees[value].leaves]
            leaves = leaves if exchange.leaf_index is None else [leaves[exchange.leaf_index]]
            avals = [str(leaf.aval) for leaf in leaves if isinstance(leaf, Fact)]
            # With explicit sizes the data decide how many rows each process has, so only the rows' shape must agree.
            if exchange.has_sizes:
                rows = (leaf.aval for leaf in leaves[:-1])
                avals[:-1] = [f"rows of {aval._replace(shape=aval.shape[1:])}" for aval in rows]
            line = f"{op.cell} ({exchange.__name__}) of {' and '.join(avals)}"
            lines_by_axis.setdefault(exchange.axis, []).append(line)
    return lines_by_axis


class RemoteLoss:
    """The loss of a step on a rank that has none: it is false, and computing with it raises an error with the way out.

    >>> loss = RemoteLoss(3)
    >>> loss, bool(loss), f"loss {loss}"
    (on rank 3, False, 'loss on rank 3')
    >>> loss.item()
    Traceback (most recent call last):
    AttributeError: the loss is on rank 3; build(..., broadcast=True) gives it to every rank.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __repr__(self) -> str:
        return f"on rank {self._rank}"

    def __bool__(self) -> bool:
        return False

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the loss is {self}; build(..., broadcast=True) gives it to every rank.")

    def __float__(self) -> NoReturn:
        raise TypeError(f"the loss is {self}; build(..., broadcast=True) gives it to every rank.")

    def __format__(self, format_spec: str) -> str:
        return str(self) if not format_spec else format(float(self), format_spec)

    def __add__(self, operand: Any) -> float:
        return float(self)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = __add__
