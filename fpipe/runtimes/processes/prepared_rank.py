"""Lower a program of which this process runs one rank: its part, what it sends and receives, and what it returns.

    0F0 SEND(y) RECV(y) 1F0 1B0 ..        --> rank 1 -->        RECV(y) 1F0 1B0 ..    loss, None for stage 0's gradients

The whole program is lowered, so that each rank knows the shapes of all that travels.
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
from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.meaning.purity.sharded import is_sharded
from fpipe.meaning.recorder import Held, Notes, Recorder
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Program, Value, parts_of
from fpipe.runtimes.faults.agreement import of_inputs, of_stages
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog
from fpipe.runtimes.lowering.host_lanes import made_async
from fpipe.runtimes.lowering.lane import Watch
from fpipe.runtimes.lowering.lowered import AbstractTree
from fpipe.runtimes.lowering.prepared import Prepared
from fpipe.runtimes.lowering.rank_part import Slots, Tap, of_rank
from fpipe.runtimes.lowering.shards import is_share
from fpipe.runtimes.lowering.slots import Exit, ProcessContext, ResultLeaf
from fpipe.runtimes.lowering.stage_calls import Untraced
from fpipe.runtimes.lowering.untraced import KEPT
from fpipe.runtimes.processes.exchange_lane import ExchangeLane
from fpipe.runtimes.processes.message import Layout
from fpipe.runtimes.processes.replicas import NO_EXCHANGES, Replicas
from fpipe.runtimes.processes.transfers import Transfers

# Put what each rank measured of a step on one clock, that of rank 0.

_PINGS = 50  # on a busy machine the least of ten was off by more than an op took


def ahead_of_rank_0(group: ProcessGroup, rank: int, device: torch.device) -> float:
    """Return the seconds that this process's clock is ahead of rank 0's; all ranks call it.

    Of many round trips the shortest counts: its answer is taken to have travelled as long as the question.
    """
    carrier: Any = group
    number = torch.zeros((), dtype=torch.float64, device=device)
    ahead = 0.0
    for peer in range(1, group.size()):
        shortest = float("inf")
        for _ in range(_PINGS) if rank in (0, peer) else ():
            if rank == peer:
                _carry(carrier.recv, number, 0)
                _carry(carrier.send, number.fill_(time.perf_counter()), 0)
                continue
            start = time.perf_counter()
            _carry(carrier.send, number, peer)
            peer_time = _carry(carrier.recv, number, peer)
            seconds = time.perf_counter() - start
            if seconds < shortest:
                shortest, ahead = seconds, peer_time - start - seconds / 2
        if rank == 0:
            _carry(carrier.send, number.fill_(ahead), peer)
        elif rank == peer:
            ahead = _carry(carrier.recv, number, 0)
    return 0.0 if rank == 0 else ahead


def _carry(carry: Callable[..., Any], number: Tensor, peer: int) -> float:
    """Send or receive a number. On a device a wait alone does not hold up the host, whose clock this is."""
    carry([number], peer, 0).wait()
    return number.item()


def put_together(
    recorder: Recorder, notes: Notes, group: ProcessGroup, rank: int, ahead: float, device: torch.device
) -> None:
    """Add the notes of all ranks to this rank's, in the first step also what they hold; all ranks call it, with a
    device that the group carries."""
    if recorder.held is None:
        held_by_rank: list[Any] = [None] * group.size()
        dist.all_gather_object(held_by_rank, recorder.counted(notes), group=group)
        changes = [change for owner, held in enumerate(held_by_rank) for change in held.changes if change[1] == owner]
        recorder.held = Held(tuple(held.peak[owner] for owner, held in enumerate(held_by_rank)), changes)
    began = [notes.began - ahead if owner == rank else 0.0 for owner in range(group.size())]
    times = [now - ahead if now else 0.0 for now in notes.times]  # each row is of one rank: a sum has them all
    sums = torch.tensor([*times, *began], dtype=torch.float64, device=device)
    dist.all_reduce(sums, group=group)
    (*notes.times,) = sums[: len(times)].tolist()
    notes.began = sums[len(times) :].min().item()


_PER_STAGE = ("grads", "state", "params", "opt")
"""Results with an entry for each stage."""


class RankLinks(NamedTuple):
    """Connections of this process with the others: its rank in the pipeline's group, and the ways between them."""

    rank: int
    group: ProcessGroup
    watchdog: Watchdog
    transfers: Transfers
    replicas: Replicas | None
    lane: ExchangeLane


