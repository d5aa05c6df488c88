"""Find the buffers that the stages of a net write, and take the operations that only write them out of the forwards.

    y = f(x), u written by what no output reads    -->    F: y, seen = f(x), x        U: u' = update(u, seen)
    y = f(x, u), u written                         -->    F: y, u' = f(x, u)

What only updates read is in a graph of its own, so that forwards may come in any order. A norm that tracks statistics
is split for it: y = norm(x, w, b, mean, var) is y = norm(x, w, b) and norm(x, mean, var).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fpipe.meaning.purity.schema import mutated_by
from fpipe.models.cutting.cut_at_marks import Subgraph
from fpipe.models.cutting.marked_graph import MarkedGraph, draws_random
from fpipe.models.tracing.places import place_of

_BATCH_NORM: Any = torch.ops.aten.batch_norm.default
_INSTANCE_NORM: Any = torch.ops.aten.instance_norm.default


def split_norms(graph: fx.Graph) -> None:
    """Give each norm in training an operation of its own that writes its statistics, bit for bit as the norm does."""
    for norm in (n for op in (_BATCH_NORM, _INSTANCE_NORM) for n in graph.find_nodes(op="call_function", target=op)):
        x, weight, bias, mean, var, training, *rest = norm.args
        if training and mean is not None:
            with graph.inserting_after(norm):
                update = graph.call_function(norm.target, (x, None, None, mean, var, training, *rest))
            update.meta = dict(norm.meta)
            norm.args = (x, weight, bias, None, None, training, *rest)


def without_normalising(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of updates, whose batch norms write their statistics and normalise nothing from here on."""
    for update in module.graph.find_nodes(op="call_function", target=_BATCH_NORM):
        x, _, _, mean, var, _, momentum, *_ = update.args
        update.target, update.args = torch.batch_norm_update_stats, (x, mean, var, momentum)
    module.recompile()
    return module


@dataclass
class Written:
    """The buffers that one stage writes.

    Attributes:
        held: by placeholder the buffers that its forward reads and writes.
        apart: by placeholder those that only its update does.
        ops: the operations of its update.
        part: the update, if there is one.
    """

    held: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    apart: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    ops: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    part: Subgraph | None = None


def written_by(
    marked: MarkedGraph, names: Mapping[fx.Node, str], buffers: Collection[str], results: Sequence[fx.Node]
) -> list[Written]:
    """Find the buffers that each stage writes.

    Args:
        marked: the whole graph, whose norms are split.
        names: what is no parameter and no input, by placeholder, and `buffers`, which of these are buffers.
        results: what the net returns.

    Raises:
        ValueError: something is written that is no buffer, or two stages have to do with one.
    """
    behind = _behind(marked, results)
    found = [Written() for _ in range(marked.stages)]
    for node, mutator in marked.mutators.items():
        if node.op != "placeholder":
            continue
        if names.get(node) not in buffers:
            raise ValueError(
                f"the net writes {names.get(node, node.name)!r} in place ({mutator.target}), which is no "
                f"buffer of its own; a stage is a pure function. Work on a copy.{place_of(mutator)}"
            )
        touched = marked.computed_from([node])
        apart = {*touched, *names}  # what an update may write
        ordered = any(one in behind or draws_random(one) or not apart.issuperset(mutated_by(one)) for one in touched)
        near = [one for one in touched if not ordered or any(node in marked.viewed_by(x) for x in marked.reads(one))]
        homes = {marked.stage_of[one]: one for one in (*near, *node.users) if one in marked.stage_of}
        if len(homes) > 1:
            raise ValueError(
                f"buffer {names[node]!r} is written in a net that reads or writes it in stages {min(homes)} and "
                f"{max(homes)}; choose cuts= that keep it in one."
                f"{''.join(place_of(homes[stage]) for stage in (min(homes), max(homes)))}"
            )
        home = found[min(homes)]
        (home.held if ordered or node in behind else home.apart)[node] = names[node]
        home.ops |= touched
    for home in found:
        if home.held:
            home.held |= home.apart
            home.apart, home.ops = {}, {}
        elif home.apart:
            home.part = Subgraph(marked, home.ops, home.ops, names, {})
    return found


def _behind(marked: MarkedGraph, results: Sequence[fx.Node]) -> set[fx.Node]:
    """All that the results are computed from."""
    found: set[fx.Node] = set()
    todo = [*results]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += marked.reads(node)
    return found
