"""Find the buffers that the stages of a net write, and take the operations that only write them out of the forwards.

    y = norm(x), mean written         -->        F: y, seen = norm(x), x        U: mean' = update(mean, seen)
    y = f(x, u), u written            -->        F: y, u' = f(x, u)             where an output reads what is written

What only updates read is in a graph of its own, so that forwards may come in any order.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from fpipe.graphs.purity.in_place import mutated_by
from fpipe.models.cutting.cut_at_marks import Subgraph
from fpipe.models.cutting.marked_graph import MarkedGraph, draws_random
from fpipe.models.tracing.places import place_of

_BATCH_NORM: Any = torch.ops.aten.batch_norm.default
_INSTANCE_NORM: Any = torch.ops.aten.instance_norm.default
_X, _MEAN, _VAR, _TRAINING, _MOMENTUM = 0, 3, 4, 5, 6
"""The places of the arguments of both."""


@dataclass
class Written:
    """The buffers that one stage writes.

    Attributes:
        held: by placeholder the buffers that its forward reads and writes.
        apart: by placeholder those that only its update does.
        ops: the operations of its update.
        norms: the norms in it whose statistics an update writes.
        part: the update, if there is one.
    """

    held: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    apart: dict[fx.Node, str] = field(default_factory=dict[fx.Node, str])
    ops: dict[fx.Node, None] = field(default_factory=dict[fx.Node, None])
    norms: list[fx.Node] = field(default_factory=list[fx.Node])
    part: Subgraph | None = None

    def seen(self) -> list[fx.Node]:
        """The values that its forward leaves for its update."""
        return [] if self.part is None else [*self.part.received]


Statistics = dict[fx.Node, list[fx.Node]]
"""By placeholder the running statistics that norms in training write, though no schema tells, and these norms."""


def statistics_of(graph: fx.Graph) -> Statistics:
    """The running statistics in a graph."""
    found: Statistics = {}
    for norm in (n for op in (_BATCH_NORM, _INSTANCE_NORM) for n in graph.find_nodes(op="call_function", target=op)):
        for statistic in norm.args[_MEAN : _VAR + 1] if norm.args[_TRAINING] else ():
            if isinstance(statistic, fx.Node):
                found.setdefault(statistic, []).append(norm)
    return found


def written_by(
    marked: MarkedGraph, names: Mapping[fx.Node, str], buffers: Collection[str], results: Sequence[fx.Node]
) -> list[Written]:
    """Find the buffers that each stage writes; norms whose statistics are written apart no longer read them.

    Args:
        marked: the whole graph.
        names: what is no parameter and no input, by placeholder.
        buffers: which of these are buffers.
        results: what the net returns.

    Raises:
        ValueError: something is written that is no buffer, or two stages have to do with one.
    """
    statistics = statistics_of(marked.graph)
    behind = _behind(marked, results, statistics)
    found = [Written() for _ in range(marked.stages)]
    for node in dict.fromkeys((*statistics, *marked.mutators)):
        if node.op != "placeholder":
            continue
        if names.get(node) not in buffers:
            raise ValueError(
                f"the net writes {names.get(node, node.name)!r} in place ({marked.mutators[node].target}), which is no "
                f"buffer of its own; a stage is a pure function. Work on a copy.{place_of(marked.mutators[node])}"
            )
        touched = _touched(marked, node, statistics)
        ordered = any(one in behind or draws_random(one) or _spills(one, touched, node) for one in touched)
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
        home.norms += [norm for norm in statistics.get(node, ()) if norm not in home.norms]
    for home in found:
        if home.held:
            home.held |= home.apart
            home.apart, home.ops, home.norms = {}, {}, []
        elif home.apart:
            _take_apart(marked, home, {**names, **home.apart})
    return found


def _take_apart(marked: MarkedGraph, home: Written, given: Mapping[fx.Node, str]) -> None:
    """Give norms an operation of their own that writes their statistics, and collect the update."""
    order = {node: at for at, node in enumerate(marked.graph.nodes)}
    home.norms.sort(key=order.__getitem__)
    for norm in home.norms:
        with marked.graph.inserting_after(norm):
            update = marked.graph.call_function(*_update_of(norm))
        update.meta = dict(norm.meta)
        marked.stage_of[update] = marked.stage_of[norm]
        home.ops[update] = None
        norm.args = (*norm.args[:_MEAN], None, None, *norm.args[_TRAINING:])
    own: Callable[[fx.Node], bool] = home.ops.__contains__
    home.part = Subgraph(marked, home.ops, own, given, {})


def _update_of(norm: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """The operation that writes the statistics of a norm, bit for bit as the norm does, and its arguments."""
    x, _, _, mean, var, training, momentum, *rest = norm.args
    if norm.target is _BATCH_NORM:
        return torch.batch_norm_update_stats, (x, mean, var, momentum)
    return norm.target, (x, None, None, mean, var, training, momentum, *rest)


def _touched(marked: MarkedGraph, buffer: fx.Node, statistics: Statistics) -> dict[fx.Node, None]:
    """The operations that read a buffer, or what is computed from it; the output of a norm in training does not read
    its statistics."""
    found: dict[fx.Node, None] = {buffer: None}
    for node in marked.stage_of:
        if any(one in found and node not in statistics.get(one, ()) for one in marked.reads(node)):
            found[node] = None
    del found[buffer]
    return found


def _spills(node: fx.Node, touched: Mapping[fx.Node, None], buffer: fx.Node) -> bool:
    """Whether an operation writes something else with what it reads of a buffer."""
    return any(one is not buffer and one not in touched for one in mutated_by(node))


def _behind(marked: MarkedGraph, results: Sequence[fx.Node], statistics: Statistics) -> set[fx.Node]:
    """All that the results are computed from."""
    found: set[fx.Node] = set()
    todo = [*results]
    while todo:
        node = todo.pop()
        if node not in found:
            found.add(node)
            todo += [one for one in marked.reads(node) if node not in statistics.get(one, ())]
    return found