class PreparedRank(Prepared):
    """A program lowered for one signature, of which this process runs one rank.

    All ranks agree on how it is `given_as`, its `stages` as they were traced and its `messages`; those along an axis on
    what is `exchanged`.
    """

    def __init__(
        self,
        links: RankLinks,
        program: Program,
        model: Model,
        inputs: StepInputs,
        untraced: Untraced,
        options: StepOptions,
    ) -> None:
        rank, group, watchdog, transfers, replicas, lane = links
        self.lane, self.watchdog = lane, watchdog
        self.rank, self.group, self.transfers, self.replicas, self.ahead = rank, group, transfers, replicas, None
        self.number = self.step = 0
        self.step_key: int | None = None
        replica = (0, 1) if replicas is None else (replicas.number, replicas.count)
        share = None if replicas is None else replicas.share
        device = transfers.device
        process = ProcessContext(device, replica=replica, share=share)
        super().__init__(program, model, inputs, untraced, options, process)
        first_ops = [instruction.ops[0] for instruction in self.instructions]
        sent = [value for op in first_ops if op.kind == "SEND" for value in op.writes]
        for value in sent:
            if value.name in KEPT and value.stage in self.untraced.stages:
                raise ValueError(
                    f"{value} is autograd's own, which no message carries: {self.untraced.stages[value.stage]}. Place "
                    "the backward of that stage where its forward is, or recompute it there, by fpipe.checkpoint()."
                )
        self.layouts = {value: Layout(self.trees[value].leaves, device) for value in sent}
        self.exchanges = NO_EXCHANGES
        if replicas is not None:
            self.instructions, self.exchanges = replicas.made_async(self.lowered, self.shared, self.weighed_rows)
        self.instructions = lane.made_async(self.instructions, self.lowered, rank)
        carriers = partial(transfers.send, self.layouts), partial(transfers.receive, self.layouts)
        with_lanes = partial(made_async, lane_by_rank=self.lanes)
        self.part = of_rank(self.instructions, self.model, rank, *carriers, with_lanes, self.lanes)
        rows = zip(self.part.rows, self.part.instructions, strict=True)
        self._sends = [row for row, instruction in rows if instruction.ops[0].kind == "SEND"]
        prepare = [preparation for preparation in self.entrance.prepare if preparation[2] in self.part.at]
        self.entrance, self.exit = replace(self.entrance, prepare=prepare), self._local_exit(self.exit)
        handed_out = {leaf.slot for leaf in self.exit.leaves if isinstance(leaf, ResultLeaf)}
        self._handed_out = [(slot, self.part.at[slot]) for slot in handed_out if slot in self.part.at]
        read = {*self.part.begins, *(slot for _, slots, _ in prepare for slot in slots)}
        values = {slot: value for value, slot in self.lowered.slots.items()}
        self._read = [(values[slot], places) for slot, places in self.entrance.inputs if slot in read]
        self.given_as = of_inputs(self.program, self.trees)
        self.stages = of_stages(self.model, self.lowered, device, self.given_as, replica[0])
        self.messages = [f"{value}: {layout.size} bytes" for value, layout in self.layouts.items()]
        self.exchanged = exchanged_by(rank, self.program, self.trees, self.model)

    def refuse_missing(self, leaves: Sequence[Any]) -> None:
        """Raise ValueError if an argument that this rank reads is missing."""
        for value, places in self._read:
            missing = [k for k, at in enumerate(places) if isinstance(leaves[at], Tensor) and leaves[at].is_meta]
            if missing:
                path = self._leaf_path(value, missing[0]) if len(missing) < len(places) else ""
                raise ValueError(
                    f"rank {self.rank} reads {value}{path}, and was handed None or a meta tensor in its place. A rank "
                    "passes local_params(program, params, rank), and its batch."
                )
            if self.replicas is None or value not in self.shared:
                continue
            axis = self.replicas.share.axis
            wholes = (leaves[at] for at in places if isinstance(leaves[at], Tensor) and not is_share(leaves[at], axis))
            if (whole := next(wholes, None)) is not None:
                kind = "DTensor" if is_sharded(whole) else "plain tensor"
                raise ValueError(
                    f"the program shards the parameters of stage {value.stage}, and a step was handed a {kind} of "
                    f"shape {tuple(whole.shape)} that is none of {axis!r}: fpipe.shard_params(local_params(program, "
                    f"params, rank), mesh[{axis!r}]) makes a replica's shards."
                )

    def _leaf_path(self, value: Value, index: int) -> str:
        spec, leaves = self.trees[value].spec, self.trees[value].leaves
        return "" if spec is None else tree.paths(tree.unflatten(spec, range(len(leaves))))[index][0]

    def _asked(self, program: Program) -> Program:
        """Keep one output of each name: this rank's, where it has one."""
        output_by_name = {end.name: end for end in program.outputs}
        output_by_name |= {end.name: end for end in program.outputs if self.rank in end.homes}
        return Program.trusted(program.inputs, program.ops, tuple(output_by_name.values()))

    def _local_exit(self, whole: Exit) -> Exit:
        """Put None in place of results that are at home on other ranks."""
        results: dict[str, Any] = tree.unflatten(whole.containers, whole.leaves)
        remote_by_part = defaultdict[str, dict[tuple[Any, Any], list[Value]]](dict)
        for end in self._asked(self.program).outputs:
            name, place = end.name, (end.name.microbatch, end.name.slice)
            remote = remote_by_part[name.name].setdefault(place, [])
            remote += [name] if self.rank not in end.homes else []

        def local(part: Any, remote: Sequence[Value]) -> Any:
            if not remote or remote[0].name not in _PER_STAGE:
                return None if remote else part
            stages = {value.stage for value in remote}
            return tuple(None if stage in stages else leaf for stage, leaf in enumerate(part))

        for name, result in results.items():
            by_part = remote_by_part[name]
            if (None, None) in by_part:
                results[name] = local(result, by_part[None, None])
            else:  # a tuple over microbatches, and their slices, or over training steps
                order = sorted(by_part, key=lambda place: (place[0], place[1] or 0))
                results[name] = tuple(local(part, by_part[place]) for part, place in zip(result, order, strict=True))
        leaves, spec = tree.flatten(results)
        return replace(whole, containers=spec, leaves=leaves)

    def _execute(self, slots: Slots, watch: Watch | None, tap: Tap | None) -> None:
        """Run this rank's instructions."""
        part_slots, watchdog = [slots[slot] for slot in self.part.begins], self.watchdog
        notes = watch and watch.notes
        self.transfers.start(self.step, self.number, self.step_key, keeps=notes is not None)
        if self.replicas is not None:
            self.replicas.begin(self.exchanges, watch)
        watchdog.part = part = self.part if tap is None else self.part.tapped(tap)
        self.lane.lane.begin(watch)
        part.run(part_slots, watch)
        self.lane.lane.end()
        if notes is not None:
            for row in self._sends:
                notes.see(row, [[self.transfers.sent(value)] for value in self.instructions[row].written])
        self.transfers.end()
        if self.replicas is not None:
            self.replicas.end()
        if notes is not None and self.recorder is not None:
            processes = tuple(dist.get_process_group_ranks(self.group))
            watchdog.wait = PeerWait(processes, "did not come to the end of the step", "at the end of")
            if self.ahead is None:
                self.ahead = ahead_of_rank_0(self.group, self.rank, self.transfers.carried)
            put_together(self.recorder, notes, self.group, self.rank, self.ahead, self.transfers.carried)
            watchdog.wait = None
        slots.extend([None] * (len(self.lowered.slots) - len(slots)))
        for slot, place in self._handed_out:
            slots[slot] = part_slots[place]


