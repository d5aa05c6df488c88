"""Find the buffers that each stage of a net writes: they are its module state.

u.add_(x); y = f(x, u)        -->        F: y, u' = f(x, u)
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from fpipe.meaning.purity.own_memory import mutated_by
from fpipe.models.cutting.marked_graph import MarkedGraph
from fpipe.models.tracing.places import place_of


def written_by(marked: MarkedGraph, names: Mapping[fx.Node, str], buffers: Collection[str]) -> list[dict[fx.Node, str]]:
    """Return the buffers that each stage writes, by placeholder.

    Args:
        marked: the whole graph.
        names: what is no parameter and no input, by placeholder, and `buffers`, which of these are buffers.

    Raises:
        ValueError: something is written that is no buffer, or two stages have to do with one.
    """
    found: list[dict[fx.Node, str]] = [{} for _ in range(marked.stages)]
    for node, mutator in marked.mutators.items():
        if node.op != "placeholder":
            continue
        if names.get(node) not in buffers:
            raise ValueError(
                f"the net writes {names.get(node, node.name)!r} in place ({mutator.target}), which is no "
                f"buffer of its own; a stage is a pure function. Work on a copy.{place_of(mutator)}"
            )
        viewing = (
            op for op in marked.computed_from([node]) if any(node in marked.viewed_by(x) for x in marked.reads(op))
        )
        homes = {marked.stage_of[op]: op for op in (*viewing, *node.users) if op in marked.stage_of}
        if len(homes) > 1:
            raise ValueError(
                f"buffer {names[node]!r} is written in a net that reads or writes it in stages {min(homes)} and "
                f"{max(homes)}; choose cuts= that keep it in one."
                f"{''.join(place_of(homes[stage]) for stage in (min(homes), max(homes)))}"
            )
        found[min(homes)][node] = names[node]
    return found


_NORMS: Any = (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default)
_TRAINING = 5  # the place of that argument


def is_read(buffers: Iterable[fx.Node]) -> bool:
    """Whether an output may be computed from buffers that are written: more reads them than what writes them."""
    return any(
        not (user.target in _NORMS and user.args[_TRAINING]) and (node not in mutated_by(user) or bool(user.users))
        for node in buffers
        for user in node.users
    )
