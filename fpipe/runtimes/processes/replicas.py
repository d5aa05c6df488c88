"""Exchange with data-parallel replicas while the rest of a step runs.

    replica 0, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote
                              | all_reduce          | all_reduce   | all_gather
    replica 1, rank 1:  3B1 REDUCE(all[3]) .. 1B1 REDUCE(all[1]) vote

A REDUCE, GATHER or SCATTER only starts: the first reader of its result waits, else the end of the step does. At the end
the processes of each rank vote: that they are done, and have equal counts of rows, keys and numbers for their update.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from fpipe.meaning.purity.sharded import mesh_dim_names
from fpipe.program import Op, Program, Value, kind_of
from fpipe.runtimes.faults.agreement import digest_claims
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog
from fpipe.runtimes.lowering.lane import Launch, Launched, Watch
from fpipe.runtimes.lowering.lowered import Instruction, Lowered
from fpipe.runtimes.lowering.shard_shapes import Share, SharedValue, shard_of
from fpipe.runtimes.processes.collective_parts import CollectiveLane, CollectivePart, CombinedWork, parts_of_op
from fpipe.torch_internals import warn
from fpipe.torch_private.processes import coalesce, is_on_streams, timeout_of, world_group
from fpipe.transforms.data_parallel import replica_axes

Leaves = list[Any]
_NO_KEY_NUMBER, _LARGE_KEY = -(2**63), 2**62


class Exchanges(NamedTuple):
    """The collectives of a rank over replicas in a step, by the value that each writes, in the order of the program.

    Attributes:
        parts, ops, instruction_rows: the parts of each collective, its op, and its index among the instructions.
        batch_rows: the number of rows of the batch.
    """

    parts: dict[Value, list[CollectivePart]]
    ops: dict[Value, Op]
    instruction_rows: dict[Value, int]
    batch_rows: int


NO_EXCHANGES = Exchanges({}, {}, {}, 0)
EXCHANGED_KINDS = ("REDUCE", "GATHER", "SCATTER")


class Voters:
    """The processes of a group, which vote at the end of a step that they are done.

    Args:
        group: the processes.
        member_word: how errors call a process, with its number: "rank" or "replica".
        watchdog: of this process.
        device: of the votes: the host, or with NCCL the GPU.
    """

    def __init__(self, group: ProcessGroup, member_word: str, watchdog: Watchdog, device: torch.device) -> None:
        processes = tuple(dist.get_process_group_ranks(group))
        self._group, self._member_word, self._watchdog, self._device = group, member_word, watchdog, device
        self._wait = PeerWait(processes, "did not take part in the end of the step", group=group)

    def vote(self, claims: Sequence[int], update_claims: Mapping[str, str]) -> list[list[int]]:
        """Wait until all processes are done, and compare the numbers of their updates.

        Returns:
            A list for each claim, with the claim of each process.

        Raises:
            ValueError: the numbers for the update differ.
        """
        # A process that gets the votes knows that all others have their results, and that none can fail any more.
        *claims_by_column, update_digests = self.gather((*claims, digest_claims(update_claims)), self._wait)
        if len({*update_digests}) > 1:
            self._refuse_different_updates(update_claims)
        return claims_by_column

    def wait_at(self, sync_point: str) -> PeerWait:
        """Return the wait for processes that have not come to a point, such as "step 3"."""
        omission, place = f"did not come to {sync_point}", f"at {sync_point}"
        return self._wait._replace(omission=omission, phase=place, is_agreeing=self._member_word == "rank")

    def gather(self, numbers: Sequence[int], wait: PeerWait) -> list[list[int]]:
        """Return lists by number, with an entry from each process."""
        if self._group.size() == 1:
            return [[number] for number in numbers]
        own_numbers = torch.tensor(numbers, device=self._device)
        # Until the others' numbers have come, as if all had sent the same: never numbers that nobody sent.
        gathered = own_numbers.repeat(self._group.size(), 1)
        try:
            work = dist.all_gather([*gathered], own_numbers, group=self._group, async_op=True)
        except RuntimeError as error:
            raise self._watchdog.as_rank_error(error, wait) from error
        on_streams = self._device.type != "cpu"
        self._watchdog.wait_for(work, wait, on_streams)
        if on_streams:
            self._watchdog.wait_on_host(work, wait)
        return gathered.T.tolist()

    def _refuse_different_updates(self, update_claims: Mapping[str, str]) -> None:
        # All processes of the group have the same votes, so all come to this collective.
        claims_by_member: list[Any] = [None] * self._group.size()
        self._watchdog.wait = self._wait
        dist.all_gather_object(claims_by_member, dict(update_claims), group=self._group)
        member_word = self._member_word
        for member, member_claims in enumerate(claims_by_member):
            for name, expected in claims_by_member[0].items():
                if (number := member_claims.get(name)) != expected:
                    raise ValueError(
                        f"{member_word} {member} differs from {member_word} 0 in its {name}: {number} instead of "
                        f"{expected}. All pass the same in each step."
                    )
        raise ValueError(f"the {self._member_word}s have different numbers for their update.")


class Replicas:
    """The processes that run the same rank in all replicas.

    Args:
        group: these processes, by replica.
        groups: the ones along each dimension of the mesh that has replicas.
        share: the index of this process, and the count, along the last of these dimensions, which shards parameters.
        rank: the rank that they run.
        watchdog: of this process.
        meeting: the ranks of all replicas.
        device: of the votes: the host, or with NCCL the GPU.
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
        self._group_by_axis, self.share, self.groups = groups, share, [*dict.fromkeys((group, *groups.values()))]
        self.meeting, self._has_warned = meeting, False
        self.lane = CollectiveLane(watchdog, groups, device.type != "cpu")
        self._voters = Voters(group, "replica", watchdog, device)
        self._exchanges = NO_EXCHANGES

    def begin(self, exchanges: Exchanges, watch: Watch | None) -> None:
        """Start a step."""
        self.lane.begin(watch)
        self._exchanges = exchanges

    def made_async(
        self, lowered: Lowered, shared: Mapping[Value, SharedValue], rows: int
    ) -> tuple[list[Instruction], Exchanges]:
        """Replace each collective of this rank by its launch, and each first reader by a wait and the read.

        A REDUCE across hosts, which reads what a SCATTER within a host has summed, is both.
        """
        exchanges, launches = Exchanges({}, {}, {}, rows), dict[int, Launch]()
        for row, instruction in enumerate(lowered.instructions):
            op = instruction.ops[0]
            if op.rank == self._rank and op.kind in EXCHANGED_KINDS:
                (value,) = op.writes
                wanted_indices = lowered.read_leaves.get(value)
                shared_value = None if op.kind == "REDUCE" else shared[shard_of(op)]
                parts = parts_of_op(op, lowered.trees[value].leaves, shared_value, self.share.replicas, wanted_indices)
                exchanges.parts[value], exchanges.ops[value], exchanges.instruction_rows[value] = parts, op, row
                launches[row] = Launch(partial(self._launch, value), (value,))
        return self.lane.made_async(lowered.instructions, self._rank, launches), exchanges

    def _launch(self, value: Value, works: list[Launched], leaves: Leaves) -> Sequence[Leaves]:
        """Start the parts of a collective, as one launch where the backend can."""
        self._free_finished()
        read_leaves, written_leaves = [*leaves], [*leaves]
        # The caller's list would keep the whole gradients alive until the end of the collective.
        leaves.clear()
        op, parts = self._exchanges.ops[value], self._exchanges.parts[value]
        axis = dict(op.options)["axis"]
        try:
            with coalesce(self._group_by_axis[axis], [part.buffer.device for part in parts]) as joint_works:
                works += [part.post(self._group_by_axis[axis], read_leaves)._replace(group=axis) for part in parts]
        except RuntimeError as error:
            raise self.lane.watchdog.as_rank_error(error, self.lane.wait_of(axis, op.cell)) from error
        for launched in works:
            for index, leaf in launched.outputs.items():
                written_leaves[index] = leaf
        works[:] = [launched._replace(work=work) for work in joint_works for launched in works] or works
        return [written_leaves]

    def _free_finished(self) -> None:
        """Free the memory of collectives that are over, such as the whole gradients of a SCATTER."""
        # Where gloo cannot tell whether a collective is over, or the host is ahead of a GPU, wait for all SCATTERs but
        # the last one: no more than two are in flight then.
        flights = {value: flight for value, flight in self.lane.flights.items() if flight.works}
        older_scatters = [value for value in flights if self._exchanges.ops[value].kind == "SCATTER"][:-1]
        for value, flight in flights.items():
            works = [launched.work for launched in flight.works]
            cannot_poll = self.lane.on_streams or any(isinstance(work, CombinedWork) for work in works)
            if value in older_scatters if cannot_poll else all(work.is_completed() for work in works):
                self.lane.wait_for(value)

    def end(self, is_captured: bool = False) -> None:
        """Wait until all collectives of the step are over; of a graph that is captured only its streams wait."""
        self.lane.end(self._exchanges.instruction_rows.values(), is_captured)

    def count_earlier(self, microbatches: int, sync_point: str) -> int:
        """Return how many microbatches the replicas before this one have together; all replicas call it."""
        (counts,) = self._voters.gather((microbatches,), self._voters.wait_at(sync_point))
        return sum(counts[: self.number])

    def vote(self, key: int | None, batch_digest: int, update_claims: Mapping[str, str]) -> None:
        """Wait until all replicas are done with the step, and compare their arguments.

        Raises:
            ValueError: the replicas have different counts of rows, keys, or numbers for their update.
        """
        # Votes are int64: a larger key votes by its hash.
        key_number = _NO_KEY_NUMBER if key is None else key if abs(key) < _LARGE_KEY else hash(key)
        claims = self._exchanges.batch_rows, key_number, batch_digest
        row_counts, keys, batch_digests = self._voters.vote(claims, update_claims)
        if len({*row_counts}) > 1:
            raise ValueError(
                f"the batches of the replicas have {', '.join(map(str, row_counts))} rows; their losses are means, so "
                'all have equally many. DistributedSampler pads; reduction="count" takes any.'
            )
        if len({*keys}) > 1:
            key_list = ", ".join("None" if key == _NO_KEY_NUMBER else str(key) for key in keys)
            raise ValueError(f"the replicas have keys {key_list} in this step; all need one key.")
        self._warn_of_equal_batches(batch_digests)

    def _warn_of_equal_batches(self, batch_digests: Sequence[int]) -> None:
        """Warn once that replicas were handed the same rows."""
        # A digest of 0 stands for a batch that was not compared.
        repeats = [n for n, digest in enumerate(batch_digests) if digest and batch_digests.index(digest) < n]
        replica = next(iter(repeats), None)
        if replica is not None and not self._has_warned:
            self._has_warned = True
            first_replica = batch_digests.index(batch_digests[replica])
            warn(
                f"replica {first_replica} and replica {replica} were handed the same rows: their sum says "
                "no more than one of them. DistributedSampler(dataset, replicas, replica) gives each its own.",
                stacklevel=8,
            )


