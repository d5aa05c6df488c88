"""Divide a collective over replicas into parts: one for each large leaf, and buffers that small leaves share.

    GATHER params[0]: w [1024, 1024], b [1024]        -->        all_gather of w's rows into w,  of a buffer with b

A leaf whose rows cannot be divided equally among the replicas travels in a buffer, with padding.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from fpipe.graphs.language.graph import Aval, Fact
from fpipe.program import Op
from fpipe.runtimes.faults.watchdog import PeerWait, Watchdog
from fpipe.runtimes.lowering.lane import Lane, Launched
from fpipe.runtimes.lowering.shard_shapes import SharedValue
from fpipe.torch_private.processes import all_gather, backend_on, reduce_scatter

_ALIGNMENT = 64
# A leaf of this many bytes gets a collective of its own. On a GPU a copy into a buffer costs less than a launch.
_LARGE_BYTES, _LARGE_BYTES_ON_DEVICES = 2**18, 2**25

# The tag of messages that are parts of a collective: a receive of the caller's own, under tag 0, takes none of them.
_TAG = 1

ReadLeaves = Sequence[Any]
"""The leaves that an op reads."""


class PlacedLeaf(NamedTuple):
    """A leaf in a buffer.

    Attributes:
        leaf_index: its index among the leaves of its op.
        start: the position of its first element in the buffer.
        largest_count: the number of elements that the first replica has: none has more.
        local, whole_aval: the avals of this replica's shard, and of the whole leaf.
    """

    leaf_index: int
    start: int
    largest_count: int
    local: Aval
    whole_aval: Aval

    def range_of_replica(self, replica: int) -> tuple[int, int]:
        """Return the range of the whole leaf's elements that a replica has."""
        count = _element_count(self.whole_aval)
        return min(self.largest_count * replica, count), min(self.largest_count * (replica + 1), count)


@dataclass(frozen=True)
class Buffer:
    """Memory of `size` elements for leaves of one dtype and device."""

    dtype: torch.dtype
    device: torch.device
    leaves: Sequence[PlacedLeaf]
    size: int

    def empty(self, *replicas: int) -> Tensor:
        """Allocate the buffer, or with a count of replicas one row for each."""
        return torch.empty((*replicas, self.size), dtype=self.dtype, device=self.device)


class SumPart(NamedTuple):
    """A sum of a buffer over all replicas, in place."""

    buffer: Buffer

    def post(self, group: ProcessGroup, read_leaves: ReadLeaves) -> Launched:
        """Start an all_reduce."""
        send_buffer = self.buffer.empty()
        sums: dict[int, Tensor] = {}
        for index, start, count, local, _ in self.buffer.leaves:
            leaf = read_leaves[index]
            # The view has the strides of the leaf, so the sum that it becomes has them too.
            view = sums[index] = send_buffer[start : start + count].as_strided(local.shape, local.stride)
            view.copy_(leaf) if isinstance(leaf, Tensor) else view.fill_(leaf)
        return Launched(dist.all_reduce(send_buffer, group=group, async_op=True), send_buffer, sums)


class GatherPart(NamedTuple):
    """A gather of the leaves of a buffer from all replicas, or of one large leaf `alone`, without a buffer."""

    buffer: Buffer
    replicas: int
    alone: bool

    def post(self, group: ProcessGroup, read_leaves: ReadLeaves) -> Launched:
        """Start an all_gather."""
        buffer, leaves = self.buffer, self.buffer.leaves
        whole_by_index = {
            leaf.leaf_index: torch.empty(leaf.whole_aval.shape, dtype=buffer.dtype, device=buffer.device)
            for leaf in leaves
        }
        if self.alone:
            (leaf,) = leaves
            send_buffer = read_leaves[leaf.leaf_index].to(buffer.dtype).contiguous()
            work = _all_gather(whole_by_index[leaf.leaf_index], send_buffer, group)
            return Launched(work, send_buffer, whole_by_index)
        send_buffer, recv_buffer = buffer.empty(), buffer.empty(self.replicas)
        for index, start, _, local, _ in leaves:
            send_buffer[start : start + _element_count(local)].view(local.shape).copy_(read_leaves[index])

        # The received buffer has a row for each replica, and each row the shards of all leaves.
        def unpack() -> None:
            for leaf in leaves:
                whole_elements = whole_by_index[leaf.leaf_index].view(-1)
                for replica in range(self.replicas):
                    low, high = leaf.range_of_replica(replica)
                    whole_elements[low:high] = recv_buffer[replica, leaf.start : leaf.start + high - low]

        return Launched(_all_gather(recv_buffer, send_buffer, group), send_buffer, whole_by_index, unpack)


