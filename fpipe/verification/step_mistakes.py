"""List what is often done wrong in a training step, each as another loop that makes the mistake.

the norm misses other ranks        -->        gradients of each stage are clipped by its own norm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.model import Model, TiedLeaf
from fpipe.optimizers.op_words import UpdateWords
from fpipe.optimizers.optimizer_state import initial_states
from fpipe.optimizers.rules import STEP
from fpipe.single_device.result import Result
from fpipe.single_device.training_loop import Norm, total_norm, training_loop
from fpipe.verification.gradient_changes import (
    Change,
    Parts,
    by_tokens,
    clipped_before_sums,
    clipped_by,
    clipped_by_leaf,
    clipped_by_stage,
    clipped_where_it_is,
    counting,
    counts_of,
    divided_again,
    in_bfloat16,
    last_alone,
    never_zeroed,
    norm_of_all,
    of_replica,
    of_uses,
    scaled,
    with_rolled_targets,
    with_targets,
)
from fpipe.verification.rank_pieces import Region
from fpipe.verification.row_orders import orders, pooled, reordered


@dataclass(frozen=True)
class Loop:
    """A training loop: what it trains, on what, and how.

    Attributes:
        model, params, opt, state: before the first step.
        steps: the microbatches of each step.
        words, rates: how parameters are updated, and the numbers of each step.
        plain: gradients of some microbatches, whose weights are those among `rows`.
        change: what becomes of the gradients of a step.
        norm: what a clip compares with.
        behind: by how many steps parameters are behind that gradients are taken of.
        places: where parameters come from several ranks, where in each leaf what a rank has of it is.
    """

    model: Model
    params: Sequence[Any]
    opt: Sequence[Any]
    state: Sequence[Any] | None
    steps: Sequence[Parts]
    words: UpdateWords
    rates: Sequence[dict[str, float | None]]
    plain: Callable[..., Result]
    keys: Sequence[int | None]
    change: Change | None = None
    norm: Norm = total_norm
    behind: int = 0
    places: Sequence[Mapping[int, Region | None]] = ()

    def leaf_of(self, leaf: TiedLeaf) -> int:
        """The number of a tied leaf among all."""
        stages = self.params[: leaf.owner]
        return len(tree.leaves(tuple(stages))) + [*self.params[leaf.owner]].index(leaf.name)

    def run(self) -> Result:
        """Results of it."""

        def gradients(read: Sequence[Any], own: Any, state: Any, key: int | None, scale: Any) -> Result:
            number, parts = own
            made = self.plain(read, parts, state, key)
            if self.change is None:
                return made
            of = partial(self.plain, read, state=state, key=key)
            return replace(made, grads=self.change(number, parts, made, of))

        return training_loop(
            self.params,
            [*enumerate(self.steps)],
            gradients,
            self.words,
            rates=self.rates,
            keys=self.keys,
            opt=self.opt,
            state=self.state,
            behind=lambda step, stage: self.behind,
            norm=self.norm,
        )


Named = Iterator[tuple[str, Loop]]


def mistakes(loop: Loop) -> Named:
    """Each mistake in words, and a loop that makes it; simple and frequent ones first."""
    yield from _of_sums(loop)
    yield from _of_rows(loop)
    yield from _of_clips(loop)
    yield from _of_rules(loop)
    yield from _of_steps(loop)


def _of_sums(loop: Loop) -> Named:
    """Gradients that are added up wrongly."""
    many = len(loop.steps[0])
    for k in dict.fromkeys((many, 2, 4, 8)):
        of = f"the {many} microbatches" if k == many else f"{k} microbatches or replicas"
        if k > 1:
            yield f"gradients are summed over {of} and not averaged", replace(loop, change=scaled(k))
            yield f"gradients are averaged over {of} once too often", replace(loop, change=scaled(1 / k))
    yield "gradients have the wrong sign", replace(loop, change=scaled(-1))
    if many > 1:
        yield (
            "only the last microbatch counts: gradients are overwritten, not accumulated",
            replace(loop, change=last_alone),
        )
        for k in range(many):
            yield f"microbatch {k} counts twice", replace(loop, change=counting(k, 2))
            yield f"microbatch {k} is missing", replace(loop, change=counting(k, 0))
        yield "gradients are added up in bfloat16", replace(loop, change=in_bfloat16)
    for k in range(2, many):
        if many % k == 0:
            words = f"gradients that are there already are divided again at each round of {k} microbatches"
            yield words, replace(loop, change=divided_again(k))
    yield from _of_ties(loop)


def _of_ties(loop: Loop) -> Named:
    """Uses of a tied parameter that are missing, or count twice."""
    for uses in loop.model.tied_uses:
        of = f"the gradient of the tied {uses[0].name!r}"
        for at, use in enumerate(uses):
            ones = [int(k == at) for k in range(len(uses))]
            yield f"{of} is that of its use in stage {use.stage} alone", replace(loop, change=of_uses(uses, ones))
            twice = [1 + one for one in ones]
            yield f"{of} counts its use in stage {use.stage} twice", replace(loop, change=of_uses(uses, twice))
            if len(uses) > 2:
                missing = [1 - one for one in ones]
                yield f"{of} misses its use in stage {use.stage}", replace(loop, change=of_uses(uses, missing))
        yield f"{of} is added up twice", replace(loop, change=of_uses(uses, [2] * len(uses)))


def _of_rows(loop: Loop) -> Named:
    """Gradients of other rows, or of rows that count otherwise."""
    many = len(loop.steps[0])
    for k in dict.fromkeys(count for part in loop.steps[0][:1] for count in counts_of(part[0][1])):
        words = f"gradients are summed over the {k * many} rows or tokens and not averaged"
        yield words, replace(loop, change=scaled(k * many))
        if many > 1:
            words = f"gradients are summed over the {k} rows or tokens of each microbatch and not averaged"
            yield words, replace(loop, change=scaled(k))
    if many > 1:
        yield "each microbatch weighs as much as it has valid targets, not rows", replace(loop, change=by_tokens)
        for k in (2, 4, 8):
            for j in range(k) if many % k == 0 else ():
                words = f"all {k} replicas are handed the same rows, those of replica {j}"
                yield words, replace(loop, change=of_replica(j, k))
    for words, order in orders(sum(size for _, size in loop.steps[0]), many):
        yield words, replace(loop, change=with_targets(order))
    if any(leaf.ndim > 1 and not leaf.is_floating_point() for leaf in tree.leaves(loop.steps[0][0][0][1])):
        yield "targets are shifted by one position too many", replace(loop, change=with_rolled_targets(-1))
        yield "targets are shifted by one position too few", replace(loop, change=with_rolled_targets(1))


def _of_clips(loop: Loop) -> Named:
    """Norms that miss or repeat something."""
    clip = loop.words.clip
    if clip is None:
        yield "gradients are clipped to 1", replace(loop, words=loop.words._replace(clip=1.0))
        return
    bare = replace(loop, words=loop.words._replace(clip=None))
    yield "gradients are not clipped", bare
    words = "each stage is clipped by its own norm: the norm misses other ranks"
    yield words, replace(bare, change=clipped_by_stage(clip))
    yield "each parameter is clipped by its own norm", replace(bare, change=clipped_by_leaf(clip))
    yield from clipped_by_parts(loop)
    for words, times in _counted_by_norms(loop):
        yield words, replace(bare, change=clipped_by(clip, partial(norm_of_all, times=times)))
    if len(loop.steps[0]) > 1:
        words = "each microbatch (or replica) is clipped before gradients are added up"
        yield words, replace(bare, change=clipped_before_sums(clip))


def _counted_by_norms(loop: Loop) -> Iterator[tuple[str, Callable[[int], float]]]:
    """How often norms count each leaf wrongly."""
    uses = {loop.leaf_of(uses[0]): len(uses) for uses in loop.model.tied_uses}
    if uses:
        yield "the norm counts tied parameters once for each use", lambda at: uses.get(at, 1)
        yield "the norm misses tied parameters", lambda at: at not in uses
    each = [[one[at] for one in loop.places if at in one] for at, _ in enumerate(tree.leaves(tuple(loop.params)))]
    copied = {at for at, places in enumerate(each) if len(places) > 1 and not any(places)}
    ranks = max((len({*places}) for places in each), default=1)
    if ranks > 1 and copied:
        words = f"the norm counts parameters of which {ranks} ranks have copies once for each of them"
        yield words, lambda at: ranks if at in copied else 1
        yield "the norm misses parameters of which all ranks have copies", lambda at: at not in copied
    for k in (2, 4, 8):
        yield f"the norm counts everything {k} times, as shards or replicas have it", lambda at, k=k: k


def clipped_by_parts(loop: Loop) -> Named:
    """Ranks that clip what they have by its own norm; nothing where none has a part of a leaf."""
    clip = loop.words.clip
    if clip is not None and any(place for one in loop.places for place in one.values()):
        words = "each rank is clipped by the norm of what it has itself: the norm misses other ranks"
        bare = replace(loop, words=loop.words._replace(clip=None))
        yield words, replace(bare, change=clipped_where_it_is(clip, loop.places))


def _of_rules(loop: Loop) -> Named:
    """Another optimizer, or other settings of it."""
    words, settings = loop.words, dict(loop.words.settings)

    def other(by: str = words.by, **more: Any) -> Loop:
        return replace(loop, words=words._replace(by=by, settings=tuple((settings | more).items())))

    varies = any("weight_decay" in numbers for numbers in loop.rates)
    decay = 0.0 if varies else settings.get("weight_decay", 0.01 if words.by == "AdamW" else 0.0)
    if words.by == "AdamW" and decay:
        yield "weight decay is added to the gradient (Adam), not decoupled", other("Adam", weight_decay=decay)
    if words.by == "Adam" and decay:
        yield "weight decay is decoupled (AdamW), not added to the gradient", other("AdamW", weight_decay=decay)
    if words.by in ("Adam", "AdamW"):
        yield "the optimizer counts one step too many", _counting(loop, 1.0)
        if _counted(loop.opt) > 0:
            yield "the optimizer counts one step too few", _counting(loop, -1.0)
        yield "there is no bias correction", _counting(loop, 1e8)
        own = settings.get("eps", 1e-8)
        for eps in (1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3):
            if eps != own:
                yield f"epsilon is {eps:g}, not {own:g}", other(eps=eps)
        known = tuple(settings.get("betas", (0.9, 0.999)))
        for betas in ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98)):
            if betas != known:
                yield f"betas are {betas}, not {known}", other(betas=betas)
    if words.by == "SGD" and settings.get("momentum"):
        yield "there is no momentum", other(momentum=0.0)
    if decay:
        yield "there is no weight decay", other(weight_decay=0.0)
    for one in (0.001, 0.01, 0.05, 0.1, 0.2, 0.3):
        if one != decay and not varies:
            say = f"weight decay is {one:g}, not {decay:g}" if decay else f"there is a weight decay of {one:g}"
            yield say, other(weight_decay=one)
    if words.groups:
        same = replace(loop, words=words._replace(groups=()))
        yield "groups are not told apart: all parameters have the same settings", same
    for by in ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad"):
        if by != words.by:
            own = words._replace(by=by, settings=(), groups=())
            said = f"the parameters are those of {by} with its defaults"
            bare = [{"lr": numbers["lr"]} for numbers in loop.rates]
            yield said, replace(loop, words=own, rates=bare, opt=initial_states(own, loop.params))
    rates = [*loop.rates]
    if any(numbers != rates[0] for numbers in rates):
        yield "the learning rate is that of the step before", replace(loop, rates=[rates[0], *rates[:-1]])
        yield "the learning rate is that of the next step", replace(loop, rates=[*rates[1:], rates[-1]])


def _of_steps(loop: Loop) -> Named:
    """Steps that read what is old, or too much."""
    many = len(loop.steps[0])
    if len(loop.steps) > 1:
        yield "gradients are of parameters of one step before (stale)", replace(loop, behind=1)
        yield (
            "gradients of the steps before are still there: zero_grad is missing",
            replace(loop, change=never_zeroed()),
        )
        for words, steps in _of_batches(loop.steps):
            yield words, replace(loop, steps=steps)
    if many > 1:
        single = [[part] for parts in loop.steps for part in parts]
        rates, keys = ([one for one in some for _ in range(many)] for some in (loop.rates, loop.keys))
        yield "the optimizer steps after each microbatch", replace(loop, steps=single, rates=rates, keys=keys)


def _of_batches(steps: Sequence[Parts]) -> Iterator[tuple[str, Sequence[Parts]]]:
    """Steps that are on rows of others."""
    right = (*range(len(steps)),)
    ways = [("all steps are on the first batch", (0,) * len(steps)), ("the batches come in reverse", right[::-1])]
    ways.append(("each step is on the batch of the one before", (0, *right[:-1])))
    for one, other in permutations(right[:_MOST_STEPS], 2):
        ways.append((f"step {one} is on the batch of step {other}", (*right[:one], other, *right[one + 1 :])))
        swapped = [{one: other, other: one}.get(step, step) for step in right]
        ways.append((f"steps {one} and {other} have each other's batch", (*swapped,)))
    seen = {right}
    for words, way in ways:
        if way not in seen:
            yield words, [steps[step] for step in way]
        seen.add(way)
    whole = [part for parts in steps for part, _ in parts]
    for words, order in pooled(sum(size for parts in steps for _, size in parts), len(steps)):
        parts = iter(reordered(whole, order))
        yield words, [[(next(parts), size) for _, size in step] for step in steps]


_MOST_STEPS = 6
"""Steps up to which all pairs of them are tried."""


def _counted(opt: Any) -> float:
    """How many steps an optimizer has counted."""
    return next((float(one[STEP]) for one in _states(opt) if STEP in one), 0.0)


def _states(opt: Any) -> Iterator[dict[str, Tensor]]:
    """The states of all leaves."""
    inner: list[Any] = [*opt.values()] if isinstance(opt, dict) else [*opt] if isinstance(opt, tuple | list) else []  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    if isinstance(opt, dict) and inner and all(isinstance(leaf, Tensor) for leaf in inner):
        yield opt
        return
    for one in inner:
        yield from _states(one)


def _counting(loop: Loop, shift: float) -> Loop:
    """A loop whose optimizer has counted so many steps more."""
    counts = {id(one[STEP]) for one in _states(loop.opt) if STEP in one}

    def shifted(leaf: Any) -> Any:
        return leaf + shift if id(leaf) in counts else leaf

    return replace(loop, opt=tree.tree_map(shifted, tuple(loop.opt)))