def exchanged_by(
    rank: int, program: Program, trees: Mapping[Value, AbstractTree], model: Model
) -> dict[str, list[str]]:
    """State by axis what the forward exchanges of a rank carry, which is alike on all processes of the axis."""
    facts: dict[str, list[str]] = {}
    for op in parts_of(program.ops):
        exchange: Any = model.stages[op.stage or 0].forward
        if op.kind == "F" and op.rank == rank and isinstance(exchange, Exchanged):
            leaves = [leaf for value in op.reads if value.name != "params" for leaf in trees[value].leaves]
            leaves = leaves if exchange.leaf is None else [leaves[exchange.leaf]]
            avals = [str(leaf.aval) for leaf in leaves if isinstance(leaf, Fact)]
            if exchange.sizes:  # the data say how many rows
                rows = (leaf.aval for leaf in leaves[:-1])
                avals[:-1] = [f"rows of {aval._replace(shape=aval.shape[1:])}" for aval in rows]
            facts.setdefault(exchange.axis, []).append(f"{op.cell} ({exchange.__name__}) of {' and '.join(avals)}")
    return facts


# Stand for the loss on ranks that do not compute it, and say how they get it.


class Elsewhere:
    """The loss of a step on a rank that has none: false, and an error with the way out for who computes with it.

    >>> loss = Elsewhere(3)
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

    def __format__(self, how: str) -> str:
        return str(self) if not how else format(float(self), how)

    def __add__(self, other: Any) -> float:
        return float(self)

    __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = __lt__ = __gt__ = __add__
