"""Exchange with data-parallel replicas while the rest of a step runs.

    replica 0, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote
                              | all_reduce          | all_reduce   | all_gather
    replica 1, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote

A REDUCE, GATHER or SCATTER only starts: who reads its result waits, else the end of the step does. At the end the
processes of each rank vote: they have equally many rows, and one key.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from fpipe.program import Op, Program, Value, kind_of
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import Watchdog
from fpipe.runtimes.lowering.lane import Launch, Launched, Watch
from fpipe.runtimes.lowering.lowered import Instruction, Lowered
from fpipe.runtimes.lowering.shards import Share, Shared, shard_of
from fpipe.runtimes.processes.collective_parts import CollectiveLane, CollectivePart, Works, parts_of_op
from fpipe.torch_private.processes import coalesced

Leaves = list[Any]
_VOTES = "votes"
_NO_KEY, _LARGE = -(2**63), 2**62


class Exchanges(NamedTuple):
    """Collectives of one rank over replicas in a step, in the order of the program: their parts and ops by what they
    write, their places among the instructions, and the rows of the step."""

    parts: dict[Value, list[CollectivePart]]
    ops: dict[Value, Op]
    at: dict[Value, int]
    rows: int


NO_EXCHANGES = Exchanges({}, {}, {}, 0)
EXCHANGED = ("REDUCE", "GATHER", "SCATTER")


class Replicas:
    """The processes that do what this one does in other replicas.

    Args:
        group: they and this one, by replica.
        groups: those of them along each dimension of the mesh that has replicas.
        share: which of those along the last of these this one is, of how many: they share parameters out.
        rank: which rank of its replica this is.
        watchdog: of this process.
        meeting: where all ranks of all replicas agree.
        device: where votes are: on the host, or with NCCL on the GPU.
    """

    def __init__(
        self,
        group: ProcessGroup,
        groups: Mapping[str, ProcessGroup],
        share: Share,
        rank: int,
        watchdog: Watchdog,
        meeting: Meeting,
        device: torch.device,
    ) -> None:
        self.group, self.number, self.count, self._rank = group, group.rank(), group.size(), rank
        self._by_axis, self.share, self.groups = groups, share, [*dict.fromkeys((group, *groups.values()))]
        self.meeting, self._device, self._warned = meeting, device, False
        self.lane = CollectiveLane(watchdog, {**groups, _VOTES: group}, device.type != "cpu")
        self._exchanges = NO_EXCHANGES

    def begin(self, exchanges: Exchanges, watch: Watch | None) -> None:
        """Start a step."""
        self.lane.begin(watch)
        self._exchanges = exchanges

    def made_async(
        self, lowered: Lowered, shared: Mapping[Value, Shared], rows: int
    ) -> tuple[list[Instruction], Exchanges]:
        """Replace each collective of this rank by its launch, and each first reader by a wait and the read: a REDUCE
        across, too, that adds up what was scattered within."""
        exchanges, launches = Exchanges({}, {}, {}, rows), dict[int, Launch]()
        for row, instruction in enumerate(lowered.instructions):
            op = instruction.ops[0]
            if op.rank == self._rank and op.kind in EXCHANGED:
                (value,) = op.writes
                wanted = lowered.gathered.get(value)
                of = None if op.kind == "REDUCE" else shared[shard_of(op)]
                parts = parts_of_op(op, lowered.trees[value].leaves, of, self.share.replicas, wanted)
                exchanges.parts[value], exchanges.ops[value], exchanges.at[value] = parts, op, row
                launches[row] = Launch(partial(self._launch, value), (value,))
        return self.lane.made_async(lowered.instructions, self._rank, launches), exchanges

    def _launch(self, value: Value, works: list[Launched], leaves: Leaves) -> Sequence[Leaves]:
        """Start the parts of a collective, where it can be as one."""
        self._let_go()
        read, made = [*leaves], [*leaves]
        leaves.clear()
        op, parts = self._exchanges.ops[value], self._exchanges.parts[value]
        axis = dict(op.how)["axis"]
        try:
            with coalesced(self._by_axis[axis], [part.buffer.device for part in parts]) as joint:
                works += [part.post(self._by_axis[axis], read)._replace(group=axis) for part in parts]
        except RuntimeError as error:
            raise self.lane.watchdog.lost(error, self.lane.wait_of(axis, op.cell)) from error
        for launched in works:
            for place, leaf in launched.written.items():
                made[place] = leaf
        works[:] = [launched._replace(work=work) for work in joint for launched in works] or works
        return [made]

    def _let_go(self) -> None:
        """Let go of what is over, such as the whole gradients of a SCATTER; where gloo cannot say whether it is, or the
        host is ahead of a GPU, of all but the last one: then no more than two are under way."""
        flights = {value: flight for value, flight in self.lane.flights.items() if flight.works}
        scattered = [value for value in flights if self._exchanges.ops[value].kind == "SCATTER"][:-1]
        for value, flight in flights.items():
            works = [launched.work for launched in flight.works]
            is_unknown = self.lane.on_streams or any(isinstance(work, Works) for work in works)
            if value in scattered if is_unknown else all(work.is_completed() for work in works):
                self.lane.wait_for(value)

    def end(self, key: int | None, batch_digest: int) -> None:
        """Wait until all sums are there, and compare what the replicas were handed.

        Raises:
            ValueError: their batches have not equally many rows, or they have other keys.
        """
        number = _NO_KEY if key is None else key if abs(key) < _LARGE else hash(key)
        own = torch.tensor([self._exchanges.rows, number, batch_digest], device=self._device)
        votes = own.new_empty(self.count, len(own))
        try:
            work = dist.all_gather([*votes], own, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self.lane.watchdog.lost(error, self.lane.wait_of(_VOTES, _END)) from error
        self.lane.wait_on(Launched(work, own, votes, group=_VOTES), _END)
        if self.lane.on_streams:
            self.lane.last_by_group[_VOTES] = work, _END
        self.lane.end(self._exchanges.at.values())
        rows, keys, batches = votes.T.tolist()
        if len({*rows}) > 1:
            raise ValueError(
                f"the batches of the replicas have {', '.join(map(str, rows))} rows; their losses are means, so all "
                "have equally many. DistributedSampler pads to that, drop_last=True leaves a smaller last batch out, "
                'and a loss that returns (total, count), with reduction="count", takes any.'
            )
        if len({*keys}) > 1:
            words = ", ".join("None" if key == _NO_KEY else str(key) for key in keys)
            raise ValueError(f"the replicas have keys {words} in this step; all pass the same.")
        self._warn_of_same(batches)

    def _warn_of_same(self, batches: Sequence[int]) -> None:
        """Say once that replicas were handed the same rows: then they are replicas for nothing."""
        same = next((at for at, batch in enumerate(batches) if batch and batches.index(batch) < at), None)
        if same is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"replica {batches.index(batches[same])} and replica {same} were handed the same rows: their sum says "
                "no more than one of them. DistributedSampler(dataset, replicas, replica) gives each its own.",
                stacklevel=8,
            )


_END = "the end of the step"


def reduced_last(program: Program) -> Program:
    """The program with what reads a sum over replicas as late as it may be, so that nothing else waits for it: at the
    end, or before the first op of a stage that needs it, which is of the next training step. What adds one microbatch's
    to another's stands before the next one starts, so that no more than two are there."""
    late, behind = set[Value](), set[Value]()
    last: list[Op] = []
    rest: list[Op] = []
    adds: dict[tuple[int | None, int], list[Op]] = {}
    for op in program.ops:
        sums, place = op.kind in ("REDUCE", "SCATTER"), (op.stage, op.rank)
        if not late.isdisjoint(op.reads) and kind_of(op.kind).time:
            rest += [*(one for own in adds.values() for one in own), *last]
            late, behind, last, adds = set(), set(), [], {}
        waits = not late.isdisjoint(op.reads)
        late.update(op.writes if waits or sums else ())
        if op.kind == "SCATTER":
            rest += adds.pop(place, ())
        if waits and op.kind == "ADD" and op.microbatch is not None and behind.isdisjoint(op.reads):
            adds.setdefault(place, []).append(op)
        elif waits:
            behind.update(op.writes)
            last.append(op)
        else:
            rest.append(op)
    ops = (*rest, *(op for own in adds.values() for op in own), *last)
    return Program.trusted(program.inputs, ops, program.outputs)