def with_reduced_last(program: Program) -> Program:
    """Move ops that read a sum over replicas as late as they may be, so that nothing else waits for it.

    They go to the end, or before the first op of the next training step that needs them.
    """
    # ADDs of scattered sums stand before the next SCATTER of their stage and rank instead, so that no more than two of
    # these sums are in memory. `late_non_adds` are values of the other late ops, which an ADD may not overtake.
    late_values, late_non_adds = set[Value](), set[Value]()
    late_ops, ops_in_place = list[Op](), list[Op]()
    late_adds_by_place: dict[tuple[int | None, int], list[Op]] = {}
    for op in program.ops:
        starts_sum, stage_and_rank = op.kind in ("REDUCE", "SCATTER"), (op.stage, op.rank)
        if not late_values.isdisjoint(op.reads) and kind_of(op.kind).time:
            ops_in_place += [*chain.from_iterable(late_adds_by_place.values()), *late_ops]
            late_values, late_non_adds, late_ops, late_adds_by_place = set(), set(), [], {}
        reads_late_value = not late_values.isdisjoint(op.reads)
        late_values.update(op.writes if reads_late_value or starts_sum else ())
        if op.kind == "SCATTER":
            ops_in_place += late_adds_by_place.pop(stage_and_rank, ())
        if reads_late_value and op.kind == "ADD" and op.microbatch is not None and late_non_adds.isdisjoint(op.reads):
            late_adds_by_place.setdefault(stage_and_rank, []).append(op)
        elif reads_late_value:
            late_non_adds.update(op.writes)
            late_ops.append(op)
        else:
            ops_in_place.append(op)
    ops = (*ops_in_place, *chain.from_iterable(late_adds_by_place.values()), *late_ops)
    return Program.trusted(program.inputs, ops, program.outputs)