class ScatterPart(NamedTuple):
    """This replica's shard of a sum over replicas, of the leaves of a buffer or of one large leaf `alone`."""

    buffer: Buffer
    replicas: int
    alone: bool

    def post(self, group: ProcessGroup, read_leaves: ReadLeaves) -> Launched:
        """Start a reduce_scatter."""
        buffer, leaves = self.buffer, self.buffer.leaves
        if self.alone:
            (leaf,) = leaves
            shard = torch.empty(leaf.local.shape, dtype=buffer.dtype, device=buffer.device)
            send_buffer = read_leaves[leaf.leaf_index].to(buffer.dtype).contiguous()
            work, finish = _reduce_scatter(shard, send_buffer, group)
            return Launched(work, send_buffer, {leaf.leaf_index: shard}, finish)
        send_buffer, recv_buffer = buffer.empty(self.replicas), buffer.empty()
        # Row `replica` of the buffer has what that replica is to sum.
        for leaf in leaves:
            whole_elements = read_leaves[leaf.leaf_index].reshape(-1)
            for replica in range(self.replicas):
                low, high = leaf.range_of_replica(replica)
                send_buffer[replica, leaf.start : leaf.start + high - low] = whole_elements[low:high]
        shard_by_index = dict[int, Tensor]()
        for leaf in leaves:
            end = leaf.start + _element_count(leaf.local)
            shard_by_index[leaf.leaf_index] = recv_buffer[leaf.start : end].view(leaf.local.shape)
        work, finish = _reduce_scatter(recv_buffer, send_buffer, group)
        return Launched(work, send_buffer, shard_by_index, finish)


CollectivePart = SumPart | GatherPart | ScatterPart
"""One call of a backend: `post` starts it, or raises RuntimeError if a process is dead."""


def _all_gather(gathered: Tensor, own_part: Tensor, group: ProcessGroup) -> Any:
    if not _is_on_gloo(group, own_part.device):
        return all_gather(gathered.view(-1), own_part.view(-1), group)
    parts = gathered.view(group.size(), *own_part.shape)
    parts[group.rank()] = own_part
    return _exchange_parts([own_part] * group.size(), [*parts], group)


def _is_on_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Return whether parts travel as messages of gloo between two processes, which it has on the host alone."""
    return device.type == "cpu" and backend_on(group, device).name() == "gloo"


def _exchange_parts(parts: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup) -> CombinedWork:
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    works: list[Any] = [dist.isend(parts[peer], group=group, group_dst=peer, tag=_TAG) for peer in peers]
    works += [dist.irecv(received[peer], group=group, group_src=peer, tag=_TAG) for peer in peers]
    return CombinedWork(works)


def _reduce_scatter(own_sum: Tensor, addends: Tensor, group: ProcessGroup) -> tuple[Any, Callable[[], object] | None]:
    """Start this process's part of a sum, and return the work and a function that finishes it."""
    if not _is_on_gloo(group, own_sum.device):
        return reduce_scatter(own_sum.view(-1), addends.view(-1), group), None
    # Gloo's reduce_scatter adds up the whole on all processes. Instead, send each part to its process, which adds the
    # replicas' parts in ascending order.
    parts = [*addends.view(group.size(), *own_sum.shape)]
    replica_parts = [part if index == group.rank() else torch.empty_like(own_sum) for index, part in enumerate(parts)]

    def add_received() -> None:
        total, *later_parts = replica_parts
        for part in later_parts:
            total = torch.add(total, part, out=own_sum)
        if not later_parts:
            own_sum.copy_(total)

    return _exchange_parts(parts, replica_parts, group), add_received


class CombinedWork(NamedTuple):
    """Several transfers of gloo as one work. Gloo tells that a transfer is over only to a caller that waits for it."""

    works: Sequence[Any]

    def wait(self, timeout: timedelta) -> None:
        """Wait for all transfers."""
        for work in self.works:
            work.wait(timeout)


