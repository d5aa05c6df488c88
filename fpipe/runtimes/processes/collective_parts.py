"""Divide a collective over replicas into parts: each a large leaf by itself, or small ones in one buffer.

    GATHER params[0]: w [1024, 1024], b [1024]        -->        all_gather of w's rows into w,  of a buffer with b

Rows that replicas have not equally many of travel in the buffer, with padding.
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
from fpipe.runtimes.lowering.shards import Shared
from fpipe.torch_private.processes import all_gather, backend_on, reduce_scatter

_ALIGNED = 64
_LARGE, _LARGE_ON_DEVICES = 2**18, 2**25
"""Bytes of a leaf that is worth a collective of its own: on a GPU to copy costs less than to launch one."""

_TAG = 1
"""Of messages that are parts of a collective: a receive of the caller's own under tag 0 takes none."""

Read = Sequence[Any]
"""The leaves that an op reads."""


class PlacedLeaf(NamedTuple):
    """A leaf in a buffer.

    Attributes:
        place: its index among the leaves of its op.
        start: where it begins in the buffer.
        most: how many of its numbers the first replica has, which has the most.
        local, whole: its avals as this replica has it, and as all have it together.
    """

    place: int
    start: int
    most: int
    local: Aval
    whole: Aval

    def of(self, number: int) -> tuple[int, int]:
        """Return the range of the whole's numbers that a replica has."""
        size = _count(self.whole)
        return min(self.most * number, size), min(self.most * (number + 1), size)


@dataclass(frozen=True)
class Buffer:
    """Memory for leaves of one dtype and device, which take so many numbers in it."""

    dtype: torch.dtype
    device: torch.device
    leaves: Sequence[PlacedLeaf]
    size: int

    def empty(self, *replicas: int) -> Tensor:
        """Allocate it, or one for each replica."""
        return torch.empty((*replicas, self.size), dtype=self.dtype, device=self.device)


class SumPart(NamedTuple):
    """Sum of a buffer over all replicas, in place."""

    buffer: Buffer

    def post(self, group: ProcessGroup, read: Read) -> Launched:
        """Start an all_reduce."""
        sent = self.buffer.empty()
        sums: dict[int, Tensor] = {}
        for index, start, most, local, _ in self.buffer.leaves:
            part = sums[index] = sent[start : start + most].as_strided(local.shape, local.stride)
            part.copy_(read[index]) if isinstance(read[index], Tensor) else part.fill_(read[index])
        return Launched(dist.all_reduce(sent, group=group, async_op=True), sent, sums)


class GatherPart(NamedTuple):
    """Gather of the leaves of a buffer from all replicas, or of a large leaf `alone`, without a buffer."""

    buffer: Buffer
    replicas: int
    alone: bool

    def post(self, group: ProcessGroup, read: Read) -> Launched:
        """Start an all_gather."""
        buffer, leaves = self.buffer, self.buffer.leaves
        wholes = {
            leaf.place: torch.empty(leaf.whole.shape, dtype=buffer.dtype, device=buffer.device) for leaf in leaves
        }
        if self.alone:
            (leaf,) = leaves
            sent = read[leaf.place].to(buffer.dtype).contiguous()
            return Launched(_all_gather(wholes[leaf.place], sent, group), sent, wholes)
        sent, received = buffer.empty(), buffer.empty(self.replicas)
        for index, start, _, local, _ in leaves:
            sent[start : start + _count(local)].view(local.shape).copy_(read[index])

        def unpack() -> None:
            for leaf in leaves:
                whole = wholes[leaf.place].view(-1)
                for number in range(self.replicas):
                    low, high = leaf.of(number)
                    whole[low:high] = received[number, leaf.start : leaf.start + high - low]

        return Launched(_all_gather(received, sent, group), sent, wholes, unpack)


