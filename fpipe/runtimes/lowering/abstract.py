"""What an op that runs by its rule will write, told on shapes alone: the rule itself, on tensors without data.

sum[0,1] = ADD g[0,0] g[0,1],   g[0,0]: float32[8, 8]        -->        sum[0,1]: float32[8, 8]
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.ambient import Untraceable
from fpipe.graphs.graph import Fact, apart, fact, storage_of
from fpipe.program import Op
from fpipe.runtimes.by_autograd import Run
from fpipe.runtimes.lowering.things import Thing, dense, whole
from fpipe.runtimes.meaning import RULES, rounding


def abstractly(op: Op, things: Sequence[Thing], run: Run, fake: Any) -> list[Thing]:
    """What an op writes that reads these things; `fake` is the mode in which tensors have no data."""
    how = {"ADD": _sum, "MERGE": _merged}.get(op.kind, by_rule)
    return how(op, things, run, fake)


def _sum(op: Op, things: Sequence[Thing], run: Run, fake: Any) -> list[Thing]:
    """Sums over leaves: as their first part where all parts are alike."""
    parts = [thing.leaves for thing in things]
    leaves: list[Any] = []
    for column in zip(*parts, strict=True):
        facts = [leaf for leaf in column if leaf is not None]
        alike = all(leaf.aval is facts[0].aval or leaf.aval == facts[0].aval for leaf in facts[1:])
        if not facts or len(facts) == 1:
            leaves.append(facts[0] if facts else None)
        elif alike and dense(facts[0]):
            leaves.append(apart(facts[0].aval))
        else:
            return by_rule(op, things, run, fake)
    return [Thing(tuple(leaves), things[0].spec)]


def _merged(op: Op, things: Sequence[Thing], run: Run, fake: Any) -> list[Thing]:
    """The loss of all is as that of each, where these are alike."""
    losses = [thing for value, thing in zip(op.reads, things, strict=True) if value.name == "loss"]
    alike = {(leaf.aval, thing.spec) for thing in losses for leaf in thing.leaves if isinstance(leaf, Fact)}
    itself = len(losses) == 1 and run.model.reduction == "sum"
    if len(alike) != 1 or itself or run.model.reduction == "count":
        return by_rule(op, things, run, fake)
    aval, spec = alike.pop()
    rest = [value for value in op.writes if value.name != "loss"]
    made = dict(zip(rest, by_rule(op._replace(writes=tuple(rest)), things, run, fake), strict=True))
    return [made[value] if value in made else Thing((apart(aval),), spec) for value in op.writes]


def by_rule(
    op: Op, things: Sequence[Thing], run: Run, fake: Any, shown: Callable[[list[Any]], list[Any]] = list
) -> list[Thing]:
    """What an op writes, by running its rule on tensors without data; `shown` says what the rule is handed of them."""
    homes: dict[int, int] = {}
    # Slices are views, and those of plain meta tensors are made in no time. They forget the device.
    device = "meta" if op.kind == "SPLIT" else None
    with fake if device is None else nullcontext():
        args = [whole(thing, [_fake(leaf, homes, device) for leaf in thing.leaves]) for thing in things]
        try:
            made = RULES[op.kind](op, shown(args), run)
        except Exception as error:
            raise Untraceable(f"{op.cell} cannot run on shapes alone ({type(error).__name__}: {error})") from error
    devices = {leaf.storage: leaf.aval.device for thing in things for leaf in thing.leaves if isinstance(leaf, Fact)}
    found: list[Thing] = []
    for result in made:
        leaves, spec = tree.flatten(result)
        facts = (fact(leaf, homes) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if device is not None:
            facts = (_on(leaf, devices) for leaf in facts)
        found.append(Thing(tuple(facts), None if is_list(op, result) else spec))
    return found


def rounded(op: Op, thing: Thing, fake: Any) -> Thing:
    """What a SEND casts, as it arrives: what has its dtype lies in memory of its own."""
    homes: dict[int, int] = {}
    with fake:
        leaves = [_fake(leaf, homes, None) for leaf in thing.leaves]
        made = map(rounding(op), leaves)
        each = zip(thing.leaves, leaves, made, strict=True)
        return Thing(tuple(old if one is same else fact(one, {}) for old, same, one in each), thing.spec)


def _on(leaf: Any, devices: Mapping[int, torch.device]) -> Any:
    """A fact with the device that its memory is on."""
    return leaf._replace(aval=leaf.aval._replace(device=devices[leaf.storage])) if isinstance(leaf, Fact) else leaf


def _fake(leaf: Any, homes: dict[int, int], device: str | None) -> Any:
    if not isinstance(leaf, Fact):
        return leaf
    known = leaf.aval
    made = torch.empty_strided(known.shape, known.stride, dtype=known.dtype, device=device or known.device)
    homes[storage_of(made)] = leaf.storage
    return made.requires_grad_(known.wants)


def is_list(op: Op, made: Any) -> bool:
    """Whether what a rule made is a list over leaves (gradients), and no container that happens to be a list."""
    return isinstance(made, list) and op.kind not in ("F", "R", "SPLIT", "MERGE", "U")
