"""The operations of a graph that make DTensors of shards, lay them out otherwise and take their shards.

    redistribute        -->        take the shard, all_reduce, make a DTensor of it

Over one dimension of a mesh most redistributes are a collective, forward or backward, between steps that only move what
a process has; and so may from_local be, backward. Which one it is the placements say, the gradient's among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.torch_private.processes import axis_of

Step = Callable[[Any], Any]
_LIBRARY = torch.library.Library("fpipe", "FRAGMENT")
_LIBRARY.define("dtensor(Tensor x, str name) -> Tensor")
_STEPS: dict[str, Step] = {}


def _run(x: Tensor, name: str) -> Tensor:
    return _STEPS[name](x)


_LIBRARY.impl("dtensor", _run, "CompositeImplicitAutograd")
DTENSOR: Any = torch.ops.fpipe.dtensor.default
"""The operation that each is in a graph: what it does it finds by a name."""


def named(step: Step, name: str) -> str:
    """The name of what an operation does; equal names are equal steps, so that equal stages have equal graphs."""
    _STEPS.setdefault(name, step)
    return name


def forget(names: Iterable[str]) -> None:
    """Drop what some names stand for."""
    for name in names:
        del _STEPS[name]


def exchange_of(node: fx.Node) -> Exchanged | None:
    """The collective that an operation is, if it is one."""
    made: Any = getattr(_STEPS[str(node.args[1])], "func", None) if node.target is DTENSOR else None
    return made if isinstance(made, Exchanged) else None


class _FromLocal(torch.autograd.Function):
    """DTensor.from_local with `grad_placements`, which torch 2.11 has not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Any, placements: Any, grads: Any) -> Any:
        from torch.distributed.tensor import DTensor

        ctx.grads = grads
        return DTensor.from_local(x, mesh, placements)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].redistribute(placements=ctx.grads).to_local(), None, None, None


def _made(x: Tensor, mesh: Any, placements: Any, grads: Any, dim: int = 0, parts: int = 1) -> Any:
    """A DTensor of a shard; of parts that come along dim 0 those of `dim`."""
    return _FromLocal.apply(torch.cat(x.chunk(parts), dim) if dim else x, mesh, placements, grads)


def _taken(x: Any, grads: Any, dim: int = 0, parts: int = 1) -> Tensor:
    """The shard of a DTensor; the parts of `dim` go along dim 0."""
    local = x.to_local(grad_placements=grads)
    return torch.cat(local.chunk(parts, dim)) if dim else local


def _redistributed(x: Any, mesh: Any, placements: Any) -> Any:
    return x.redistribute(mesh, placements)


@dataclass
class DTensorCall:
    """A call of from_local, redistribute or to_local in a net.

    Args:
        mesh: of the DTensor, and `source` and `target`, its placements before and after; none of a plain tensor.
        given: the placements of the gradient that the net asks for.
        even: whether all processes have equally much of it.
        grads: the placements with which the gradient of a DTensor comes, once that is known.
    """

    mesh: Any
    source: Any
    target: Any
    given: Any = None
    even: bool = True
    grads: Any = None

    def note(self, grad: Any) -> None:
        """Take the placements of a gradient that came."""
        self.grads = tuple(grad.placements)

    def steps(self, shape: list[Any]) -> list[tuple[str, list[Any]]]:
        """The names of the operations that it is, each with the shape of its result, in the end this one."""
        mesh, a, b = self.mesh, self.source or self.target, self.target
        if b is None:
            made: list[tuple[Step, list[Any]]] = [(partial(_taken, grads=self.given or _of_gradients(a)), shape)]
        elif kind := self._kind(a, b):
            group, size = mesh.get_group(), mesh.size()
            axis = mesh.mesh_dim_names[0] if mesh.mesh_dim_names else axis_of(group)
            by = Exchanged(kind, axis, group.group_name, size, group.rank())
            cut, joined = (one[0].dim if one[0].is_shard() else 0 for one in (b, a))
            grads = self.grads or _of_gradients(b)
            made = [
                (partial(_taken, grads=_of_gradients(a), dim=cut, parts=size), _stacked(size, a[0], shape, cut)),
                (partial(by, None), _stacked(size, b[0], shape, joined)),
                (partial(_made, mesh=mesh, placements=b, grads=grads, dim=joined, parts=size), shape),
            ][self.source is None :]
        elif self.source is None:
            made = [(partial(_made, mesh=mesh, placements=b, grads=self.given or _of_gradients(b)), shape)]
        else:
            made = [(partial(_redistributed, mesh=mesh, placements=b), shape)]
        groups = [one.group_name for one in mesh.get_all_groups()]
        return [(named(step, f"{step} over {groups}"), size) for step, size in made]

    def _kind(self, source: Any, target: Any) -> str | None:
        """Which collective it is, if it is one."""
        grads = self.grads or _of_gradients(target)
        if self.mesh.ndim > 1 or not self.even or self.given or (grads[0].is_shard() and grads != target):
            return None
        return _KINDS.get("".join(_letter(one) for (one,) in (source, target, grads)))


_KINDS = {
    "PRP": "all_reduce",
    "PRR": "reduce",
    "PSS": "reduce_scatter",
    "SRP": "all_gather",
    "SRR": "gather",
    "RSS": "scatter",
    "RRP": "copy",
}
"""By how it is placed before, behind, and its gradient there: parts of a sum (P), shards (S), whole everywhere (R)."""


def _letter(placement: Any) -> str:
    from torch.distributed.tensor import Partial

    if type(placement) is Partial and placement.reduce_op == "sum":
        return "P"
    return "R" if placement.is_replicate() else "S" if placement.is_shard() else "?"


def _of_gradients(placements: Any) -> Any:
    """Where torch places gradients for a tensor: as that, but for parts of a sum whole."""
    from torch.distributed.tensor import Replicate

    return tuple(Replicate() if one.is_partial() else one for one in placements)


def _stacked(parts: int, placement: Any, shape: list[Any], dim: int) -> list[Any]:
    """The shape of a shard, or of the whole, whose parts along a dimension go along dim 0."""
    made = [*shape]
    if placement.is_shard():
        made[placement.dim] //= parts
    if dim:
        made[0], made[dim] = made[0] * parts, made[dim] // parts
    return made
