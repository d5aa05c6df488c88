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
    """A leaf in a buffer: its place among its op's leaves, where it starts in the buffer, how many numbers the first
    replica has of it, which has the most, and its avals as this replica has it, and as all have it."""

    at: int
    start: int
    most: int
    own: Aval
    whole: Aval

    def of(self, number: int) -> tuple[int, int]:
        """The numbers of the whole that a replica has."""
        size = _count(self.whole)
        return min(self.most * number, size), min(self.most * (number + 1), size)


@dataclass(frozen=True)
class Buffer:
    """Leaves of one dtype and device, and how many numbers they take in it."""

    dtype: torch.dtype
    device: torch.device
    leaves: Sequence[PlacedLeaf]
    size: int

    def empty(self, *replicas: int) -> Tensor:
        """Memory for it, or for one of each replica."""
        return torch.empty((*replicas, self.size), dtype=self.dtype, device=self.device)


class SumPart(NamedTuple):
    """Sum of a buffer over all replicas, in place."""

    buffer: Buffer

    def post(self, group: ProcessGroup, read: Read) -> Launched:
        """Start an all_reduce."""
        sent = self.buffer.empty()
        made: dict[int, Tensor] = {}
        for at, start, most, own, _ in self.buffer.leaves:
            part = made[at] = sent[start : start + most].as_strided(own.shape, own.stride)
            part.copy_(read[at]) if isinstance(read[at], Tensor) else part.fill_(read[at])
        return Launched(dist.all_reduce(sent, group=group, async_op=True), sent, made)


class GatherPart(NamedTuple):
    """All replicas' parts of the leaves of a buffer, or of one large leaf, which needs none."""

    buffer: Buffer
    replicas: int
    alone: bool

    def post(self, group: ProcessGroup, read: Read) -> Launched:
        """Start an all_gather."""
        buffer, leaves = self.buffer, self.buffer.leaves
        made = {leaf.at: torch.empty(leaf.whole.shape, dtype=buffer.dtype, device=buffer.device) for leaf in leaves}
        if self.alone:
            (leaf,) = leaves
            sent = read[leaf.at].to(buffer.dtype).contiguous()
            return Launched(_gathered(made[leaf.at], sent, group), sent, made)
        sent, found = buffer.empty(), buffer.empty(self.replicas)
        for at, start, _, own, _ in leaves:
            sent[start : start + _count(own)].view(own.shape).copy_(read[at])

        def take_apart() -> None:
            for leaf in leaves:
                whole = made[leaf.at].view(-1)
                for number in range(self.replicas):
                    low, high = leaf.of(number)
                    whole[low:high] = found[number, leaf.start : leaf.start + high - low]

        return Launched(_gathered(found, sent, group), sent, made, take_apart)


class ScatterPart(NamedTuple):
    """This replica's part of the sum of the leaves of a buffer, or of one large leaf, which needs none."""

    buffer: Buffer
    replicas: int
    alone: bool

    def post(self, group: ProcessGroup, read: Read) -> Launched:
        """Start a reduce_scatter."""
        buffer, leaves = self.buffer, self.buffer.leaves
        if self.alone:
            (leaf,) = leaves
            one = torch.empty(leaf.own.shape, dtype=buffer.dtype, device=buffer.device)
            sent = read[leaf.at].to(buffer.dtype).contiguous()
            work, add_up = _added(one, sent, group)
            return Launched(work, sent, {leaf.at: one}, add_up)
        sent, found = buffer.empty(self.replicas), buffer.empty()
        for leaf in leaves:
            whole = read[leaf.at].reshape(-1)
            for number in range(self.replicas):
                low, high = leaf.of(number)
                sent[number, leaf.start : leaf.start + high - low] = whole[low:high]
        made = {leaf.at: found[leaf.start : leaf.start + _count(leaf.own)].view(leaf.own.shape) for leaf in leaves}
        work, add_up = _added(found, sent, group)
        return Launched(work, sent, made, add_up)


CollectivePart = SumPart | GatherPart | ScatterPart
"""A part of a collective, which goes in one call: `post` starts it, a RuntimeError if a process is lost."""


def _gathered(whole: Tensor, own: Tensor, group: ProcessGroup) -> Any:
    """The parts of all processes, one behind the other, under way."""
    if not _goes_straight(group, own.device):
        return all_gather(whole.view(-1), own.view(-1), group)
    parts = whole.view(group.size(), *own.shape)
    parts[group.rank()] = own
    return _sent([own] * group.size(), [*parts], group)


def _goes_straight(group: ProcessGroup, device: torch.device) -> bool:
    """Whether parts are sent by themselves: gloo's messages, which it has on the host alone."""
    return device.type == "cpu" and backend_on(group, device).name() == "gloo"