def parts_of_op(
    op: Op,
    written_leaves: Sequence[Any],
    shared: SharedValue | None,
    replicas: int,
    wanted_indices: Collection[int] | None = None,
) -> list[CollectivePart]:
    """Divide a REDUCE, GATHER or SCATTER into parts; a GATHER brings only the leaves at `wanted_indices`."""
    facts = [(index, leaf) for index, leaf in enumerate(written_leaves) if isinstance(leaf, Fact)]
    if op.kind == "REDUCE" or shared is None:
        return [SumPart(buffer) for buffer in _fill_buffers(_unsharded_leaf(index, leaf) for index, leaf in facts)]
    part_class = GatherPart if op.kind == "GATHER" else ScatterPart
    unsharded, large_leaves, small_leaves = list[PlacedLeaf](), list[PlacedLeaf](), list[PlacedLeaf]()
    for index, leaf in facts:
        local, whole_aval = (side.leaves[index].aval._replace(dtype=leaf.aval.dtype) for side in shared)
        # A number has no rows to divide: each replica has it whole, and a SCATTER sums it everywhere.
        if not whole_aval.shape:
            unsharded.append(_unsharded_leaf(index, leaf))
            continue
        rows_per_replica = -(-whole_aval.shape[0] // replicas)
        largest_count = rows_per_replica * _element_count(whole_aval._replace(shape=whole_aval.shape[1:]))
        placed_leaf = PlacedLeaf(index, 0, largest_count, local, whole_aval)
        large_bytes = _LARGE_BYTES if whole_aval.device.type == "cpu" else _LARGE_BYTES_ON_DEVICES
        is_large = _element_count(whole_aval) * whole_aval.dtype.itemsize >= large_bytes
        is_even_and_large = is_large and rows_per_replica * replicas == whole_aval.shape[0]
        if _element_count(whole_aval) and (wanted_indices is None or index in wanted_indices):
            (large_leaves if is_even_and_large else small_leaves).append(placed_leaf)
    parts: list[CollectivePart] = [
        part_class(buffer, replicas, alone=True) for leaf in large_leaves for buffer in _fill_buffers([leaf])
    ]
    parts += [part_class(buffer, replicas, alone=False) for buffer in _fill_buffers(small_leaves)]
    return parts + [SumPart(buffer) for buffer in _fill_buffers(unsharded) if part_class is ScatterPart]


def _unsharded_leaf(index: int, leaf: Fact) -> PlacedLeaf:
    return PlacedLeaf(index, 0, _element_count(leaf.aval), leaf.aval, leaf.aval)


def _fill_buffers(leaves: Iterable[PlacedLeaf]) -> list[Buffer]:
    """Pack the leaves of each dtype and device into buffers of limited size, equally on all replicas."""
    buffers_by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[list[PlacedLeaf], int]]] = {}
    for leaf in leaves:
        itemsize = leaf.local.dtype.itemsize
        alignment = max(1, _ALIGNMENT // itemsize)
        buffers = buffers_by_kind.setdefault((leaf.local.dtype, leaf.local.device), [([], 0)])
        if buffers[-1][1] * itemsize >= _LARGE_BYTES_ON_DEVICES:
            buffers.append(([], 0))
        leaves_in_buffer, start = buffers[-1]
        # Each leaf starts at an aligned element, as a tensor of its own would.
        end = -(-(start + leaf.largest_count) // alignment) * alignment
        buffers[-1] = [*leaves_in_buffer, leaf._replace(start=start)], end
    return [Buffer(*key, leaves, size) for key, buffers in buffers_by_kind.items() for leaves, size in buffers if size]


def _element_count(aval: Aval) -> int:
    return torch.Size(aval.shape).numel()


class CollectiveLane(Lane):
    """The lane of a rank's collectives, over groups by their names.

    It waits on the host or by streams, and its waits name the process that does not take part in a collective.
    """

    def __init__(self, watchdog: Watchdog, groups: Mapping[str, ProcessGroup], on_streams: bool) -> None:
        super().__init__(self.wait_on, on_streams)
        self.watchdog, self.on_streams = watchdog, on_streams
        self._groups, self._waits = groups, dict[tuple[str, str], PeerWait]()

    def wait_on(self, launched: Launched, label: str) -> None:
        """Wait for a collective; with NCCL only the current stream waits."""
        self.watchdog.wait_for(launched.work, self.wait_of(launched.group, label), self.on_streams)

    def wait_of(self, group_name: str, label: str) -> PeerWait:
        """Return the wait for the processes of a group to take part in the collective of this label."""
        wait = self._waits.get((group_name, label))
        if wait is None:
            group = self._groups[group_name]
            processes = tuple(dist.get_process_group_ranks(group))
            wait = self._waits[group_name, label] = PeerWait(processes, f"did not take part in {label}", group=group)
        return wait

    def end(self, launch_rows: Collection[int] = (), is_captured: bool = False) -> None:
        """Wait for all results that nobody has read, with NCCL on the host too, and note when all was over.

        Args:
            launch_rows: the instructions that launch collectives, which began when this rank came to them.
            is_captured: whether a graph captures the collectives: the host then waits for its replays.
        """
        self.wait_for_all()
        for group_name, (work, label) in self.last_by_group.items() if not is_captured else ():
            self.watchdog.wait_on_host(work, self.wait_of(group_name, label))
        self.notes.write_to_notes(launch_rows)
