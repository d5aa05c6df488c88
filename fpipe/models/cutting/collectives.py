"""Find the collectives of a net that can be stages of their own: over a dimension of a mesh, and then waited for.

linear, all_to_all_single, wait_tensor, linear        -->        {1: all_to_all over ep}
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

from torch import fx

from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.model import Stage
from fpipe.models.tracing.dtensor_ops import exchange_of
from fpipe.torch_private.dispatch import C10D, C10D_AUTOGRAD
from fpipe.torch_private.processes import axis_of, group_named


def collectives_of(nodes: Sequence[fx.Node]) -> dict[int, Exchanged]:
    """The places of collectives, each with its wait just behind it: an even all-to-all, a gather, sums; and of those of
    DTensors, which wait. One that the net ends with stays in its stage: the loss waits for it at once."""
    found: dict[int, Exchanged] = {}
    for at, (node, behind) in enumerate(pairwise(nodes)):
        if (by := exchange_of(node)) is not None:
            found[at] = by
            continue
        kind = _KINDS.get(node.target)
        if kind is None or behind.target is not C10D.wait_tensor.default or behind.args[0] is not node:
            continue
        word = kind(*node.args[1:-1])
        if word is not None and any(user.op != "output" for user in behind.users):
            group: Any = group_named(str(node.args[-1]))
            found[at] = Exchanged(word, axis_of(group), group.group_name, group.size(), group.rank())
    return found


def as_exchange(stage: Stage, function: Exchanged) -> Stage:
    """A stage that was cut out with nothing but a collective in it as `fpipe.exchange` makes one."""
    run: Any = stage.forward
    ((_, leaf),) = run.places
    words = (("exchange", function.kind), ("axis", function.axis))
    return Stage(replace(function, leaf=leaf), name=function.__name__, names=stage.names, exchange=words)


def _even(received: Sequence[Any], sent: Sequence[Any]) -> str | None:
    alike = len({*map(str, received), *map(str, sent)}) == 1
    return "all_to_all" if alike else None


def _gathered(*_: Any) -> str:
    return "all_gather"


def _scattered(by: str, *_: Any) -> str | None:
    return "reduce_scatter" if by == "sum" else None


def _added(by: str) -> str | None:
    return "all_reduce" if by == "sum" else None


_KINDS: dict[Any, Callable[..., str | None]] = {
    C10D.all_to_all_single.default: _even,
    C10D_AUTOGRAD.all_to_all_single.default: _even,
    C10D.all_gather_into_tensor.default: _gathered,
    C10D_AUTOGRAD.all_gather_into_tensor.default: _gathered,
    C10D.reduce_scatter_tensor.default: _scattered,
    C10D_AUTOGRAD.reduce_scatter_tensor.default: _scattered,
    C10D.all_reduce.default: _added,
}