def _sent(parts: Sequence[Tensor], found: Sequence[Tensor], group: ProcessGroup) -> Works:
    """Each part on the way to its process, and what the others send of theirs."""
    others = [at for at in range(group.size()) if at != group.rank()]
    works: list[Any] = [dist.isend(parts[at], group=group, group_dst=at, tag=_TAG) for at in others]
    return Works([*works, *(dist.irecv(found[at], group=group, group_src=at, tag=_TAG) for at in others)])


def _added(own: Tensor, sent: Tensor, group: ProcessGroup) -> tuple[Any, Callable[[], object] | None]:
    """This process's part of a sum, under way, and what to do when it is there. Gloo's reduce_scatter adds up the whole
    on all processes; here each part goes to its own, where the replicas' are added in their order."""
    if not _goes_straight(group, own.device):
        return reduce_scatter(own.view(-1), sent.view(-1), group), None
    parts = [*sent.view(group.size(), *own.shape)]
    found = [part if at == group.rank() else torch.empty_like(own) for at, part in enumerate(parts)]

    def add_up() -> None:
        first, *rest = found
        for part in rest:
            first = torch.add(first, part, out=own)
        if not rest:
            own.copy_(first)

    return _sent(parts, found, group), add_up


class Works(NamedTuple):
    """Transfers of gloo as one; whether one is over is known only once it was waited for."""

    each: Sequence[Any]

    def wait(self, timeout: timedelta) -> None:
        """Wait for all."""
        for one in self.each:
            one.wait(timeout)


def parts_of_op(
    op: Op, written: Sequence[Any], shared: Shared | None, replicas: int, wanted: Collection[int] | None = None
) -> list[CollectivePart]:
    """The parts of a REDUCE, GATHER or SCATTER over so many replicas; of a GATHER of the leaves that are `wanted`."""
    facts = [(at, leaf) for at, leaf in enumerate(written) if isinstance(leaf, Fact)]
    if op.kind == "REDUCE" or shared is None:
        return [SumPart(buffer) for buffer in _buffers(_own(at, leaf) for at, leaf in facts)]
    kind = GatherPart if op.kind == "GATHER" else ScatterPart
    numbers, large, small = list[PlacedLeaf](), list[PlacedLeaf](), list[PlacedLeaf]()
    for at, leaf in facts:
        own, whole = (side.leaves[at].aval._replace(dtype=leaf.aval.dtype) for side in shared)
        if not whole.shape:
            numbers.append(_own(at, leaf))
            continue
        rows = -(-whole.shape[0] // replicas)
        placed = PlacedLeaf(at, 0, rows * _count(whole._replace(shape=whole.shape[1:])), own, whole)
        worth = _LARGE if whole.device.type == "cpu" else _LARGE_ON_DEVICES
        even = rows * replicas == whole.shape[0] and _count(whole) * whole.dtype.itemsize >= worth
        if _count(whole) and (wanted is None or at in wanted):
            (large if even else small).append(placed)
    made: list[CollectivePart] = [kind(buffer, replicas, alone=True) for leaf in large for buffer in _buffers([leaf])]
    made += [kind(buffer, replicas, alone=False) for buffer in _buffers(small)]
    return made + [SumPart(buffer) for buffer in _buffers(numbers) if kind is ScatterPart]


def _own(at: int, leaf: Fact) -> PlacedLeaf:
    return PlacedLeaf(at, 0, _count(leaf.aval), leaf.aval, leaf.aval)


def _buffers(leaves: Iterable[PlacedLeaf]) -> list[Buffer]:
    """Leaves one behind the other, those of one dtype and device in one buffer, until it is large: that is the same on
    all replicas."""
    found: dict[tuple[torch.dtype, torch.device], list[tuple[list[PlacedLeaf], int]]] = {}
    for leaf in leaves:
        each, step = leaf.own.dtype.itemsize, max(1, _ALIGNED // leaf.own.dtype.itemsize)
        filled = found.setdefault((leaf.own.dtype, leaf.own.device), [([], 0)])
        if filled[-1][1] * each >= _LARGE_ON_DEVICES:
            filled.append(([], 0))
        placed, start = filled[-1]
        filled[-1] = [*placed, leaf._replace(start=start)], -(-(start + leaf.most) // step) * step
    return [Buffer(*like, placed, size) for like, filled in found.items() for placed, size in filled if size]


def _count(known: Aval) -> int:
    return torch.Size(known.shape).numel()


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
        """Wait for what nobody has read, with NCCL on the host too, and note when all was over; what is `posted` began
        when its rank was done with that."""
        self.wait_for_all()
        for name, (work, what) in self.last_by_group.items():
            self.watchdog.settle(work, self.wait_of(name, what))
        self.notes.add(posted)
