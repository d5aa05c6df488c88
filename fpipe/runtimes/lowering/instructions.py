"""Run the instructions for which no graph of a stage is compiled: lists of leaves in, lists of leaves out.

    SPLIT  views of the batch      ADD  leaf by leaf      RECV  the leaves themselves      MERGE  as the walk does

An instruction empties the lists it is handed, so that each tensor is gone after its last read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact, Stream, aval
from fpipe.graphs.purity.ambient import Casts, casting
from fpipe.graphs.tracing.keys import fold_in, generator_on, seeder
from fpipe.program import Op
from fpipe.runtimes.definition.by_autograd import StepContext, detached
from fpipe.runtimes.definition.meaning import RULES, summed
from fpipe.runtimes.lowering.abstract_eval import is_list
from fpipe.runtimes.lowering.abstract_tree import OPAQUE, AbstractTree, whole

Leaves = list[Any]


class UnexpectedValue(Exception):
    """A stage under autograd wrote tensors of other shapes, dtypes or strides than those it was seen to write."""


def slicing(plan: Sequence[tuple[int, list[Any]]]) -> Callable[..., Sequence[Leaves]]:
    """Function of a SPLIT that takes plain slices of the batch."""
    parts = [_part(at, leaves) for at, leaves in plan]
    return lambda *lists: [part(lists) for part in parts]


def _part(at: int, parts: Sequence[Any]) -> Callable[[Sequence[Leaves]], Leaves]:
    if at < 0:
        return lambda lists: [*parts]
    if len(parts) == 1 and parts[0] is not None:
        dim, start, length = parts[0]
        return lambda lists: [lists[at][0].narrow(dim, start, length)]
    return lambda lists: [x if p is None else x.narrow(*p) for x, p in zip(lists[at], parts, strict=True)]


def with_generators(
    run: Callable[..., Any], at: int, streams: Sequence[Stream], place: tuple[int, int, int | None]
) -> Callable[..., Any]:
    """A forward that draws: the key that it finds in place `at` gives way to generators seeded for its stage and
    microbatch (and slice)."""
    seed_from = seeder(*place)
    own, *others = streams

    def forward(*lists: Any) -> Any:
        given = [*lists]
        seed = seed_from(given[at])
        # A comprehension of one takes 0.3 us more.
        given[at] = [_seeded(seed, own)] if not others else [_seeded(seed, stream) for stream in streams]
        return run(*given)

    return forward


def _seeded(seed: int, stream: Stream) -> torch.Generator:
    device, number, path = stream
    return generator_on(device, number).manual_seed(fold_in(seed, *path) if path else seed)


def pass_on(*lists: Leaves) -> Sequence[Leaves]:
    """SEND within one process: the leaves in new lists."""
    made = [leaves[:] for leaves in lists]
    for leaves in lists:
        leaves.clear()
    return made


def arrive(*lists: Leaves) -> Sequence[Leaves]:
    """RECV within one process: the lists, which only it reads."""
    return lists


def rounded(arrive: Callable[[Any], Any], *lists: Leaves) -> Sequence[Leaves]:
    """Transfer that casts on the wire."""
    made = [[*map(arrive, leaves)] for leaves in lists]
    _empty(lists)
    return made


def add(*lists: Leaves) -> Sequence[Leaves]:
    """ADD into new memory."""
    total = summed(lists)
    _empty(lists)
    return [total]


def add_to(total: Leaves, more: Leaves) -> Sequence[Leaves]:
    """ADD into the memory of the total."""
    made = [a if a is None else a.add_(b) for a, b in zip(total, more, strict=True)]
    _empty((total, more))
    return [made]


def dropping(run: Callable[..., Any], count: int, over: Sequence[int]) -> Callable[..., Any]:
    """Drop received parameters after their last read: the lists in these places, of which `run` reads so many."""

    def last(*lists: Leaves) -> Any:
        made = run(*lists[:count])
        _empty([lists[k] for k in over])
        return made

    return last


def container(abstract: AbstractTree) -> Callable[[Leaves], Any]:
    """Function that puts the leaves of a value into its containers."""
    if abstract.spec is None:
        return list
    return itemgetter(0) if abstract.spec.is_leaf() else partial(tree.unflatten, abstract.spec)


def by_rule(
    op: Op, containers: Sequence[Callable[[Leaves], Any]], context: StepContext, casts: Casts, *lists: Leaves
) -> Sequence[Leaves]:
    """Run the walk's rule: a graph holds its casts, a rule casts as the step does that it was lowered for."""
    with casting(casts) if casts else nullcontext():
        made = RULES[op.kind](op, [whole(leaves) for whole, leaves in zip(containers, lists, strict=True)], context)
    _empty(lists)
    if len(made) != len(op.writes):
        raise ValueError(f"{op.cell} writes {len(op.writes)} values, and its rule gave {len(made)}.")
    return [list(value) if is_list(op, value) else tree.leaves(value) for value in made]


def under_autograd(
    op: Op, reads: Sequence[AbstractTree], writes: Sequence[AbstractTree], context: StepContext, *lists: Any
) -> Sequence[Leaves]:
    """Run a stage that is not traced; others rely on what it was seen to write. A forward is told the key."""
    if op.kind in "FR":
        lists, context = lists[:-1], replace(context, key=lists[-1])
    wanting = [[*map(_wanting, abstract.leaves, leaves)] for abstract, leaves in zip(reads, lists, strict=True)]
    wholes = RULES[op.kind](
        op, [whole(abstract, leaves) for abstract, leaves in zip(reads, wanting, strict=True)], context
    )
    _empty(lists)
    for value, abstract, each in zip(op.writes, writes, wholes, strict=True):
        if value.name in ("y", "again", "state", "carry") and tree.flatten(each)[1] != abstract.spec:
            raise UnexpectedValue(f"{op.cell} wrote {value} in other containers than before")
    opaque = [abstract is OPAQUE for abstract in writes]  # one object, a list of gradients as it may be
    made = [
        [each] if one else list(each) if is_list(op, each) else tree.leaves(each)
        for one, each in zip(opaque, wholes, strict=True)
    ]
    for one, value, abstract, leaves in zip(opaque, op.writes, writes, made, strict=True):
        if not one and [*map(_aval, abstract.leaves)] != [*map(_seen, leaves)]:
            now, before = (", ".join(map(_shown, found)) for found in (leaves, abstract.leaves))
            raise UnexpectedValue(f"{op.cell} wrote {value} as {now or 'nothing'}, and before as {before or 'nothing'}")
    return made


def _wanting(known: Any, leaf: Any) -> Any:
    """A leaf that asks for its gradient, as what it was computed from does."""
    return leaf.detach().requires_grad_() if isinstance(known, Fact) and known.aval.wants else leaf


def _aval(known: Any) -> Any:
    return known.aval if isinstance(known, Fact) else (type(known), repr(known))


def _seen(leaf: Any) -> Any:
    return aval(leaf) if isinstance(leaf, Tensor) else (type(leaf), repr(leaf))


def _shown(leaf: Any) -> str:
    known = aval(leaf) if isinstance(leaf, Tensor) else leaf.aval if isinstance(leaf, Fact) else None
    if known is None:
        return repr(leaf)
    return f"{known} with strides {[*known.stride]} on {known.device}{', which wants a gradient' * known.wants}"


def distinct(leaves: Leaves) -> Leaves:
    """Leaves as objects of their own: one object in all microbatches would be taken whole, not averaged."""
    return [*map(detached, leaves)]


def _empty(lists: Sequence[Leaves]) -> None:
    for leaves in lists:
        leaves.clear()
