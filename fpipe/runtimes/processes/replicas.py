"""Exchange with data-parallel replicas while the rest of a step runs.

    replica 0, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote
                              | all_reduce          | all_reduce   | all_gather
    replica 1, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote

A REDUCE, GATHER or SCATTER only starts: who reads its result waits, else the end of the step does. At the end the
processes of each rank vote: they are done, and have equally many rows, one key and the same numbers for their update.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fpipe.meaning.purity.sharded import dimensions
from fpipe.program import Op, Program, Value, kind_of
from fpipe.runtimes.faults.agreement import digest
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog
from fpipe.runtimes.lowering.lane import Launch, Launched, Watch
from fpipe.runtimes.lowering.lowered import Instruction, Lowered
from fpipe.runtimes.lowering.shards import Share, Shared, shard_of
from fpipe.runtimes.processes.collective_parts import CollectiveLane, CollectivePart, Works, parts_of_op
from fpipe.torch_private.processes import coalesced, is_on_streams, timeout_of, world_group
from fpipe.transforms.data_parallel import axes_of

Leaves = list[Any]
_NO_KEY, _LARGE = -(2**63), 2**62


class Exchanges(NamedTuple):
    """Collectives of a rank over replicas in a step, in the order of the program: their parts, ops and places among
    the instructions by the value that they write, and the rows of the batch."""

    parts: dict[Value, list[CollectivePart]]
    ops: dict[Value, Op]
    at: dict[Value, int]
    rows: int


NO_EXCHANGES = Exchanges({}, {}, {}, 0)
EXCHANGED = ("REDUCE", "GATHER", "SCATTER")


class Voters:
    """The processes of a group, which say at the end of a step that they are done.

    Args:
        group: the processes.
        word: how errors call one, with its number: "rank" or "replica".
        watchdog: of this process.
        device: of the votes: the host, or with NCCL the GPU.
    """

    def __init__(self, group: ProcessGroup, word: str, watchdog: Watchdog, device: torch.device) -> None:
        processes = tuple(dist.get_process_group_ranks(group))
        self._group, self._word, self._watchdog, self._device = group, word, watchdog, device
        self._wait = PeerWait(processes, "did not take part in the end of the step", group=group)

    def vote(self, facts: Sequence[int], numbers: Mapping[str, str]) -> list[list[int]]:
        """Wait until all are done, and return each fact of all; raise ValueError if their numbers differ."""
        own = torch.tensor([*facts, digest(numbers)], device=self._device)
        votes = own.new_empty(self._group.size(), len(own))
        try:
            work = dist.all_gather([*votes], own, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._watchdog.lost(error, self._wait) from error
        on_streams = self._device.type != "cpu"
        self._watchdog.wait_for(work, self._wait, on_streams)
        if on_streams:
            self._watchdog.settle(work, self._wait)
        *columns, digests = votes.T.tolist()
        if len({*digests}) > 1:
            self._refuse_other(numbers)
        return columns

    def _refuse_other(self, numbers: Mapping[str, str]) -> None:
        """Raise ValueError for the first number that differs; all of the group come here."""
        gathered: list[Any] = [None] * self._group.size()
        self._watchdog.wait = self._wait
        dist.all_gather_object(gathered, dict(numbers), group=self._group)
        for member, numbers in enumerate(gathered):
            for name, expected in gathered[0].items():
                if numbers.get(name) != expected:
                    raise ValueError(
                        f"{self._word} {member} differs from {self._word} 0 in its {name}: {numbers.get(name)} instead "
                        f"of {expected}. All pass the same in each step."
                    )
        raise ValueError(f"the {self._word}s were handed other numbers for their update; all pass the same.")


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
        self.meeting, self._warned = meeting, False
        self.lane = CollectiveLane(watchdog, groups, device.type != "cpu")
        self._voters = Voters(group, "replica", watchdog, device)
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

    def end(self) -> None:
        """Wait until all sums are there."""
        self.lane.end(self._exchanges.at.values())

    def vote(self, key: int | None, batch_digest: int, numbers: Mapping[str, str]) -> None:
        """Wait until all replicas are done with the step, and compare what they were handed.

        Raises:
            ValueError: their batches have not equally many rows, or they have other keys, or other numbers for their
                update.
        """
        number = _NO_KEY if key is None else key if abs(key) < _LARGE else hash(key)
        facts = self._exchanges.rows, number, batch_digest
        rows, keys, batches = self._voters.vote(facts, numbers)
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
        """Warn once that replicas were handed the same rows."""
        repeated = next((n for n, batch in enumerate(batches) if batch and batches.index(batch) < n), None)
        if repeated is not None and not self._warned:
            self._warned = True
            first = batches.index(batches[repeated])
            warnings.warn(
                f"replica {first} and replica {repeated} were handed the same rows: their sum says "
                "no more than one of them. DistributedSampler(dataset, replicas, replica) gives each its own.",
                stacklevel=8,
            )


def reduced_last(program: Program) -> Program:
    """Move ops that read a sum over replicas as late as they may be, so that nothing else waits for it: to the end, or
    before the first op of a stage that needs them, which is of the next training step. An ADD of scattered sums stands
    before the next SCATTER of its stage, so that no more than two of them are in memory."""
    late, behind = set[Value](), set[Value]()
    last, rest = list[Op](), list[Op]()
    adds: dict[tuple[int | None, int], list[Op]] = {}
    for op in program.ops:
        sums, place = op.kind in ("REDUCE", "SCATTER"), (op.stage, op.rank)
        if not late.isdisjoint(op.reads) and kind_of(op.kind).time:
            rest += [*chain.from_iterable(adds.values()), *last]
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
    ops = (*rest, *chain.from_iterable(adds.values()), *last)
    return Program.trusted(program.inputs, ops, program.outputs)


# Find in a mesh the processes that run the ranks of a program, and those that run its replicas.
#
# mesh 2 x 2 of ("dp", "pp")                    --> process 3 -->    ranks: processes 2, 3; the other replica's: 1
# mesh 2 x 2 x 1 of ("replicate", "shard", "pp")    --> process 3 -->    shards with process 2, adds up across with 1


def group_of(program: Program, mesh: DeviceMesh | None) -> ProcessGroup:
    """Return the processes that run the ranks of a program; warn if the mesh has replicas that the program lacks."""
    axes = axes_of(program)
    if isinstance(mesh, DeviceMesh | None) and not dist.is_initialized():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("runtime='distributed' is for processes that torch.distributed.init_process_group has joined.")
    names = dimensions(mesh, dict.fromkeys(axes, "replicas") | {"pp": program.ranks})
    if mesh is None:
        return world_group()
    for name in names:
        if name.startswith("dp") and name not in axes and mesh.size(names.index(name)) > 1:
            warnings.warn(
                f"dimension {name!r} of the mesh has {mesh.size(names.index(name))} processes, and the program no "
                f"replicas along it: each trains apart. Put fpipe.data_parallel({name!r}) behind fpipe.merge(), unless "
                "you add up the gradients yourself.",
                stacklevel=4,
            )
    return mesh.get_group("pp")


def refuse_other_size(group: ProcessGroup, program: Program, mesh: DeviceMesh | None) -> None:
    """Raise ValueError unless there is a process for each rank."""
    if group.size() != program.ranks:
        where = "the process group" if mesh is None else "dimension 'pp' of the mesh"
        ranks, processes = f"{program.ranks} rank{'s' * (program.ranks > 1)}", f"{group.size()} process"
        raise ValueError(
            f"the program has {ranks} and {where} {processes}{'es' * (group.size() > 1)}; they must be as many. Start "
            f"{program.ranks}, or say in a mesh which are the ranks."
        )


def replicas_of(
    program: Program, mesh: DeviceMesh | None, ranks: ProcessGroup, device: torch.device, watchdog: Watchdog
) -> Replicas | None:
    """Return the replicas of a program that has them; the mesh has a dimension, or two, for them."""
    axes = axes_of(program)
    if not axes:
        return None
    assert mesh is not None
    names = mesh.mesh_dim_names or ()
    dims = [name for name in names if name in (*axes, "pp")]
    coordinate = zip(names, mesh.get_coordinate() or (), strict=True)
    submesh = mesh.mesh[tuple(slice(None) if name in dims else index for name, index in coordinate)]
    order = [dims.index(name) for name in (*axes, "pp")]
    processes = sorted(submesh.permute(order).reshape(-1, ranks.size()).tolist())  # as a group sorts its own
    groups = {axis: mesh.get_group(axis) for axis in axes}
    inner = groups[axes[-1]]
    group = inner if len(axes) == 1 else _group_of_all([replica[ranks.rank()] for replica in processes], inner)
    names = [f"replica {replica}: rank {rank}" for replica in range(len(processes)) for rank in range(ranks.size())]
    everyone = [process for replica in processes for process in replica]
    meeting = Meeting(watchdog, everyone, names)
    watchdog.faults.names.update(zip(everyone, names, strict=True))
    share = Share(inner.rank(), inner.size(), axes[-1])
    vote_device = device if is_on_streams(group, device) else torch.device("cpu")
    return Replicas(group, groups, share, ranks.rank(), watchdog, meeting, vote_device)


def _group_of_all(processes: Sequence[int], inner: ProcessGroup) -> ProcessGroup:
    """Return the group of the replicas along two axes, where they vote; it is created once for their inner group."""
    groups = _GROUPS_BY_INNER.setdefault(inner, {})
    key = tuple(processes)
    if key not in groups:
        options: Any = {"timeout": timeout_of(inner), "backend": dist.get_backend(inner)}
        groups[key] = dist.new_group([*processes], use_local_synchronization=True, **options)
    return groups[key]


_GROUPS_BY_INNER: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