# Find in a mesh the processes that run the ranks of a program, and those that run its replicas.
#
# mesh 2 x 2 of ("dp", "pp")                    --> process 3 -->    ranks: processes 2, 3; the other replica's: 1
# mesh 2 x 2 x 1 of ("replicate", "shard", "pp")    --> process 3 -->    shards with process 2, adds up across with 1


def group_of(program: Program, mesh: DeviceMesh | None) -> ProcessGroup:
    """Return the group of processes that run the ranks of a program; warn of replicas that the program lacks."""
    axes = replica_axes(program)
    if isinstance(mesh, DeviceMesh | None) and not dist.is_initialized():  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError("runtime='distributed' is for processes that torch.distributed.init_process_group has joined.")
    names = mesh_dim_names(mesh, dict.fromkeys(axes, "replicas") | {"pp": program.ranks})
    if mesh is None:
        return world_group()
    for name in names:
        if name.startswith("dp") and name not in axes and mesh.size(names.index(name)) > 1:
            warn(
                f"dimension {name!r} of the mesh has {mesh.size(names.index(name))} processes, and the program no "
                f"replicas along it: each trains apart. Put fpipe.data_parallel({name!r}) behind fpipe.merge(), unless "
                "you add up the gradients yourself.",
                stacklevel=4,
            )
    return mesh.get_group("pp")


