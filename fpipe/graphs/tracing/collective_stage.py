"""A stage that is a collective over one dimension of a mesh: what it does to each tensor that flows, and its adjoint.

    all_to_all      rows for each process      -->  rows from each process        backward: the same way back
    all_gather      this process's rows        -->  the rows of all               backward: reduce_scatter
    reduce_scatter  rows for each process      -->  the sum of this one's rows    backward: all_gather
    all_reduce      a tensor                   -->  the sum of all                backward: all_reduce
    ring            a tensor                   -->  that of the process before    backward: to the process before

Where all that follows is alike on the processes, as between layers of tensor parallelism, its gradient counts once:

    copy            a tensor alike on all      -->  the same tensor               backward: all_reduce
    reduce          a tensor                   -->  the sum of all                backward: as it is
    gather          this process's rows        -->  the rows of all               backward: this process's rows
    scatter         a tensor alike on all      -->  this process's rows           backward: all_gather

With sizes, an all-to-all brings each process as many rows as these say, and then the sizes travel before the rows. A
dimension has one process until a mesh says otherwise, and a collective of one hands on what it is given.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe import tree
from fpipe.torch_private.dispatch import C10D

_FORWARD = {"copy": "as it is", "reduce": "all_reduce", "gather": "all_gather", "scatter": "own rows"}
_BACKWARD = {
    "all_gather": "reduce_scatter",
    "reduce_scatter": "all_gather",
    "ring": "ring back",
    "copy": "all_reduce",
    "reduce": "as it is",
    "gather": "own rows",
    "scatter": "all_gather",
}
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "ring", *_FORWARD)


@dataclass(frozen=True)
class Exchanged:
    """The stage function of a collective along an axis; over processes once it is bound to their group.

    Args:
        kind: one of `COLLECTIVES`.
        axis: the dimension of the mesh.
        group: the name of the group of processes along it; of one process, none.
        size, number: how many they are, none in a run on zeros, and which of them this one is.
        leaf: the one that is exchanged of what it takes, and handed on alone; None for all.
        sizes: whether the last of what it takes says how many rows of the others go to each process.
        splits: how many rows come from each process, and go there, once that is known.
    """

    kind: str
    axis: str
    group: str = ""
    size: int = 1
    number: int = 0
    leaf: int | None = None
    sizes: bool = False
    splits: tuple[list[int], list[int]] | None = None

    @property
    def __name__(self) -> str:
        return f"{self.kind} over {self.axis}"

    def __call__(self, params: Any, x: Any) -> Any:
        """Exchange the tensors of x, leaf by leaf; other leaves are alike everywhere."""

        def exchanged(leaf: Any) -> Any:
            return _Collective.apply(leaf, self) if isinstance(leaf, Tensor) else leaf

        x = x if self.leaf is None else (tree.leaves(x)[self.leaf],)
        if self.sizes:
            return self._sized(x)
        return x if self.size == 1 else tree.tree_map(exchanged, x)

    def over(self, group: str, size: int, number: int) -> Exchanged:
        """Return the function over a group of processes."""
        return replace(self, group=group, size=size, number=number)

    def _sized(self, x: Any) -> tuple[Tensor, ...]:
        """Exchange the sizes, wait for them, and then start on the rows."""
        if not isinstance(x, tuple) or len(x) < 2 or not _are_whole(x[-1]):  # pyright: ignore[reportUnknownArgumentType]
            raise TypeError(f"{self.__name__} with sizes takes (rows, sizes), whole numbers last; found {_shown(x)}.")
        rows: Sequence[Tensor] = x[:-1]
        sent: Tensor = x[-1]
        if not self.size:  # zeros do not add up to rows
            return (*(_Collective.apply(tensor, self) for tensor in rows), sent)
        if not sent.ndim or len(sent) % self.size:
            raise ValueError(
                f"{self.__name__} takes equally many sizes for each process, {self.size} here; found shape "
                f"{tuple(sent.shape)}."
            )
        if (least := int(sent.min()) if sent.numel() else 0) < 0:
            raise ValueError(f"{self.__name__} is handed {least} rows for a process; sizes are whole numbers from 0.")
        total = int(sent.sum())
        for tensor in (tensor for tensor in rows if not tensor.ndim or len(tensor) != total):
            raise ValueError(
                f"{self.__name__} is handed sizes that add up to {total} rows, and a tensor of shape "
                f"{tuple(tensor.shape)}; dim 0 is the rows for each process, one behind the other."
            )
        if self.size == 1:
            return (*(_Collective.apply(tensor, self) for tensor in rows), sent)
        received = _CARRIERS.stack[-1].wait(_exchanged("all_to_all", sent, self))
        row_counts = (sizes.reshape(self.size, -1).sum(1).tolist() for sizes in (received, sent))
        exchange = replace(self, splits=tuple(row_counts))
        return (*(_Collective.apply(tensor, exchange) for tensor in rows), received)


class _Collective(torch.autograd.Function):
    """A collective as one node of autograd's graph, whose backward is its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Exchanged) -> Tensor:
        ctx.by = by
        return _exchanged(_FORWARD.get(by.kind, by.kind), x, by)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        by: Exchanged = ctx.by
        back = by if by.splits is None else replace(by, splits=by.splits[::-1])
        return _exchanged(_BACKWARD.get(by.kind, by.kind), cotangents[0], back), None


