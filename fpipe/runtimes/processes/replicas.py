"""Exchange with data-parallel replicas while the rest of a step runs, and end all replicas together.

    replica 0, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote
                              | all_reduce          | all_reduce   | all_gather
    replica 1, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote

A REDUCE, GATHER or SCATTER only starts: who reads its result waits, else the end of the step does. At the end each
process tells the others of its rank whether all went well there. One that failed still takes part in what it owes, with
zeros, and says why: so nothing stays under way, and the next step works.
"""

from __future__ import annotations

import struct
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.program import Op, Program, Value, kind_of
from fpipe.runtimes.faults.lost_partner import who_is_lost
from fpipe.runtimes.faults.lost_rank import Board, first_told
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.rank_error import LostRank, RankError
from fpipe.runtimes.lowering.lane import Flight, Lane, Launch, Launched, Watch
from fpipe.runtimes.lowering.lowered import Instruction, Lowered
from fpipe.runtimes.lowering.shards import Share, Shared, shard_of
from fpipe.runtimes.processes.collective_parts import CollectivePart, Read, Works, parts_of_op
from fpipe.torch_private.processes import coalesced

Leaves = list[Any]
_VOTE = struct.Struct("<qB")  # rows, and what happened; the rest of a vote are words
_SIZE = 512
_FINE, _FAILED, _LOST = range(3)