def refuse_wrong_size(group: ProcessGroup, program: Program, mesh: DeviceMesh | None) -> None:
    """Raise ValueError unless there is a process for each rank."""
    if group.size() != program.ranks:
        group_name = "the process group" if mesh is None else "dimension 'pp' of the mesh"
        ranks, processes = f"{program.ranks} rank{'s' * (program.ranks > 1)}", f"{group.size()} process"
        raise ValueError(
            f"the program has {ranks} and {group_name} {processes}{'es' * (group.size() > 1)}: start as many "
            "processes, or pass mesh=."
        )


def replicas_of(
    program: Program, mesh: DeviceMesh | None, ranks: ProcessGroup, device: torch.device, watchdog: Watchdog
) -> Replicas | None:
    """Return the replicas of this rank, along one or two dimensions of the mesh; None if the program has none."""
    axes = replica_axes(program)
    if not axes:
        return None
    assert mesh is not None
    names = mesh.mesh_dim_names or ()
    dims = [name for name in names if name in (*axes, "pp")]
    coordinate = zip(names, mesh.get_coordinate() or (), strict=True)
    submesh = mesh.mesh[tuple(slice(None) if name in dims else index for name, index in coordinate)]
    # One row for each replica, with its processes by rank. Sorted, as a process group sorts its ranks.
    dims_in_order = [dims.index(name) for name in (*axes, "pp")]
    processes_by_replica = sorted(submesh.permute(dims_in_order).reshape(-1, ranks.size()).tolist())
    groups = {axis: mesh.get_group(axis) for axis in axes}
    inner_group = groups[axes[-1]]
    same_rank = [processes[ranks.rank()] for processes in processes_by_replica]
    group = inner_group if len(axes) == 1 else _group_of_replicas(same_rank, inner_group)
    replica_numbers = range(len(processes_by_replica))
    names = [f"replica {replica}: rank {rank}" for replica in replica_numbers for rank in range(ranks.size())]
    all_processes = [process for replica in processes_by_replica for process in replica]
    meeting = Meeting(watchdog, all_processes, names)
    watchdog.faults.names.update(zip(all_processes, names, strict=True))
    share = Share(inner_group.rank(), inner_group.size(), axes[-1])
    vote_device = device if is_on_streams(group, device) else torch.device("cpu")
    return Replicas(group, groups, share, ranks.rank(), watchdog, meeting, vote_device)


def _group_of_replicas(processes: Sequence[int], inner_group: ProcessGroup) -> ProcessGroup:
    """Return the group in which replicas along two axes vote, created once for each inner group."""
    groups = _GROUPS_BY_INNER.setdefault(inner_group, {})
    key = tuple(processes)
    if key not in groups:
        options: Any = {"timeout": timeout_of(inner_group), "backend": dist.get_backend(inner_group)}
        groups[key] = dist.new_group([*processes], use_local_synchronization=True, **options)
    return groups[key]


_GROUPS_BY_INNER: WeakKeyDictionary[ProcessGroup, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