class ScatterPart(NamedTuple):
    """This replica's part of the sum of the leaves of a buffer, or of a large leaf `alone`, without a buffer."""

    buffer: Buffer
    replicas: int
    alone: bool

    def post(self, group: ProcessGroup, read: Read) -> Launched:
        """Start a reduce_scatter."""
        buffer, leaves = self.buffer, self.buffer.leaves
        if self.alone:
            (leaf,) = leaves
            shard = torch.empty(leaf.local.shape, dtype=buffer.dtype, device=buffer.device)
            sent = read[leaf.place].to(buffer.dtype).contiguous()
            work, add_up = _reduce_scatter(shard, sent, group)
            return Launched(work, sent, {leaf.place: shard}, add_up)
        sent, received = buffer.empty(self.replicas), buffer.empty()
        for leaf in leaves:
            whole = read[leaf.place].reshape(-1)
            for number in range(self.replicas):
                low, high = leaf.of(number)
                sent[number, leaf.start : leaf.start + high - low] = whole[low:high]
        shards = dict[int, Tensor]()
        for leaf in leaves:
            shards[leaf.place] = received[leaf.start : leaf.start + _count(leaf.local)].view(leaf.local.shape)
        work, add_up = _reduce_scatter(received, sent, group)
        return Launched(work, sent, shards, add_up)


CollectivePart = SumPart | GatherPart | ScatterPart
"""A part of a collective, which takes one call: `post` starts it, or raises RuntimeError if a process is dead."""


def _all_gather(whole: Tensor, local: Tensor, group: ProcessGroup) -> Any:
    """Start to gather the parts of all processes, one behind the other."""
    if not _is_on_gloo(group, local.device):
        return all_gather(whole.view(-1), local.view(-1), group)
    parts = whole.view(group.size(), *local.shape)
    parts[group.rank()] = local
    return _exchange([local] * group.size(), [*parts], group)


def _is_on_gloo(group: ProcessGroup, device: torch.device) -> bool:
    """Whether gloo carries parts, as messages between two processes: it has these on the host alone."""
    return device.type == "cpu" and backend_on(group, device).name() == "gloo"


def _exchange(parts: Sequence[Tensor], received: Sequence[Tensor], group: ProcessGroup) -> Works:
    """Send each part to its process, and receive the parts of all."""
    peers = [peer for peer in range(group.size()) if peer != group.rank()]
    works: list[Any] = [dist.isend(parts[peer], group=group, group_dst=peer, tag=_TAG) for peer in peers]
    return Works([*works, *(dist.irecv(received[peer], group=group, group_src=peer, tag=_TAG) for peer in peers)])


def _reduce_scatter(local: Tensor, sent: Tensor, group: ProcessGroup) -> tuple[Any, Callable[[], object] | None]:
    """Start this process's part of a sum, and return how to finish it once the work is over."""
    if not _is_on_gloo(group, local.device):
        return reduce_scatter(local.view(-1), sent.view(-1), group), None
    # Gloo's reduce_scatter adds up the whole on all processes. Here each part goes to its process, which adds the
    # replicas' in their order.
    parts = [*sent.view(group.size(), *local.shape)]
    received = [part if index == group.rank() else torch.empty_like(local) for index, part in enumerate(parts)]

    def add_up() -> None:
        first, *rest = received
        for part in rest:
            first = torch.add(first, part, out=local)
        if not rest:
            local.copy_(first)

    return _exchange(parts, received, group), add_up


class Works(NamedTuple):
    """Transfers of gloo as one work; whether one is over is known only once it was awaited."""

    works: Sequence[Any]

    def wait(self, timeout: timedelta) -> None:
        """Wait for all."""
        for work in self.works:
            work.wait(timeout)


