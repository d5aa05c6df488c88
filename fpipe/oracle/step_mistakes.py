"""List what is often done wrong in a training step, each as another loop that makes the mistake.

the norm misses other ranks        -->        gradients of each stage are clipped by its own norm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.optimizers.optimizer_state import UpdateWords, initial_states
from fpipe.meaning.optimizers.rules import STEP
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import training_loop
from fpipe.model import Model
from fpipe.oracle.gradient_changes import (
    Change,
    Parts,
    StepGradients,
    by_tokens,
    clipped_before_sums,
    clipped_by_count,
    clipped_by_rank,
    clipped_by_stage,
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
from fpipe.oracle.named_leaves import Region


@dataclass(frozen=True)
class Loop:
    """A training loop: what it trains, on what, and how.

    Attributes:
        model, params, opt, state: before the first step.
        steps: the microbatches of each step.
        words, rates: how parameters are updated, and the numbers of each step.
        gradients: of some microbatches, as a mean over their rows.
        keys: of the random numbers of each step.
        change: how a mistake changes the gradients of a step.
        behind: how many steps old the parameters are that gradients are taken of.
        regions: where parameters come from several ranks, what each rank has of each leaf.
    """

    model: Model
    params: Sequence[Any]
    opt: Sequence[Any]
    state: Sequence[Any] | None
    steps: Sequence[Parts]
    words: UpdateWords
    rates: Sequence[dict[str, float | None]]
    gradients: Callable[..., Result]
    keys: Sequence[int | None]
    change: Change | None = None
    behind: int = 0
    regions: Sequence[Mapping[int, Region | None]] = ()

    def run(self) -> Result:
        """Train by it."""

        def gradients(read: Sequence[Any], step: Any, state: Any, key: int | None, scale: Any) -> Result:
            number, parts = step
            result = self.gradients(read, parts, state, key)
            if self.change is None:
                return result
            of = partial(self.gradients, read, state=state, key=key)
            return replace(result, grads=self.change(StepGradients(number, parts, result.grads, of)))

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
        """Return the loop with other gradients."""
        return replace(self, change=partial(change, **how))

    def with_clip(self, clip: float | None) -> Loop:
        """Return the loop with another clip, or none."""
        return replace(self, words=self.words._replace(clip=clip))


Named = Iterator[tuple[str, Loop]]


def mistakes(loop: Loop) -> Iterator[Named]:
    """Yield groups of mistakes, each in words with a loop that makes it; simple and frequent ones first.

    Mistakes of one group may have one effect: all that change a length, all that move rows.
    """
    yield chain(_wrong_sums(loop), _wrong_clips(loop))
    yield _wrong_ties(loop)
    yield _wrong_rows(loop)
    yield _wrong_settings(loop)
    yield _other_optimizers(loop)
    yield _wrong_steps(loop)


def _wrong_sums(loop: Loop) -> Named:
    count = len(loop.steps[0])
    for k in dict.fromkeys((count, 2, 4, 8)):
        of = f"the {count} microbatches" if k == count else f"{k} microbatches or replicas"
        if k > 1:
            yield f"gradients are summed over {of} and not averaged", loop.changed(scaled, by=k)
            yield f"gradients are averaged over {of} once too often", loop.changed(scaled, by=1 / k)
    yield "gradients have the wrong sign", loop.changed(scaled, by=-1)
    if count > 1:
        words = "only the last microbatch counts: gradients are overwritten, not accumulated"
        yield words, loop.changed(StepGradients.share, k=-1)
        for k in range(count):
            yield f"microbatch {k} counts twice", loop.changed(counting, k=k, times=2)
            yield f"microbatch {k} is missing", loop.changed(counting, k=k, times=0)
        yield "gradients are added up in bfloat16", loop.changed(in_bfloat16)
    for k in dict.fromkeys(counts_of(loop.steps[0][0][0][1])):
        if k > 1:
            words = f"gradients are summed over the {k * count} rows or tokens and not averaged"
            yield words, loop.changed(scaled, by=k * count)
        if k > 1 and count > 1:
            words = f"gradients are summed over the {k} rows or tokens of each microbatch and not averaged"
            yield words, loop.changed(scaled, by=k)
    for k in range(2, count):
        if count % k == 0:
            words = f"gradients that are there already are divided again at each round of {k} microbatches"
            yield words, loop.changed(divided_again, size=k)


def _wrong_ties(loop: Loop) -> Named:
    for uses in loop.model.tied_uses:
        of = f"the gradient of the tied {uses[0].name!r}"
        for k, use in enumerate(uses):
            for words, times in (("misses its use in stage {}", 0), ("counts its use in stage {} twice", 2)):
                counts = [times if j == k else 1 for j in range(len(uses))]
                yield f"{of} {words.format(use.stage)}", loop.changed(of_uses, uses=uses, times=counts)
        yield f"{of} is added up twice", loop.changed(of_uses, uses=uses, times=[2] * len(uses))


def _wrong_rows(loop: Loop) -> Named:
    parts = loop.steps[0]
    count, target = len(parts), parts[0][0][1]
    if count > 1:
        yield "each microbatch weighs as much as it has valid targets, not rows", loop.changed(by_tokens)
        for k in (2, 4, 8):
            if count % k == 0:
                words = f"all {k} replicas are handed the same rows, those of replica 0"
                yield words, loop.changed(of_first_replica, replicas=k)
    targets = [leaf for leaf in tree.leaves(target) if isinstance(leaf, Tensor) and leaf.ndim]
    for words, order in target_orders(sum(size for _, size in parts), count) if targets else ():
        yield words, loop.changed(with_targets, order=order)
    if any(leaf.ndim > 1 and not leaf.is_floating_point() for leaf in targets):
        yield "targets are shifted by one position too many", loop.changed(with_shifted_targets, by=-1)
        yield "targets are shifted by one position too few", loop.changed(with_shifted_targets, by=1)


def _wrong_clips(loop: Loop) -> Named:
    clip, unclipped = loop.words.clip, loop.with_clip(None)
    if clip is None:
        yield "gradients are clipped to 1", loop.with_clip(1.0)
        return
    yield "gradients are not clipped, or to more than their norm", unclipped
    words = "each stage is clipped by its own norm: the norm misses other ranks"
    yield words, unclipped.changed(clipped_by_stage, most=clip)
    yield from clipped_by_parts(loop)
    for times in (2, 4, 8):  # the effect of a norm that counts everything so many times
        other = clip / times**0.5
        yield f"gradients are clipped to {other:.3g}, not {clip:.3g}", loop.with_clip(other)
    for words, times in _wrong_norms(loop):
        yield words, unclipped.changed(clipped_by_count, most=clip, times=times)
    if len(loop.steps[0]) > 1:
        words = "each microbatch (or replica) is clipped before gradients are added up"
        yield words, unclipped.changed(clipped_before_sums, most=clip)


def _wrong_norms(loop: Loop) -> Iterator[tuple[str, Callable[[int], float]]]:
    """Yield how often a norm counts each leaf wrongly."""
    leaves, spec = tree.flatten(tuple(loop.params))
    numbered = tree.unflatten(spec, range(len(leaves)))
    uses = {numbered[tied[0].owner][tied[0].owner_name]: len(tied) for tied in loop.model.tied_uses}
    if uses:
        yield "the norm counts tied parameters once for each use", lambda k: uses.get(k, 1)
    holders = [[regions[k] for regions in loop.regions if k in regions] for k in range(len(leaves))]
    copied = {k for k, regions in enumerate(holders) if len(regions) > 1 and not any(regions)}
    ranks = max(len({*regions}) for regions in holders)
    if ranks > 1 and copied:
        words = f"the norm counts parameters of which {ranks} ranks have copies once for each of them"
        yield words, lambda k: ranks if k in copied else 1
        yield "the norm misses parameters of which all ranks have copies", lambda k: k not in copied
    for times in (2, 4, 8):
        yield f"the norm counts everything {times} times, as shards or replicas have it", lambda k, times=times: times


def clipped_by_parts(loop: Loop) -> Named:
    """Yield a loop whose ranks clip what they have by its own norm; nothing where none has a part of a leaf."""
    if loop.words.clip is not None and any(region for regions in loop.regions for region in regions.values()):
        words = "each rank is clipped by the norm of what it has itself: the norm misses other ranks"
        yield words, loop.with_clip(None).changed(clipped_by_rank, most=loop.words.clip, regions=loop.regions)


def _wrong_settings(loop: Loop) -> Named:
    """Yield loops of the same optimizer, or of Adam for AdamW, with other settings."""
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
        if any(float(leaf) for path, leaf in tree.paths(tuple(loop.opt)) if _is_count(path)):
            yield "the optimizer counts one step too few", _counting(loop, -1.0)
        yield "there is no bias correction", _counting(loop, 1e8)
        meant_eps, meant_betas = settings.get("eps", 1e-8), tuple(settings.get("betas", (0.9, 0.999)))
        for eps in (1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3):
            if eps != meant_eps:
                yield f"epsilon is {eps:g}, not {meant_eps:g}", other(eps=eps)
        for betas in ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98)):
            if betas != meant_betas:
                yield f"betas are {betas}, not {meant_betas}", other(betas=betas)
    if words.by == "SGD" and settings.get("momentum"):
        yield "there is no momentum", other(momentum=0.0)
    if decay:
        yield "there is no weight decay", other(weight_decay=0.0)
    for value in (0.001, 0.01, 0.05, 0.1, 0.2, 0.3):
        if value != decay and not varies:
            sentence = f"weight decay is {value:g}, not {decay:g}" if decay else f"there is a weight decay of {value:g}"
            yield sentence, other(weight_decay=value)
    if words.groups:
        ungrouped = replace(loop, words=words._replace(groups=()))
        yield "groups are not told apart: all parameters have the same settings", ungrouped


def _other_optimizers(loop: Loop) -> Named:
    """Yield loops of other optimizers, and of rates that are a step early or late."""
    for by in ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad"):
        if by != loop.words.by:
            words = loop.words._replace(by=by, settings=(), groups=())
            rates: list[dict[str, float | None]] = [{"lr": numbers["lr"]} for numbers in loop.rates]
            sentence = f"the parameters are those of {by} with its defaults"
            yield sentence, replace(loop, words=words, rates=rates, opt=initial_states(words, loop.params))
    rates = [*loop.rates]
    if any(numbers != rates[0] for numbers in rates):
        yield "the learning rate is that of the step before", replace(loop, rates=[rates[0], *rates[:-1]])
        yield "the learning rate is that of the next step", replace(loop, rates=[*rates[1:], rates[-1]])


def _is_count(path: str) -> bool:
    return path.endswith(f"[{STEP!r}]")


def _counting(loop: Loop, more: float) -> Loop:
    """Return a loop whose optimizer has counted so many steps more; of very many nothing is left to correct."""
    _, spec = tree.flatten(tuple(loop.opt))
    counted = [leaf + more if _is_count(path) else leaf for path, leaf in tree.paths(tuple(loop.opt))]
    return replace(loop, opt=tree.unflatten(spec, counted))


def _wrong_steps(loop: Loop) -> Named:
    """Yield loops whose steps read what is old, or too much."""
    steps, count = [*loop.steps], len(loop.steps[0])
    if len(steps) > 1:
        yield "gradients are of parameters of one step before (stale)", replace(loop, behind=1)
        words = "gradients of the steps before are still there: zero_grad is missing"
        yield words, replace(loop, change=never_zeroed())
        yield "all steps are on the first batch", replace(loop, steps=steps[:1] * len(steps))
        yield "each step is on the batch of the one before", replace(loop, steps=[steps[0], *steps[:-1]])
    if count > 1:
        single = [[part] for parts in steps for part in parts]
        rates, keys = ([value for value in values for _ in range(count)] for values in (loop.rates, loop.keys))
        yield "the optimizer steps after each microbatch", replace(loop, steps=single, rates=rates, keys=keys)


_SEEDS = (0, 1, 2, 3, 42)
"""Seeds that people begin with."""


def target_orders(rows: int, microbatches: int) -> Iterator[tuple[str, Tensor]]:
    """Yield mistakes in words, and for each row that whose target it meets; each order once, simple ones first.

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
        rows_in_order = (*order.tolist(),)
        if rows_in_order not in seen:
            seen.add(rows_in_order)
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
