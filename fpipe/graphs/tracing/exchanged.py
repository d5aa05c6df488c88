"""A stage that is a collective over one dimension of a mesh: what it does to each tensor that flows, and its adjoint.

    all_to_all      rows for each process      -->  rows from each process        backward: the same way back
    all_gather      this process's rows        -->  the rows of all               backward: reduce_scatter
    reduce_scatter  rows for each process      -->  the sum of this one's rows    backward: all_gather
    all_reduce      a tensor                   -->  the sum of all                backward: all_reduce
    ring            a tensor                   -->  that of the process before    backward: to the process before

A dimension has one process until a mesh says otherwise, and a collective of one hands on what it is given.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fpipe import tree

_c10d: Any = torch.ops._c10d_functional
_ADJOINT = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather", "ring": "ring back"}
COLLECTIVES = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce", "ring")


@dataclass(frozen=True)
class Exchanged:
    """The stage function of a collective along an axis; over processes once it is bound to their group.

    Args:
        kind: one of `COLLECTIVES`.
        axis: the dimension of the mesh.
        group: the name of the group of processes along it; of one process, none.
        size, number: how many they are, and which of them this one is.
        leaf: the one that is exchanged of what it takes, and handed on alone; None for all.
    """

    kind: str
    axis: str
    group: str = ""
    size: int = 1
    number: int = 0
    leaf: int | None = None

    @property
    def __name__(self) -> str:
        return f"{self.kind} over {self.axis}"

    def __call__(self, params: Any, x: Any) -> Any:
        """Exchange what flows, leaf by leaf; what is no tensor is alike everywhere."""

        def exchanged(leaf: Any) -> Any:
            return _Collective.apply(leaf, self) if isinstance(leaf, Tensor) else leaf

        x = x if self.leaf is None else (tree.leaves(x)[self.leaf],)
        return x if self.size == 1 else tree.tree_map(exchanged, x)

    def over(self, group: str, size: int, number: int) -> Exchanged:
        """The function over a group of processes."""
        return Exchanged(self.kind, self.axis, group, size, number, self.leaf)


class _Collective(torch.autograd.Function):
    """A collective as one node of autograd's graph, whose backward is its adjoint."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, by: Exchanged) -> Tensor:
        ctx.by = by
        return _exchanged(by.kind, x, by)

    @staticmethod
    def backward(ctx: Any, *cotangents: Any) -> Any:
        by: Exchanged = ctx.by
        return _exchanged(_ADJOINT.get(by.kind, by.kind), cotangents[0], by), None


def _exchanged(kind: str, x: Tensor, by: Exchanged) -> Tensor:
    x = x.contiguous()
    if kind in ("all_to_all", "reduce_scatter"):
        rows, parts = (len(x) if x.ndim else 0), by.size
        if not rows or rows % parts:
            raise ValueError(
                f"{by.__name__} cuts dim 0 into {parts} parts, one for each process; found shape {tuple(x.shape)}."
            )
    if kind == "all_to_all":
        each = [len(x) // by.size] * by.size
        made = _c10d.all_to_all_single(x, each, each, by.group)
    elif kind == "all_gather":
        made = _c10d.all_gather_into_tensor(x, by.size, by.group)
    elif kind == "reduce_scatter":
        made = _c10d.reduce_scatter_tensor(x, "sum", by.size, by.group)
    elif kind == "all_reduce":
        made = _c10d.all_reduce(x, "sum", by.group)
    else:
        step = 1 if kind == "ring" else -1
        to, source = ((by.number + one) % by.size for one in (step, -step))
        sent, received = ([x.numel() if at == one else 0 for at in range(by.size)] for one in (to, source))
        made = _c10d.all_to_all_single(x.view(-1), received, sent, by.group).view(x.shape)
        return _c10d.wait_tensor(made)
    return _c10d.wait_tensor(made)
