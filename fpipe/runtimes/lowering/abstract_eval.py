"""Find out on shapes alone what an op that runs by its rule will write: run the rule itself on fake tensors.

sum[0,1] = ADD g[0,0] g[0,1],   g[0,0]: float32[8, 8]        -->        sum[0,1]: float32[8, 8]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact, fact, in_own_storage
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.meaning import RULES, rounding
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.program import Op
from fpipe.runtimes.lowering.abstract_tree import AbstractTree, dense, whole
from fpipe.runtimes.lowering.in_place import places_by_leaf
from fpipe.torch_internals import storage_of


def abstract_eval(op: Op, trees: Sequence[AbstractTree], context: StepContext, fake: Any) -> list[AbstractTree]:
    """Abstract values that an op writes if it reads these; `fake` is the mode that makes fake tensors."""
    how = {"ADD": _sum, "MERGE": _merged, "UPDATE": _updated}.get(op.kind, by_rule)
    return how(op, trees, context, fake)


def _sum(op: Op, trees: Sequence[AbstractTree], context: StepContext, fake: Any) -> list[AbstractTree]:
    """Sums over leaves: as their first part where all parts are alike."""
    parts = [abstract.leaves for abstract in trees]
    leaves: list[Any] = []
    for column in zip(*parts, strict=True):
        facts = [leaf for leaf in column if leaf is not None]
        alike = all(leaf.aval is facts[0].aval or leaf.aval == facts[0].aval for leaf in facts[1:])
        if not facts or len(facts) == 1:
            leaves.append(facts[0] if facts else None)
        elif alike and dense(facts[0]):
            leaves.append(in_own_storage(facts[0].aval))
        else:
            return by_rule(op, trees, context, fake)
    return [AbstractTree(tuple(leaves), trees[0].spec)]


def _merged(op: Op, trees: Sequence[AbstractTree], context: StepContext, fake: Any) -> list[AbstractTree]:
    """The loss of all is as that of each, where these are alike."""
    losses = [abstract for value, abstract in zip(op.reads, trees, strict=True) if value.name == "loss"]
    alike = {(leaf.aval, abstract.spec) for abstract in losses for leaf in abstract.leaves if isinstance(leaf, Fact)}
    itself = len(losses) == 1 and context.model.reduction == "sum"
    if len(alike) != 1 or itself or context.model.reduction == "count":
        return by_rule(op, trees, context, fake)
    aval, spec = alike.pop()
    rest = [value for value in op.writes if value.name != "loss"]
    made = dict(zip(rest, by_rule(op._replace(writes=tuple(rest)), trees, context, fake), strict=True))
    return [made[value] if value in made else AbstractTree((in_own_storage(aval),), spec) for value in op.writes]


def _updated(op: Op, trees: Sequence[AbstractTree], context: StepContext, fake: Any) -> list[AbstractTree]:
    """The next parameters and state are as those before, in memory of their own; what has no gradient stays."""
    params, state, grads = trees[:3]
    now, after = [*params.leaves], [*state.leaves]
    each = zip(grads.leaves, places_by_leaf(params, state), strict=True)
    for at, (_, places) in ((at, one) for at, one in enumerate(each) if one[0] is not None):
        now[at] = _anew(now[at])
        for place in places:
            after[place] = _anew(after[place])
    return [AbstractTree(tuple(now), params.spec), AbstractTree(tuple(after), state.spec)]


def _anew(leaf: Any) -> Any:
    """A tensor like this one, in its own memory and densely laid out."""
    if not isinstance(leaf, Fact):
        return leaf
    like = torch.empty_like(torch.empty_strided(leaf.aval.shape, leaf.aval.stride, device="meta"))
    return in_own_storage(leaf.aval._replace(stride=like.stride()))


def by_rule(
    op: Op,
    trees: Sequence[AbstractTree],
    context: StepContext,
    fake: Any,
) -> list[AbstractTree]:
    """Run an op's rule on fake tensors."""
    homes: dict[int, int] = {}
    # Slices are views, and those of plain meta tensors are made in no time. They forget the device.
    device = "meta" if op.kind == "SPLIT" else None
    with fake if device is None else nullcontext():
        args = [whole(abstract, [_fake(leaf, homes, device) for leaf in abstract.leaves]) for abstract in trees]
        try:
            made = RULES[op.kind](op, args, context)
        except Exception as error:
            raise Untraceable(f"{op.cell} cannot run on shapes alone ({type(error).__name__}: {error})") from error
    devices = {
        leaf.storage: leaf.aval.device for abstract in trees for leaf in abstract.leaves if isinstance(leaf, Fact)
    }
    found: list[AbstractTree] = []
    for result in made:
        leaves, spec = tree.flatten(result)
        facts = (fact(leaf, homes) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        if device is not None:
            facts = (_on(leaf, devices) for leaf in facts)
        found.append(AbstractTree(tuple(facts), None if is_list(op, result) else spec))
    return found


def rounded(op: Op, abstract: AbstractTree, fake: Any) -> AbstractTree:
    """Abstract value after a SEND that casts: a leaf that was rounded lies in memory of its own."""
    homes: dict[int, int] = {}
    with fake:
        leaves = [_fake(leaf, homes, None) for leaf in abstract.leaves]
        made = map(rounding(op), leaves)
        each = zip(abstract.leaves, leaves, made, strict=True)
        return AbstractTree(tuple(old if one is same else fact(one, {}) for old, same, one in each), abstract.spec)


def _on(leaf: Any, devices: Mapping[int, torch.device]) -> Any:
    """A fact with the device that its memory is on."""
    return leaf._replace(aval=leaf.aval._replace(device=devices[leaf.storage])) if isinstance(leaf, Fact) else leaf


def _fake(leaf: Any, homes: dict[int, int], device: str | None) -> Any:
    if not isinstance(leaf, Fact):
        return leaf
    known = leaf.aval
    made = known.empty(device)
    homes[storage_of(made)] = leaf.storage
    return made.requires_grad_(known.wants)


def is_list(op: Op, made: Any) -> bool:
    """Whether what a rule made is a list over leaves (gradients), and no container that happens to be a list."""
    return isinstance(made, list) and op.kind not in _CONTAINERS


_CONTAINERS = frozenset(("F", "R", "SPLIT", "MERGE", "UPDATE"))