class Exchanges(NamedTuple):
    """Collectives of one rank over replicas in a step, in the order of the program, their ops, their places among the
    instructions, and the rows of the step."""

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
        meeting, own: where all ranks of all replicas leave word, and those of this one.
        device: where votes are: on the host, or with NCCL on the GPU.
    """

    def __init__(
        self,
        group: ProcessGroup,
        groups: Mapping[str, ProcessGroup],
        share: Share,
        rank: int,
        meeting: Meeting,
        own: Board,
        device: torch.device,
    ) -> None:
        self.group, self.number, self.count, self._rank = group, group.rank(), group.size(), rank
        self._by_axis, self.share, self.groups = groups, share, [*dict.fromkeys((group, *groups.values()))]
        self._own, self.meeting, self._device, self._broken, self._warned = own, meeting, device, False, False
        self._on_streams = device.type != "cpu"
        self._patience = () if self._on_streams else (timedelta(seconds=meeting.seconds),)  # NCCL's holds the host up
        self.lane = Lane(self._wait, self._on_streams)
        self.begin(NO_EXCHANGES)

    def begin(self, exchanges: Exchanges, key: int | None = None, batch: str = "", watch: Watch | None = None) -> None:
        """Start a step with this key, on a batch of this digest."""
        self.lane.begin(watch)
        self._over, self._exchanges, self._key, self._batch = False, exchanges, key, batch
        self._posted = dict.fromkeys(exchanges.parts, 0)
        self._votes: tuple[Tensor, Tensor, Any] | None = None

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
        self._let_go()
        read, made = [*leaves], [*leaves]
        leaves.clear()
        for launched in self._post(value, read, works):
            for place, leaf in launched.written.items():
                made[place] = leaf
        return [made]

    def _let_go(self) -> None:
        """Let go of what is over, such as the whole gradients of a SCATTER; where gloo cannot say whether it is, or the
        host is ahead of a GPU, of all but the last one: then no more than two are under way."""
        flights = {value: flight for value, flight in self.lane.flights.items() if flight.works}
        scattered = [value for value in flights if self._exchanges.ops[value].kind == "SCATTER"][:-1]
        for value, flight in flights.items():
            works = [launched.work for launched in flight.works]
            is_unknown = self._on_streams or any(isinstance(work, Works) for work in works)
            if value in scattered if is_unknown else all(work.is_completed() for work in works):
                self.lane.wait_for(value)

    def _post(self, value: Value, read: Read, works: list[Launched]) -> Sequence[Launched]:
        """Start the parts that are not under way yet, where it can be as one."""
        op, joint, before = self._exchanges.ops[value], list[Any](), len(works)
        group, parts = self._by_axis[dict(op.how)["axis"]], self._exchanges.parts[value][self._posted[value] :]
        try:
            with coalesced(group, [part.buffer.device for part in parts]) as joint:
                for part in parts:
                    works.append(part.post(group, read))
                    self._posted[value] += 1
        except RuntimeError as error:
            raise self._lost(error, op.cell) from error
        finally:
            made = works[before:]
            works[before:] = [launched._replace(work=work) for work in joint for launched in made] or made
        return made

    def end(self) -> None:
        """Wait until all sums are there, and all replicas have ended well.

        Raises:
            RankError: one has not; with its words.
            ValueError: their batches have not equally many rows, or they have other keys.
        """
        self._vote(_FINE, f"{self._batch}/{self._key}")
        own, every = self._ended()
        self.lane.notes.add(self._exchanges.at.values())
        if bool((every == own).all()) and not self._batch:
            return
        rows, keys, batches = list[int](), list[str](), list[str]()
        for vote in every:
            told = vote.cpu().numpy().tobytes()
            size, kind = _VOTE.unpack_from(told)
            words = told[_VOTE.size :].rstrip(b"\0").decode(errors="ignore")
            if kind:
                raise (LostRank if kind == _LOST else RankError)(self.meeting.board.whole(words))
            batch, _, key = words.partition("/")
            rows.append(size)
            keys.append(key)
            batches.append(batch)
        if len({*rows}) == len({*keys}) == 1:
            self._warn_of_same(batches)
            return
        if len({*rows}) == 1:
            raise ValueError(f"the replicas have keys {', '.join(keys)} in this step; all pass the same.")
        raise ValueError(
            f"the batches of the replicas have {', '.join(map(str, rows))} rows; their losses are means, so all have "
            "equally many. DistributedSampler pads to that, drop_last=True leaves a smaller last batch out, and a loss "
            'that returns (total, count), with reduction="count", takes any.'
        )

    def _warn_of_same(self, batches: Sequence[str]) -> None:
        """Say once that replicas were handed the same rows: then they are replicas for nothing."""
        same = next((at for at, one in enumerate(batches) if one and batches.index(one) < at), None)
        if same is not None and not self._warned:
            self._warned = True
            warnings.warn(
                f"replica {batches.index(batches[same])} and replica {same} were handed the same rows: their sum says "
                "no more than one of them. DistributedSampler(dataset, replicas, replica) gives each its own.",
                stacklevel=8,
            )

    def fail(self, said: str, broken: bool) -> None:
        """Take part in what is still owed, and say what went wrong. If a process is `broken`, nothing is waited for."""
        if self._broken or self._over:
            return
        self.owe()
        with suppress(RuntimeError):  # who is lost meanwhile hides no error; the next step meets it
            self._vote(_LOST if broken else _FAILED, said)
            if not broken:
                self._ended()

    def owe(self) -> None:
        """Post zeros for each sum that others wait for."""
        if self._broken or self._over:
            return
        with suppress(RuntimeError):
            for value, row in self._exchanges.at.items():
                flight = self.lane.flights.setdefault(value, Flight(row, self._exchanges.ops[value].cell, []))
                self._post(value, None, flight.works)

    def named(self, words: str) -> str:
        """Words about a process of this replica."""
        return words if words.startswith("replica ") else f"replica {self.number}: {words}"

    def first_told(self, words: str) -> str:
        """First words about a process that is lost, on any rank of any replica: those, or these."""
        return first_told(self.meeting.board, self.named(words))

    def _vote(self, kind: int, words: str) -> None:
        own = bytearray(_SIZE)
        said = self.meeting.board.shortened(words, _SIZE - _VOTE.size).encode()
        own[: _VOTE.size + len(said)] = _VOTE.pack(self._exchanges.rows, kind) + said
        mine = torch.frombuffer(own, dtype=torch.uint8).to(self._device)
        every = torch.empty(self.count, _SIZE, dtype=torch.uint8, device=self._device)
        try:
            work = dist.all_gather([*every], mine, group=self.group, async_op=True)
        except RuntimeError as error:
            raise self._lost(error, "the end of the step") from error
        self._votes = mine, every, work

    def _ended(self) -> tuple[Tensor, Tensor]:
        """This process's vote and all, when nothing is under way any longer: the buffers are only the results' then."""
        assert self._votes is not None
        own, every, work = self._votes
        self.lane.wait_for_all()
        self._wait(Launched(work, own, every), "the end of the step")
        if self._on_streams and not self.meeting.watchdog.is_over(work, self.meeting.seconds):
            raise self._lost(RuntimeError("timed out"), "the end of the step")
        self._votes, self._over = None, True
        return own, every

    def _wait(self, launched: Launched, what: str) -> None:
        watchdog = self.meeting.watchdog
        before, watchdog.waits = watchdog.waits, "at the end"
        try:
            launched.work.wait(*self._patience)
        except RuntimeError as error:
            raise self._lost(error, what) from error
        watchdog.waits = before

    def _lost(self, error: RuntimeError, what: str) -> LostRank:
        self._broken = True
        self.meeting.watchdog.refuse_ended()
        ranks = self.meeting.size // self.count
        known = [(f"replica {at}: rank {self._rank}", at * ranks + self._rank) for at in range(self.count)]
        return LostRank(who_is_lost(self.meeting.board, (self._own, self._rank), self.group, known, error, what))


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
