"""Find the collectives of a net that can be stages of their own: over a dimension of a mesh, and then waited for.

linear, all_to_all_single, wait_tensor, linear        -->        {1: all_to_all over ep}
"""

from __future__ import annotations

from collections.abc import Sequence
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
        waits = behind.target is C10D.wait_tensor.default and behind.args[0] is node
        if waits and (word := _word(node)) and any(user.op != "output" for user in behind.users):
            group: Any = group_named(str(node.args[-1]))
            found[at] = Exchanged(word, axis_of(group), group.group_name, group.size(), group.rank())
    return found


def as_exchange(stage: Stage, function: Exchanged) -> Stage:
    """A stage that was cut out with nothing but a collective in it as `fpipe.exchange` makes one."""
    run: Any = stage.forward
    ((_, leaf),) = run.places
    words = (("exchange", function.kind), ("axis", function.axis))
    return Stage(replace(function, leaf=leaf), name=function.__name__, names=stage.names, exchange=words)


def _word(node: fx.Node) -> str | None:
    """The kind of collective that an operation is, if a stage can be it."""
    word, args = _KINDS.get(node.target), tuple[Any, ...](node.args)
    if word == "all_to_all":
        return word if len({*map(str, [*args[1], *args[2]])}) == 1 else None  # as many rows to each
    return None if word in ("reduce_scatter", "all_reduce") and args[1] != "sum" else word


_KINDS: dict[Any, str] = {
    C10D.all_to_all_single.default: "all_to_all",
    C10D_AUTOGRAD.all_to_all_single.default: "all_to_all",
    C10D.all_gather_into_tensor.default: "all_gather",
    C10D_AUTOGRAD.all_gather_into_tensor.default: "all_gather",
    C10D.reduce_scatter_tensor.default: "reduce_scatter",
    C10D_AUTOGRAD.reduce_scatter_tensor.default: "reduce_scatter",
    C10D.all_reduce.default: "all_reduce",
}
