"""List what is often done wrong in a training step, each as another loop that makes the mistake.

the norm misses other ranks        -->        gradients of each stage are clipped by its own norm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.optimizers.optimizer_state import UpdateWords, initial_states
from fpipe.meaning.optimizers.rules import STEP
from fpipe.meaning.single_device.reference import training_loop
from fpipe.meaning.single_device.result import Result
from fpipe.model import Model
from fpipe.oracle.gradient_changes import (
    Change,
    Parts,
    StepGradients,
    by_tokens,
    clipped_before_sums,
    clipped_by_count,
    clipped_by_stage,
    clipped_where_it_is,
    counting,
    counts_of,
    divided_again,
    in_bfloat16,
    never_zeroed,
    of_first_replica,
    of_uses,
    scaled,
    with_shifted_targets,
    with_targets,
)
from fpipe.oracle.rank_pieces import Region


@dataclass(frozen=True)
class Loop:
    """A training loop: what it trains, on what, and how.

    Attributes:
        model, params, opt, state: before the first step.
        steps: the microbatches of each step.
        words, rates: how parameters are updated, and the numbers of each step.
        plain: gradients of some microbatches, as a mean over their rows.
        change: what becomes of the gradients of a step.
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
    behind: int = 0
    places: Sequence[Mapping[int, Region | None]] = ()

    def run(self) -> Result:
        """Results of it."""

        def gradients(read: Sequence[Any], own: Any, state: Any, key: int | None, scale: Any) -> Result:
            number, parts = own
            made = self.plain(read, parts, state, key)
            if self.change is None:
                return made
            of = partial(self.plain, read, state=state, key=key)
            return replace(made, grads=self.change(StepGradients(number, parts, made.grads, of)))

        return training_loop(
            self.model,
            self.params,
            [*enumerate(self.steps)],
            gradients,
            self.words,
            rates=self.rates,
            keys=self.keys,
            opt=self.opt,
            state=self.state,
            behind=lambda step, stage: self.behind,
        )

    def changed(self, change: Callable[..., Any], **how: Any) -> Loop:
        """The loop with other gradients."""
        return replace(self, change=partial(change, **how))

    def without_clip(self) -> Loop:
        """The loop with gradients as they are."""
        return replace(self, words=self.words._replace(clip=None))


Named = Iterator[tuple[str, Loop]]


def mistakes(loop: Loop) -> Named:
    """Each mistake in words, and a loop that makes it; simple and frequent ones first."""
    yield from _of_sums(loop)
    yield from _of_ties(loop)
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
            yield f"gradients are summed over {of} and not averaged", loop.changed(scaled, by=k)
            yield f"gradients are averaged over {of} once too often", loop.changed(scaled, by=1 / k)
    yield "gradients have the wrong sign", loop.changed(scaled, by=-1)
    if many > 1:
        words = "only the last microbatch counts: gradients are overwritten, not accumulated"
        yield words, loop.changed(StepGradients.share, k=-1)
        for k in range(many):
            yield f"microbatch {k} counts twice", loop.changed(counting, k=k, times=2)
            yield f"microbatch {k} is missing", loop.changed(counting, k=k, times=0)
        yield "gradients are added up in bfloat16", loop.changed(in_bfloat16)
    for k in range(2, many):
        if many % k == 0:
            words = f"gradients that are there already are divided again at each round of {k} microbatches"
            yield words, loop.changed(divided_again, size=k)


def _of_ties(loop: Loop) -> Named:
    """Uses of a tied parameter that are missing, or count twice."""
    for uses in loop.model.tied_uses:
        of = f"the gradient of the tied {uses[0].name!r}"
        for at, use in enumerate(uses):
            for words, times in (("misses its use in stage {}", 0), ("counts its use in stage {} twice", 2)):
                each = [times if k == at else 1 for k in range(len(uses))]
                yield f"{of} {words.format(use.stage)}", loop.changed(of_uses, uses=uses, times=each)
        yield f"{of} is added up twice", loop.changed(of_uses, uses=uses, times=[2] * len(uses))


def _of_rows(loop: Loop) -> Named:
    """Gradients of other rows, or of rows that count otherwise."""
    parts = loop.steps[0]
    many, target = len(parts), parts[0][0][1]
    for k in dict.fromkeys(counts_of(target)):
        words = f"gradients are summed over the {k * many} rows or tokens and not averaged"
        yield words, loop.changed(scaled, by=k * many)
        if many > 1:
            words = f"gradients are summed over the {k} rows or tokens of each microbatch and not averaged"
            yield words, loop.changed(scaled, by=k)
    if many > 1:
        yield "each microbatch weighs as much as it has valid targets, not rows", loop.changed(by_tokens)
        for k in (2, 4, 8):
            if many % k == 0:
                words = f"all {k} replicas are handed the same rows, those of replica 0"
                yield words, loop.changed(of_first_replica, replicas=k)
    for words, order in target_orders(sum(size for _, size in parts), many):
        yield words, loop.changed(with_targets, order=order)
    if any(leaf.ndim > 1 and not leaf.is_floating_point() for leaf in tree.leaves(target)):
        yield "targets are shifted by one position too many", loop.changed(with_shifted_targets, by=-1)
        yield "targets are shifted by one position too few", loop.changed(with_shifted_targets, by=1)