def parts_of_op(
    op: Op, written: Sequence[Any], shared: Shared | None, replicas: int, wanted: Collection[int] | None = None
) -> list[CollectivePart]:
    """Divide a REDUCE, GATHER or SCATTER over so many replicas; a GATHER has only the leaves that are `wanted`."""
    facts = [(index, leaf) for index, leaf in enumerate(written) if isinstance(leaf, Fact)]
    if op.kind == "REDUCE" or shared is None:
        return [SumPart(buffer) for buffer in _buffers(_unshared(index, leaf) for index, leaf in facts)]
    kind = GatherPart if op.kind == "GATHER" else ScatterPart
    numbers, large, small = list[PlacedLeaf](), list[PlacedLeaf](), list[PlacedLeaf]()
    for index, leaf in facts:
        local, whole = (side.leaves[index].aval._replace(dtype=leaf.aval.dtype) for side in shared)
        if not whole.shape:
            numbers.append(_unshared(index, leaf))
            continue
        rows = -(-whole.shape[0] // replicas)
        placed = PlacedLeaf(index, 0, rows * _count(whole._replace(shape=whole.shape[1:])), local, whole)
        worth = _LARGE if whole.device.type == "cpu" else _LARGE_ON_DEVICES
        even = rows * replicas == whole.shape[0] and _count(whole) * whole.dtype.itemsize >= worth
        if _count(whole) and (wanted is None or index in wanted):
            (large if even else small).append(placed)
    parts: list[CollectivePart] = [kind(buffer, replicas, alone=True) for leaf in large for buffer in _buffers([leaf])]
    parts += [kind(buffer, replicas, alone=False) for buffer in _buffers(small)]
    return parts + [SumPart(buffer) for buffer in _buffers(numbers) if kind is ScatterPart]


def _unshared(index: int, leaf: Fact) -> PlacedLeaf:
    return PlacedLeaf(index, 0, _count(leaf.aval), leaf.aval, leaf.aval)


def _buffers(leaves: Iterable[PlacedLeaf]) -> list[Buffer]:
    """Place leaves of one dtype and device in one buffer, until it is large: alike on all replicas."""
    buffers_by_kind: dict[tuple[torch.dtype, torch.device], list[tuple[list[PlacedLeaf], int]]] = {}
    for leaf in leaves:
        itemsize = leaf.local.dtype.itemsize
        step = max(1, _ALIGNED // itemsize)
        buffers = buffers_by_kind.setdefault((leaf.local.dtype, leaf.local.device), [([], 0)])
        if buffers[-1][1] * itemsize >= _LARGE_ON_DEVICES:
            buffers.append(([], 0))
        placed, start = buffers[-1]
        buffers[-1] = [*placed, leaf._replace(start=start)], -(-(start + leaf.most) // step) * step
    return [
        Buffer(*kind, placed, size) for kind, buffers in buffers_by_kind.items() for placed, size in buffers if size
    ]


def _count(aval: Aval) -> int:
    return torch.Size(aval.shape).numel()


# Wait for collectives of a lane, on the host or by streams, and name the process that does not take part in one.
class CollectiveLane(Lane):
    """The collectives of a rank, over groups by their names."""

    def __init__(self, watchdog: Watchdog, groups: Mapping[str, ProcessGroup], on_streams: bool) -> None:
        super().__init__(self.wait_on, on_streams)
        self.watchdog, self.on_streams = watchdog, on_streams
        self._groups, self._waits = groups, dict[tuple[str, str], PeerWait]()

    def wait_on(self, launched: Launched, what: str) -> None:
        """Wait for a collective; with NCCL the current stream does."""
        self.watchdog.wait_for(launched.work, self.wait_of(launched.group, what), self.on_streams)

    def wait_of(self, name: str, what: str) -> PeerWait:
        """Return the wait for the processes of a group."""
        wait = self._waits.get((name, what))
        if wait is None:
            group = self._groups[name]
            processes = tuple(dist.get_process_group_ranks(group))
            wait = self._waits[name, what] = PeerWait(processes, f"did not take part in {what}", group=group)
        return wait

    def end(self, posted: Collection[int] = ()) -> None:
        """Wait for all results that nobody has read, with NCCL on the host too, and note when all was over.

        Collectives `posted` by this rank, at these places, began when its rank had come to them.
        """
        self.wait_for_all()
        for name, (work, what) in self.last_by_group.items():
            self.watchdog.settle(work, self.wait_of(name, what))
        self.notes.add(posted)