def _exchanged(kind: str, x: Tensor, by: Exchanged) -> Tensor:
    x, start = x.contiguous(), _CARRIERS.stack[-1].start
    if by.size < 2:
        return x.clone(memory_format=torch.contiguous_format)
    if by.splits is not None:
        return start(C10D.all_to_all_single, x, *by.splits, by.group)
    if kind == "as it is":
        return x
    if kind in ("all_to_all", "reduce_scatter", "own rows"):
        rows, parts = (len(x) if x.ndim else 0), by.size
        if not rows or rows % parts:
            raise ValueError(
                f"{by.__name__} cuts dim 0 into {parts} parts, one for each process; found shape {tuple(x.shape)}."
            )
    if kind == "own rows":
        return x.chunk(by.size)[by.number].clone()
    if kind == "all_to_all":
        counts = [len(x) // by.size] * by.size
        return start(C10D.all_to_all_single, x, counts, counts, by.group)
    if kind == "all_gather":
        return start(C10D.all_gather_into_tensor, x, by.size, by.group)
    if kind == "reduce_scatter":
        return start(C10D.reduce_scatter_tensor, x, "sum", by.size, by.group)
    if kind == "all_reduce":
        return start(C10D.all_reduce, x, "sum", by.group)
    step = 1 if kind == "ring" else -1
    target, source = (by.number + step) % by.size, (by.number - step) % by.size
    sent, received = ([x.numel() if at == peer else 0 for at in range(by.size)] for peer in (target, source))
    return start(C10D.all_to_all_single, x.view(-1), received, sent, by.group).view(x.shape)


class Carrier(NamedTuple):
    """How collectives run: `start(op, tensor, *how)` returns the tensor that one writes, and `wait` waits for it."""

    start: Callable[..., Tensor]
    wait: Callable[[Tensor], Tensor]


def _run_now(op: Any, x: Tensor, *how: Any) -> Tensor:
    return C10D.wait_tensor(op(x, *how))


def _same(tensor: Tensor) -> Tensor:
    return tensor


class _Carriers(threading.local):
    """The carriers that a thread is under, the innermost last."""

    def __init__(self) -> None:
        self.stack = [Carrier(_run_now, _same)]


_CARRIERS = _Carriers()


@contextmanager
def carried_by(carrier: Carrier) -> Generator[None]:
    """Run the collectives that this thread calls by a carrier.

    Autograd would run backwards on a device in another thread, which has no such carrier; so they stay in this one.
    """
    _CARRIERS.stack.append(carrier)
    try:
        with torch.autograd.set_multithreading_enabled(False):
            yield
    finally:
        _CARRIERS.stack.pop()


def _are_whole(sizes: Any) -> bool:
    whole = isinstance(sizes, Tensor) and not sizes.is_floating_point() and not sizes.is_complex()
    return whole and sizes.dtype != torch.bool


def _shown(x: Any) -> str:
    parts: Any = x if isinstance(x, tuple) else (x,)
    shown = (f"{part.dtype} {tuple(part.shape)}" if isinstance(part, Tensor) else repr(part) for part in parts)
    return f"({', '.join(shown)})"
