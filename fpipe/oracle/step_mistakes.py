"""List frequent mistakes of a training step, each as a loop that makes the mistake.

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
from fpipe.meaning.optimizers.optimizer_state import UpdateSettings, initial_states
from fpipe.meaning.optimizers.rules import STEP
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import training_loop
from fpipe.model import Model
from fpipe.oracle.gradient_changes import (
    Change,
    Parts,
    StepGradients,
    accumulate_all_steps,
    add_in_bfloat16,
    clip_before_sums,
    clip_by_counted_norm,
    clip_by_rank,
    clip_by_stage,
    count_microbatch,
    count_uses,
    divide_repeatedly,
    permute_targets,
    scale,
    shift_targets,
    target_counts,
    use_first_replica,
    weigh_by_tokens,
)
from fpipe.oracle.named_leaves import Region


@dataclass(frozen=True)
class Loop:
    """A training loop as a value, which a mistake changes in one field.

    Attributes:
        model, params, opt, state: the model, and its values before the first step.
        steps: the microbatches of each step.
        update, rates: the update rule with its constant settings, and the settings of each step.
        gradients: computes gradients of some microbatches, as a mean over their rows.
        keys: the random key of each step.
        change: how a mistake changes the gradients of a step.
        staleness: how many steps old the parameters are at which gradients are computed.
        regions: for each rank the region that it has of each leaf, if parameters come from several ranks.
    """

    model: Model
    params: Sequence[Any]
    opt: Sequence[Any]
    state: Sequence[Any] | None
    steps: Sequence[Parts]
    update: UpdateSettings
    rates: Sequence[dict[str, float | None]]
    gradients: Callable[..., Result]
    keys: Sequence[int | None]
    change: Change | None = None
    staleness: int = 0
    regions: Sequence[Mapping[int, Region | None]] = ()

    def run(self) -> Result:
        """Run all steps, with the changed gradients."""

        def gradients(params: Sequence[Any], step: Any, state: Any, key: int | None, scale: Any) -> Result:
            index, parts = step
            result = self.gradients(params, parts, state, key)
            if self.change is None:
                return result
            compute_grads = partial(self.gradients, params, state=state, key=key)
            return replace(result, grads=self.change(StepGradients(index, parts, result.grads, compute_grads)))

        return training_loop(
            self.model,
            self.params,
            [*enumerate(self.steps)],
            gradients,
            self.update,
            rates=self.rates,
            keys=self.keys,
            opt=self.opt,
            state=self.state,
            delay=lambda step, stage: self.staleness,
        )

    def changed(self, change: Callable[..., Any], **arguments: Any) -> Loop:
        """Return the loop with changed gradients."""
        return replace(self, change=partial(change, **arguments))

    def with_clip(self, clip: float | None) -> Loop:
        """Return the loop with another clip, or none."""
        return replace(self, update=self.update._replace(clip=clip))


NamedLoops = Iterator[tuple[str, Loop]]


def list_mistakes(loop: Loop) -> Iterator[NamedLoops]:
    """Yield groups of mistakes, each a sentence and a loop that makes it; simple and frequent ones first.

    Mistakes of one group may have the same effect, such as all that scale gradients, so a group is tried as a whole.
    """
    yield chain(_wrong_sums(loop), _wrong_clips(loop))
    yield _wrong_ties(loop)
    yield _wrong_rows(loop)
    yield _wrong_settings(loop)
    yield _other_optimizers(loop)
    yield _wrong_steps(loop)


def _wrong_sums(loop: Loop) -> NamedLoops:
    count = len(loop.steps[0])
    # 2, 4 and 8 are usual numbers of replicas, which the loop does not know.
    for k in dict.fromkeys((count, 2, 4, 8)):
        scope = f"the {count} microbatches" if k == count else f"{k} microbatches or replicas"
        if k > 1:
            yield f"gradients are summed over {scope} and not averaged", loop.changed(scale, factor=k)
            yield f"gradients are averaged over {scope} once too often", loop.changed(scale, factor=1 / k)
    yield "gradients have the wrong sign", loop.changed(scale, factor=-1)
    if count > 1:
        sentence = "only the last microbatch counts: gradients are overwritten, not accumulated"
        yield sentence, loop.changed(StepGradients.share, microbatch=-1)
        for k in range(count):
            yield f"microbatch {k} counts twice", loop.changed(count_microbatch, microbatch=k, times=2)
            yield f"microbatch {k} is missing", loop.changed(count_microbatch, microbatch=k, times=0)
        yield "gradients are added up in bfloat16", loop.changed(add_in_bfloat16)
    # The rows, elements and valid elements of a target: a loss with reduction="sum" runs over one of them.
    for k in dict.fromkeys(target_counts(loop.steps[0][0][0][1])):
        if k > 1:
            sentence = f"gradients are summed over the {k * count} rows or tokens and not averaged"
            yield sentence, loop.changed(scale, factor=k * count)
        if k > 1 and count > 1:
            sentence = f"gradients are summed over the {k} rows or tokens of each microbatch and not averaged"
            yield sentence, loop.changed(scale, factor=k)
    for k in range(2, count):
        if count % k == 0:
            sentence = f"gradients that are there already are divided again at each round of {k} microbatches"
            yield sentence, loop.changed(divide_repeatedly, size=k)


def _wrong_ties(loop: Loop) -> NamedLoops:
    # Each stage that uses a tied parameter adds a part to its gradient, and one of them may be lost.
    for uses in loop.model.tied_uses:
        subject = f"the gradient of the tied {uses[0].name!r}"
        for use_index, use in enumerate(uses):
            for sentence, times in (("misses its use in stage {}", 0), ("counts its use in stage {} twice", 2)):
                counts = [times if other_index == use_index else 1 for other_index in range(len(uses))]
                yield f"{subject} {sentence.format(use.stage)}", loop.changed(count_uses, uses=uses, times=counts)
        yield f"{subject} is added up twice", loop.changed(count_uses, uses=uses, times=[2] * len(uses))


def _wrong_rows(loop: Loop) -> NamedLoops:
    parts = loop.steps[0]
    count, target = len(parts), parts[0][0][1]
    if count > 1:
        yield "each microbatch weighs as much as it has valid targets, not rows", loop.changed(weigh_by_tokens)
        for k in (2, 4, 8):
            if count % k == 0:
                sentence = f"all {k} replicas are handed the same rows, those of replica 0"
                yield sentence, loop.changed(use_first_replica, replicas=k)
    targets = [leaf for leaf in tree.leaves(target) if isinstance(leaf, Tensor) and leaf.ndim]
    # Targets that meet other rows: permutations of the rows of the whole batch.
    for sentence, order in target_orders(sum(size for _, size in parts), count) if targets else ():
        yield sentence, loop.changed(permute_targets, order=order)
    if any(leaf.ndim > 1 and not leaf.is_floating_point() for leaf in targets):
        yield "targets are shifted by one position too many", loop.changed(shift_targets, offset=-1)
        yield "targets are shifted by one position too few", loop.changed(shift_targets, offset=1)


def _wrong_clips(loop: Loop) -> NamedLoops:
    clip, unclipped = loop.update.clip, loop.with_clip(None)
    if clip is None:
        yield "gradients are clipped to 1", loop.with_clip(1.0)
        return
    yield "gradients are not clipped, or to more than their norm", unclipped
    sentence = "each stage is clipped by its own norm: the norm misses other ranks"
    yield sentence, unclipped.changed(clip_by_stage, max_norm=clip)
    yield from loops_clipped_by_rank(loop)
    # A norm that counts everything n times is sqrt(n) times as large: the same as a clip that is smaller by that.
    for times in (2, 4, 8):
        smaller_clip = clip / times**0.5
        yield f"gradients are clipped to {smaller_clip:.3g}, not {clip:.3g}", loop.with_clip(smaller_clip)
    for sentence, times in _wrong_norms(loop):
        yield sentence, unclipped.changed(clip_by_counted_norm, max_norm=clip, times=times)
    if len(loop.steps[0]) > 1:
        sentence = "each microbatch (or replica) is clipped before gradients are added up"
        yield sentence, unclipped.changed(clip_before_sums, max_norm=clip)


def _wrong_norms(loop: Loop) -> Iterator[tuple[str, Callable[[int], float]]]:
    """Yield sentences, each with a function for how often a wrong norm counts a leaf."""
    leaves, spec = tree.flatten(tuple(loop.params))
    numbered = tree.unflatten(spec, range(len(leaves)))
    uses = {numbered[tied[0].owner][tied[0].owner_name]: len(tied) for tied in loop.model.tied_uses}
    if uses:
        yield "the norm counts tied parameters once for each use", lambda leaf_index: uses.get(leaf_index, 1)
    # The regions of each leaf, one for each rank that has a part of it; None is a copy of the whole leaf.
    holders = [[regions[i] for regions in loop.regions if i in regions] for i in range(len(leaves))]
    copied = {leaf_index for leaf_index, regions in enumerate(holders) if len(regions) > 1 and not any(regions)}
    ranks = max(len({*regions}) for regions in holders)
    if ranks > 1 and copied:
        sentence = f"the norm counts parameters of which {ranks} ranks have copies once for each of them"
        yield sentence, lambda leaf_index: ranks if leaf_index in copied else 1
        yield "the norm misses parameters of which all ranks have copies", lambda leaf_index: leaf_index not in copied
    for times in (2, 4, 8):
        sentence = f"the norm counts everything {times} times, as shards or replicas have it"
        yield sentence, lambda leaf_index, times=times: times


def loops_clipped_by_rank(loop: Loop) -> NamedLoops:
    """Yield the loop in which each rank clips by the norm of its own part, if some rank has only a part of a leaf."""
    if loop.update.clip is not None and any(region for regions in loop.regions for region in regions.values()):
        sentence = "each rank is clipped by the norm of what it has itself: the norm misses other ranks"
        yield sentence, loop.with_clip(None).changed(clip_by_rank, max_norm=loop.update.clip, regions=loop.regions)


def _wrong_settings(loop: Loop) -> NamedLoops:
    """Yield loops of the same optimizer with other settings; Adam and AdamW differ by where weight decay goes."""
    update, settings = loop.update, dict(loop.update.settings)

    def with_settings(rule: str = update.rule, **changes: Any) -> Loop:
        return replace(loop, update=update._replace(rule=rule, settings=tuple((settings | changes).items())))

    varies = any("weight_decay" in numbers for numbers in loop.rates)
    decay = 0.0 if varies else settings.get("weight_decay", 0.01 if update.rule == "AdamW" else 0.0)
    if update.rule == "AdamW" and decay:
        yield "weight decay is added to the gradient (Adam), not decoupled", with_settings("Adam", weight_decay=decay)
    if update.rule == "Adam" and decay:
        yield "weight decay is decoupled (AdamW), not added to the gradient", with_settings("AdamW", weight_decay=decay)
    if update.rule in ("Adam", "AdamW"):
        yield "the optimizer counts one step too many", _with_step_count(loop, 1.0)
        if any(float(leaf) for path, leaf in tree.paths(tuple(loop.opt)) if _is_count(path)):
            yield "the optimizer counts one step too few", _with_step_count(loop, -1.0)
        # The correction is 1 - beta^step, which is 1 after very many steps.
        yield "there is no bias correction", _with_step_count(loop, 1e8)
        meant_eps, meant_betas = settings.get("eps", 1e-8), tuple(settings.get("betas", (0.9, 0.999)))
        # Common values, each tried unless it was meant.
        for eps in (1e-10, 1e-8, 1e-7, 1e-6, 1e-5, 1e-3):
            if eps != meant_eps:
                yield f"epsilon is {eps:g}, not {meant_eps:g}", with_settings(eps=eps)
        for betas in ((0.9, 0.999), (0.9, 0.95), (0.9, 0.98)):
            if betas != meant_betas:
                yield f"betas are {betas}, not {meant_betas}", with_settings(betas=betas)
    if update.rule == "SGD" and settings.get("momentum"):
        yield "there is no momentum", with_settings(momentum=0.0)
    if decay:
        yield "there is no weight decay", with_settings(weight_decay=0.0)
    for value in (0.001, 0.01, 0.05, 0.1, 0.2, 0.3):
        if value != decay and not varies:
            sentence = f"weight decay is {value:g}, not {decay:g}" if decay else f"there is a weight decay of {value:g}"
            yield sentence, with_settings(weight_decay=value)
    if update.groups:
        ungrouped = replace(loop, update=update._replace(groups=()))
        yield "groups are not told apart: all parameters have the same settings", ungrouped


def _other_optimizers(loop: Loop) -> NamedLoops:
    """Yield loops of other optimizers, and loops whose rates are one step early or late."""
    for rule in ("AdamW", "Adam", "SGD", "RMSprop", "Adagrad"):
        if rule != loop.update.rule:
            update = loop.update._replace(rule=rule, settings=(), groups=())
            rates: list[dict[str, float | None]] = [{"lr": numbers["lr"]} for numbers in loop.rates]
            sentence = f"the parameters are those of {rule} with its defaults"
            yield sentence, replace(loop, update=update, rates=rates, opt=initial_states(update, loop.params))
    rates = [*loop.rates]
    if any(numbers != rates[0] for numbers in rates):
        yield "the learning rate is that of the step before", replace(loop, rates=[rates[0], *rates[:-1]])
        yield "the learning rate is that of the next step", replace(loop, rates=[*rates[1:], rates[-1]])


def _is_count(path: str) -> bool:
    return path.endswith(f"[{STEP!r}]")


def _with_step_count(loop: Loop, difference: float) -> Loop:
    _, spec = tree.flatten(tuple(loop.opt))
    counted = [leaf + difference if _is_count(path) else leaf for path, leaf in tree.paths(tuple(loop.opt))]
    return replace(loop, opt=tree.unflatten(spec, counted))


def _wrong_steps(loop: Loop) -> NamedLoops:
    """Yield loops whose steps read stale parameters, gradients or batches, or step too often."""
    steps, count = [*loop.steps], len(loop.steps[0])
    if len(steps) > 1:
        yield "gradients are of parameters of one step before (stale)", replace(loop, staleness=1)
        sentence = "gradients of the steps before are still there: zero_grad is missing"
        yield sentence, replace(loop, change=accumulate_all_steps())
        yield "all steps are on the first batch", replace(loop, steps=steps[:1] * len(steps))
        yield "each step is on the batch of the one before", replace(loop, steps=[steps[0], *steps[:-1]])
    if count > 1:
        # Each microbatch is a step of its own here, with the rates and the key of its step.
        single_steps = [[part] for parts in steps for part in parts]
        rates, keys = ([value for value in values for _ in range(count)] for values in (loop.rates, loop.keys))
        yield "the optimizer steps after each microbatch", replace(loop, steps=single_steps, rates=rates, keys=keys)


_SEEDS = (0, 1, 2, 3, 42)
"""Seeds that people often choose."""


def target_orders(rows: int, microbatches: int) -> Iterator[tuple[str, Tensor]]:
    """Yield wrong orders of targets, each with a sentence and the target's row for each row; simple ones first.

    >>> for words, order in target_orders(4, 2):
    ...     print(order.tolist(), words)
    ...     if "reverse" in words:
    ...         break
    [2, 3, 0, 1] targets are those of the next microbatch
    [1, 2, 3, 0] targets are those of the next row
    [3, 0, 1, 2] targets are those of the row before
    [3, 2, 1, 0] targets come in the reverse order of the rows
    """
    known_orders = {(*range(rows),)}
    for sentence, order in _candidate_orders(torch.arange(rows), microbatches):
        rows_in_order = (*order.tolist(),)
        if rows_in_order not in known_orders:
            known_orders.add(rows_in_order)
            yield sentence, order


def _candidate_orders(right: Tensor, microbatches: int) -> Iterator[tuple[str, Tensor]]:
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
            # Dealt out one by one: part r has the rows r, r + k, r + 2k and so on.
            scope, dealt = f"{k} microbatches or replicas", right.view(-1, k).T.flatten()
            yield f"targets are those of the next of {scope}", right.roll(-(rows // k))
            yield f"targets are dealt out one by one to {scope}, inputs in blocks", dealt
            yield f"inputs are dealt out one by one to {scope}, targets in blocks", dealt.argsort()
    for seed in _SEEDS:
        drawn = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
        yield f"targets are shuffled by torch.randperm of seed {seed}, inputs are not", drawn
        yield f"inputs are shuffled by torch.randperm of seed {seed}, targets are not", drawn.argsort()
