"""Run the instructions for which no graph of a stage is compiled: lists of leaves in, lists of leaves out.

    SPLIT  views of the batch      ADD  leaf by leaf      RECV  the leaves themselves      MERGE  as the walk does

An instruction empties the lists it is handed, so that each tensor is gone after its last read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.language.graph import Fact, aval
from fpipe.meaning.by_autograd import StepContext, detached, times
from fpipe.meaning.meaning import RULES, summed
from fpipe.meaning.purity.ambient import Casts, casting
from fpipe.meaning.purity.own_memory import is_strided
from fpipe.meaning.stages.keys import generator_on, seeder
from fpipe.model import Model
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_eval import is_list
from fpipe.runtimes.lowering.abstract_tree import OPAQUE, AbstractTree, aval_of, dense, whole
from fpipe.runtimes.lowering.dry_run import zeros
from fpipe.runtimes.lowering.stage_calls import WHOLE_BLOCKS, by_sizes, is_sized
from fpipe.torch_internals import each_times

Leaves = list[Any]


class UnexpectedValue(ValueError):
    """A stage under autograd wrote tensors of other shapes or dtypes than for zeros."""


def slices_of(op: Op, value: Value, trees: Mapping[Value, AbstractTree]) -> Any:
    """How a SPLIT gets one of its results, if by slicing: which list it reads, and for each leaf dim, start, length."""
    leaves = trees[value].leaves
    if not any(isinstance(leaf, Fact) for leaf in leaves):
        return (-1, list(leaves))
    at = next(k for k, read in enumerate(op.reads) if (read.name == "target") == (value.name == "t"))
    found: list[Any] = []
    for leaf, whole_leaf in zip(leaves, trees[op.reads[at]].leaves, strict=True):
        if not isinstance(leaf, Fact):
            found.append(None)
            continue
        (shape, stride, *_), (full, steps, *_) = leaf.aval, whole_leaf.aval
        dims = [dim for dim, sizes in enumerate(zip(shape, full, strict=False)) if sizes[0] != sizes[1]]
        if leaf.storage != whole_leaf.storage or stride != steps or len(dims) > 1 or (dims and not steps[dims[0]]):
            return None
        found.append((dims[0], leaf.offset // steps[dims[0]], shape[dims[0]]) if dims else None)
    return (at, found)


def slicing(places: Sequence[tuple[int, list[Any]]]) -> Callable[..., Sequence[Leaves]]:
    """Function of a SPLIT that takes plain slices of the batch."""
    parts = [_part(at, leaves) for at, leaves in places]
    return lambda *lists: [part(lists) for part in parts]


def _part(at: int, parts: Sequence[Any]) -> Callable[[Sequence[Leaves]], Leaves]:
    if at < 0:
        return lambda lists: [*parts]
    if len(parts) == 1 and parts[0] is not None:
        dim, start, length = parts[0]
        return lambda lists: [lists[at][0].narrow(dim, start, length)]
    return lambda lists: [x if p is None else x.narrow(*p) for x, p in zip(lists[at], parts, strict=True)]


def merging(op: Op, trees: Mapping[Value, AbstractTree], reduction: str) -> Callable[..., Sequence[Leaves]] | None:
    """Function of a MERGE of losses and outputs that are tensors each; None of others, which need their rule."""
    named: dict[str, list[int]] = {"loss": [], "y": [], "w": []}
    for at, value in enumerate(op.reads):
        named.setdefault(value.name, []).append(at)
    losses, outputs, weighed = named.values() if len(named) == 3 else ([], [], [])
    joined = [(trees[op.reads[at]], at in outputs) for at in (*losses, *outputs)]
    weights = [trees[op.reads[at]].leaves[0] for at in weighed] if reduction == "mean" else []
    known = all(isinstance(weight, float) for weight in weights)
    if op.how or not losses or not known or not all(_is_tensor(one, with_rows) for one, with_rows in joined):
        return None

    def merge(*lists: Leaves) -> Sequence[Leaves]:
        each = [lists[at][0] for at in losses]
        first, *more = each_times(each, weights) if weights else each
        made = [[torch.cat([lists[at][0] for at in outputs])] if joins else [sum(more, first)] for joins in wanted]
        _empty(lists)
        return made

    wanted = [value.name == "outputs" for value in op.writes]
    return merge


def _is_tensor(known: AbstractTree, with_rows: bool) -> bool:
    (leaf,) = known.leaves if len(known.leaves) == 1 else (None,)
    return (
        known.spec is not None and known.spec.is_leaf() and isinstance(leaf, Fact) and len(leaf.aval.shape) >= with_rows
    )


def with_generators(
    run: Callable[..., Any], at: int, devices: Sequence[str], place: tuple[int, int, int | None], step: int
) -> Callable[..., Any]:
    """A forward that draws: the key in place `at` gives way to generators seeded for its stage and microbatch."""
    seed_from = seeder(*place)
    own, *others = devices

    def forward(*lists: Any) -> Any:
        given = [*lists]
        key = given[at]
        seed = seed_from(key[step] if isinstance(key, tuple) else key)
        given[at] = [generator_on(own).manual_seed(seed)]
        if others:
            given[at] += [generator_on(device).manual_seed(seed) for device in others]
        return run(*given)

    return forward


def with_scale(run: Callable[..., Any], at: int, weight: torch.Tensor) -> Callable[..., Any]:
    """A backward of the loss: the loss scale that it finds in place `at` gives way to the cotangent of the loss."""

    def backward(*lists: Any) -> Any:
        given = [*lists]
        given[at] = [times(weight, given[at][0])]
        return run(*given)

    return backward


def pass_on(*lists: Leaves) -> Sequence[Leaves]:
    """SEND within one process: the leaves in new lists."""
    made = [leaves[:] for leaves in lists]
    _empty(lists)
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
    op: Op,
    reads: Sequence[AbstractTree],
    writes: Sequence[AbstractTree],
    free: Collection[Value],
    context: StepContext,
    casts: Casts,
    *lists: Any,
) -> Sequence[Leaves]:
    """Run a stage that is not traced; others rely on what it wrote for zeros, but for what is `free`."""
    if op.kind in "FRBI":
        lists, context = lists[:-1], replace(context, key=lists[-1])
    if op.kind == "F" and is_sized(context.model, op.stage):
        _check_as_agreed(op, reads, lists, context.model)
    wanting = [[*map(_wanting, abstract.leaves, leaves)] for abstract, leaves in zip(reads, lists, strict=True)]
    given = [whole(abstract, leaves) for abstract, leaves in zip(reads, wanting, strict=True)]
    with casting(casts) if casts else nullcontext():
        made = RULES[op.kind](op, given, context)
    _empty(lists)
    return [
        [each] if known is OPAQUE else _conformed(op, value, known, each, value in free, context.model)
        for value, known, each in zip(op.writes, writes, made, strict=True)
    ]


def _check_as_agreed(op: Op, reads: Sequence[AbstractTree], lists: Sequence[Leaves], model: Model) -> None:
    """An UnexpectedValue where an exchange is handed other rows than processes agreed on, however many there are."""
    by: Any = model.stages[op.stage or 0].forward
    if by.size < 2:
        return
    flowing = [at for at, value in enumerate(op.reads) if value.name != "params"]
    *told, sizes = (aval_of(leaf).shape for at in flowing for leaf in reads[at].leaves)
    *rows, length = (tuple(getattr(leaf, "shape", ())) for at in flowing for leaf in lists[at])
    if [one[1:] for one in rows] != [one[1:] for one in told] or length != sizes:
        found, known = (
            f"{' and '.join(f'rows of {[*one[1:]]}' for one in each)} with sizes {[*last]}"
            for each, last in ((rows, length), (told, sizes))
        )
        raise UnexpectedValue(
            f"{model.who(op.stage or 0)} is handed {found} in {op.cell}, and the processes along its axis agreed on "
            f"{known}, as a run on zeros has them; only how many rows there are may change."
        )


def _wanting(known: Any, leaf: Any) -> Any:
    """A leaf that asks for its gradient, as what it was computed from does."""
    return leaf.detach().requires_grad_() if isinstance(known, Fact) and known.aval.wants else leaf


def _conformed(op: Op, value: Value, known: AbstractTree, made: Any, free: bool, model: Model) -> Leaves:
    """The leaves of a value, in the strides that others know, and zeros for no gradient; `free` is any shape."""
    leaves, spec = ([*made], None) if known.spec is None else tree.flatten(made)
    if spec == known.spec and all(_alike(one, leaf, free) for one, leaf in zip(known.leaves, leaves, strict=True)):
        return leaves if free else [*map(_laid_out, known.leaves, leaves)]
    now, told = (", ".join(map(_shown, found)) or "nothing" for found in (leaves, known.leaves))
    if op.stage in by_sizes(model):
        raise UnexpectedValue(
            f"{model.who(op.stage or 0)} reads as many rows as the data say, and {op.cell} wrote {value} as {now}, and "
            f"for zeros as {told}; what goes to another rank, to a stage with a trace or is a result has one shape. "
            f"{WHOLE_BLOCKS}"
        )
    raise UnexpectedValue(
        f"{model.who(op.stage or 0)} runs without a trace, and {op.cell} wrote {value} as {now}, and for zeros as "
        f"{told}; what it hands on has one structure and shape, whatever the data: fill it up to a fixed size, with a "
        "mask beside, or place the stages that read it on this rank and let them run without a trace, too."
    )


def _alike(known: Any, leaf: Any, free: bool) -> bool:
    if not isinstance(known, Fact):
        return (type(known), repr(known)) == (type(leaf), repr(leaf))
    if not isinstance(leaf, Tensor) or not is_strided(leaf):
        return leaf is None and not known.aval.wants
    now = aval(leaf)
    now = now._replace(shape=known.aval.shape, stride=known.aval.stride) if free else now
    alike = now._replace(stride=known.aval.stride, wants=known.aval.wants) == known.aval
    return alike and (known.aval.wants or not now.wants) and (now.stride == known.aval.stride or dense(known))


def _laid_out(known: Any, leaf: Any) -> Any:
    if not isinstance(known, Fact) or (leaf is not None and leaf.stride() == known.aval.stride):
        return leaf
    made = zeros(known.aval._replace(wants=False))
    return made if leaf is None else made.copy_(leaf.detach())


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