def _of_clips(loop: Loop) -> Named:
    """Norms that miss or repeat something."""
    clip, bare = loop.words.clip, loop.without_clip()
    if clip is None:
        yield "gradients are clipped to 1", replace(loop, words=loop.words._replace(clip=1.0))
        return
    yield "gradients are not clipped", bare
    words = "each stage is clipped by its own norm: the norm misses other ranks"
    yield words, bare.changed(clipped_by_stage, most=clip)
    yield from clipped_by_parts(loop)
    for words, times in _counted_by_norms(loop):
        yield words, bare.changed(clipped_by_count, most=clip, times=times)
    if len(loop.steps[0]) > 1:
        words = "each microbatch (or replica) is clipped before gradients are added up"
        yield words, bare.changed(clipped_before_sums, most=clip)


def _counted_by_norms(loop: Loop) -> Iterator[tuple[str, Callable[[int], float]]]:
    """How often norms count each leaf wrongly."""
    leaves, spec = tree.flatten(tuple(loop.params))
    numbered = tree.unflatten(spec, range(len(leaves)))
    uses = {numbered[tied[0].owner][tied[0].owner_name]: len(tied) for tied in loop.model.tied_uses}
    if uses:
        yield "the norm counts tied parameters once for each use", lambda at: uses.get(at, 1)
    each = [[one[at] for one in loop.places if at in one] for at in range(len(leaves))]
    copied = {at for at, places in enumerate(each) if len(places) > 1 and not any(places)}
    ranks = max(len({*places}) for places in each)
    if ranks > 1 and copied:
        words = f"the norm counts parameters of which {ranks} ranks have copies once for each of them"
        yield words, lambda at: ranks if at in copied else 1
        yield "the norm misses parameters of which all ranks have copies", lambda at: at not in copied
    for k in (2, 4, 8):
        yield f"the norm counts everything {k} times, as shards or replicas have it", lambda at, k=k: k


def clipped_by_parts(loop: Loop) -> Named:
    """Ranks that clip what they have by its own norm; nothing where none has a part of a leaf."""
    if loop.words.clip is not None and any(place for one in loop.places for place in one.values()):
        words = "each rank is clipped by the norm of what it has itself: the norm misses other ranks"
        bare = loop.without_clip()
        yield words, bare.changed(clipped_where_it_is, most=loop.words.clip, places=loop.places)


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
        if any(float(leaf) for place, leaf in tree.paths(tuple(loop.opt)) if _is_count(place)):
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


def _is_count(place: str) -> bool:
    return place.endswith(f"[{STEP!r}]")


def _counting(loop: Loop, more: float) -> Loop:
    """A loop whose optimizer has counted so many steps more; of very many nothing is left to correct."""
    _, spec = tree.flatten(tuple(loop.opt))
    counted = [leaf + more if _is_count(place) else leaf for place, leaf in tree.paths(tuple(loop.opt))]
    return replace(loop, opt=tree.unflatten(spec, counted))


def _of_steps(loop: Loop) -> Named:
    """Steps that read what is old, or too much."""
    steps, many = [*loop.steps], len(loop.steps[0])
    if len(steps) > 1:
        yield "gradients are of parameters of one step before (stale)", replace(loop, behind=1)
        words = "gradients of the steps before are still there: zero_grad is missing"
        yield words, replace(loop, change=never_zeroed())
        yield "all steps are on the first batch", replace(loop, steps=steps[:1] * len(steps))
        yield "each step is on the batch of the one before", replace(loop, steps=[steps[0], *steps[:-1]])
    if many > 1:
        single = [[part] for parts in steps for part in parts]
        rates, keys = ([one for one in some for _ in range(many)] for some in (loop.rates, loop.keys))
        yield "the optimizer steps after each microbatch", replace(loop, steps=single, rates=rates, keys=keys)


_SEEDS = (0, 1, 2, 3, 42)
"""Seeds that people begin with."""


def target_orders(rows: int, microbatches: int) -> Iterator[tuple[str, Tensor]]:
    """Mistakes in words, and for each row the one whose target it meets; each order once, simple ones first.

    >>> for words, order in target_orders(4, 2):
    ...     print(order.tolist(), words)
    ...     if "reverse" in words:
    ...         break
    [2, 3, 0, 1] targets are those of the next microbatch
    [1, 2, 3, 0] targets are those of the next row
    [3, 0, 1, 2] targets are those of the row before
    [3, 2, 1, 0] targets come in the reverse order of the rows
    """
    seen = {(*range(rows),)}
    for words, order in _orders(torch.arange(rows), microbatches):
        if (one := (*order.tolist(),)) not in seen:
            seen.add(one)
            yield words, order


def _orders(right: Tensor, microbatches: int) -> Iterator[tuple[str, Tensor]]:
    rows = len(right)
    if rows % microbatches == 0:
        size = rows // microbatches
        yield "targets are those of the next microbatch", right.roll(-size)
        yield "targets are those of the microbatch before", right.roll(size)
    yield "targets are those of the next row", right.roll(-1)
    yield "targets are those of the row before", right.roll(1)
    yield "targets come in the reverse order of the rows", right.flip(0)
    for k in (microbatches, 2, 4, 8):
        if 1 < k < rows and rows % k == 0:
            of, dealt = f"{k} microbatches or replicas", right.view(-1, k).T.flatten()
            yield f"targets are those of the next of {of}", right.roll(-(rows // k))
            yield f"targets are dealt out one by one to {of}, inputs in blocks", dealt
            yield f"inputs are dealt out one by one to {of}, targets in blocks", dealt.argsort()
    for seed in _SEEDS:
        drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        yield f"targets are shuffled by torch.randperm of seed {seed}, inputs are not", drawn
        yield f"inputs are shuffled by torch.randperm of seed {seed}, targets are not", drawn.argsort()
