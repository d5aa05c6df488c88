"""List what is often done wrong in a training step, each as another loop that makes the mistake.

the norm misses other ranks        -->        gradients of each stage are clipped by its own norm
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Model, TiedLeaf
from fpipe.optimizers.op_words import UpdateWords
from fpipe.optimizers.rules import STEP
from fpipe.program import Value
from fpipe.single_device.result import Result
from fpipe.single_device.training_loop import Norm, total_norm, training_loop

IGNORED = -100
"""The class that torch's losses do not count."""

Parts = Sequence[tuple[Any, int]]
"""The microbatches of a step, each with its rows."""


Change = Callable[[int, Parts, Result, Callable[..., Result]], Any]
"""The gradients of a step, given its number, its microbatches, what is right, and gradients of some microbatches."""


@dataclass(frozen=True)
class Loop:
    """A training loop: what it trains, on what, and how.

    Attributes:
        model, params, opt, state: before the first step.
        steps: the microbatches of each step.
        words, rates: how parameters are updated, and the learning rate of each step.
        plain: gradients of some microbatches, whose weights are those among `rows`.
        change: what becomes of the gradients of a step.
        norm: what a clip compares with.
        behind: by how many steps parameters are behind that gradients are taken of.
    """

    model: Model
    params: Sequence[Any]
    opt: Sequence[Any]
    state: Sequence[Any] | None
    steps: Sequence[Parts]
    words: UpdateWords
    rates: Sequence[float | None]
    plain: Callable[..., Result]
    keys: Sequence[int | None]
    change: Change | None = None
    norm: Norm = total_norm
    behind: int = 0

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
            yield f"gradients are summed over {of} and not averaged", replace(loop, change=_scaled(k))
            yield f"gradients are averaged over {of} once too often", replace(loop, change=_scaled(1 / k))
    yield "gradients have the wrong sign", replace(loop, change=_scaled(-1))
    if many > 1:
        yield "only the last microbatch counts: gradients are overwritten, not accumulated", replace(loop, change=_last)
        for k in range(many):
            yield f"microbatch {k} counts twice", replace(loop, change=_times(k, 2))
            yield f"microbatch {k} is missing", replace(loop, change=_times(k, 0))
        yield "gradients are added up in bfloat16", replace(loop, change=_in_bfloat16)
    for k in range(2, many):
        if many % k == 0:
            words = f"gradients that are there already are divided again at each round of {k} microbatches"
            yield words, replace(loop, change=_divided_again(k))
    for uses in loop.model.tied_uses:
        for use in uses:
            words = f"the gradient of the tied {uses[0].name!r} is that of its use in stage {use.stage} alone"
            yield words, replace(loop, change=_use_alone(uses[0], use))


def _of_rows(loop: Loop) -> Named:
    """Gradients of other rows, or of rows that count otherwise."""
    many = len(loop.steps[0])
    for k in dict.fromkeys(count for part in loop.steps[0][:1] for count in _tokens(part[0][1])):
        words = f"gradients are summed over the {k * many} rows or tokens and not averaged"
        yield words, replace(loop, change=_scaled(k * many))
        if many > 1:
            words = f"gradients are summed over the {k} rows or tokens of each microbatch and not averaged"
            yield words, replace(loop, change=_scaled(k))
    if many > 1:
        yield "each microbatch weighs as much as it has valid targets, not rows", replace(loop, change=_by_tokens)
        for k in (2, 4, 8):
            for j in range(k) if many % k == 0 else ():
                words = f"all {k} replicas are handed the same rows, those of replica {j}"
                yield words, replace(loop, change=_rows_of(j, k))
        yield "targets are those of the next microbatch", replace(loop, change=_shifted(1))
        yield "targets are those of the microbatch before", replace(loop, change=_shifted(-1))


def _of_clips(loop: Loop) -> Named:
    """Norms that miss or repeat something."""
    clip = loop.words.clip
    if clip is None:
        yield "gradients are clipped to 1", replace(loop, words=loop.words._replace(clip=1.0))
        return
    bare = replace(loop, words=loop.words._replace(clip=None))
    yield "gradients are not clipped", bare
    words = "each stage is clipped by its own norm: the norm misses other ranks"
    yield words, replace(bare, change=_by_stage(clip))
    yield "each parameter is clipped by its own norm", replace(bare, change=_by_leaf(clip))
    if loop.model.tied_uses:
        yield "the norm counts tied parameters once for each use", replace(loop, norm=partial(_with_ties, loop))
    for k in (2, 4, 8):
        words = f"the norm counts everything {k} times, as shards or replicas have it"
        yield words, replace(loop, norm=partial(_repeated, k))
    if len(loop.steps[0]) > 1:
        words = "each microbatch (or replica) is clipped before gradients are added up"
        yield words, replace(bare, change=_before_sums(clip))


def _of_rules(loop: Loop) -> Named:
    """Another optimizer, or other settings of it."""
    words, settings = loop.words, dict(loop.words.settings)

    def other(by: str = words.by, **more: Any) -> Loop:
        return replace(loop, words=words._replace(by=by, settings=tuple((settings | more).items())))

    decay = settings.get("weight_decay", 0.01 if words.by == "AdamW" else 0.0)
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
        if settings.get("betas", (0.9, 0.999)) != (0.9, 0.999):
            yield f"betas are (0.9, 0.999), not {settings['betas']}", other(betas=(0.9, 0.999))
    if words.by == "SGD" and settings.get("momentum"):
        yield "there is no momentum", other(momentum=0.0)
    if decay:
        yield "there is no weight decay", other(weight_decay=0.0)
    else:
        yield "there is a weight decay of 0.01", other(weight_decay=0.01)
    if words.groups:
        same = replace(loop, words=words._replace(groups=()))
        yield "groups are not told apart: all parameters have the same settings", same
    rates = [*loop.rates]
    if len({*rates}) > 1:
        yield "the learning rate is that of the step before", replace(loop, rates=[rates[0], *rates[:-1]])
        yield "the learning rate is that of the next step", replace(loop, rates=[*rates[1:], rates[-1]])


def _of_steps(loop: Loop) -> Named:
    """Steps that read what is old, or too much."""
    many = len(loop.steps[0])
    if len(loop.steps) > 1:
        yield "gradients are of parameters of one step before (stale)", replace(loop, behind=1)
        yield "gradients of the steps before are still there: zero_grad is missing", replace(loop, change=_adding())
        yield "all steps are on the first batch", replace(loop, steps=[loop.steps[0]] * len(loop.steps))
        yield "the batches come in reverse", replace(loop, steps=[*loop.steps][::-1])
    if many > 1:
        single = [[part] for parts in loop.steps for part in parts]
        rates, keys = ([one for one in some for _ in range(many)] for some in (loop.rates, loop.keys))
        yield "the optimizer steps after each microbatch", replace(loop, steps=single, rates=rates, keys=keys)


def _scaled(by: float) -> Change:
    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return _weighed(made.grads, by)

    return change


def _last(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
    return _weighed(of(parts[-1:]).grads, _share(parts, -1))


def _times(k: int, times: int) -> Change:
    """Gradients in which a microbatch counts so many times."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return _plus(made.grads, _weighed(of([parts[k]]).grads, _share(parts, k) * (times - 1)))

    return change


def _in_bfloat16(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
    """Gradients that are rounded to bfloat16 whenever those of a microbatch are added."""

    def low(leaf: Any) -> Any:
        return leaf if leaf is None else leaf.to(torch.bfloat16)

    each = (tree.tree_map(low, _weighed(of([part]).grads, _share(parts, k))) for k, part in enumerate(parts))
    return tree.tree_map(_like, reduce(_plus, each), made.grads)


def _like(leaf: Any, other: Any) -> Any:
    return leaf if leaf is None else leaf.to(other.dtype)


def _divided_again(size: int) -> Change:
    """Gradients that a round of so many microbatches divides, those of the rounds before among them."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        rounds, total = len(parts) // size, None
        for at in range(0, len(parts), size):
            own = _weighed(of(parts[at : at + size]).grads, size / rounds)
            total = _weighed(own if total is None else _plus(total, own), 1 / size)
        return total

    return change


def _rows_of(replica: int, replicas: int) -> Change:
    """Gradients of the microbatches of one replica alone."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        size = len(parts) // replicas
        return of(parts[replica * size : (replica + 1) * size]).grads

    return change


def _shifted(by: int) -> Change:
    """Gradients where the inputs of a microbatch meet the targets of another."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        if len({size for _, size in parts}) > 1:
            return made.grads
        targets = [target for (_, target), _ in parts]
        others = [*targets[by:], *targets[:by]]
        return of([((x, target), size) for ((x, _), size), target in zip(parts, others, strict=True)]).grads

    return change


def _by_tokens(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
    """Gradients as a mean over what the loss does not ignore in all microbatches."""
    counts = [_tokens(target)[-1] for (_, target), _ in parts]
    each = [_weighed(of([part]).grads, count / max(sum(counts), 1)) for part, count in zip(parts, counts, strict=True)]
    return reduce(_plus, each)


def _tokens(target: Any) -> list[int]:
    """How many rows, numbers and valid numbers a target has: what a sum may run over."""
    leaf = next((one for one in tree.leaves(target) if isinstance(one, Tensor) and one.ndim), None)
    if leaf is None:
        return [1]
    return [len(leaf), leaf.numel(), int((leaf != IGNORED).sum())]


def _use_alone(owner: TiedLeaf, use: TiedLeaf) -> Change:
    """Gradients in which a tied leaf has that of one use."""

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        noted: dict[Value, Any] = {}

        def see(value: Value, found: Any) -> None:
            noted[value] = found

        of(parts, see=see)
        own = [noted[Value("g", use.stage, index, port=use.bundle)][0] for index in range(len(parts))]
        stages = [*made.grads]
        stages[owner.owner] = {**stages[owner.owner], owner.name: sum(own[1:], own[0])}
        return tuple(stages)

    return change


def _by_stage(most: float) -> Change:
    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return tuple(_clipped(stage, most) for stage in made.grads)

    return change


def _by_leaf(most: float) -> Change:
    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        return tree.tree_map(partial(_clipped, most=most), made.grads)

    return change


def _before_sums(most: float) -> Change:
    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        each = [_weighed(_clipped(of([part]).grads, most), _share(parts, k)) for k, part in enumerate(parts)]
        return reduce(_plus, each)

    return change


def _adding() -> Change:
    """Gradients to which those of all steps before are added."""
    before: list[Any] = []

    def change(number: int, parts: Parts, made: Result, of: Callable[..., Result]) -> Any:
        before[:] = [made.grads if number == 0 else _plus(before[0], made.grads)]
        return before[0]

    return change


def _share(parts: Parts, k: int) -> float:
    return parts[k][1] / sum(size for _, size in parts)


def _weighed(grads: Any, by: float) -> Any:
    def weighed(leaf: Any) -> Any:
        return leaf if leaf is None else leaf * by

    return tree.tree_map(weighed, grads)


def _plus(one: Any, other: Any) -> Any:
    def added(a: Any, b: Any) -> Any:
        return b if a is None else a if b is None else a + b

    return tree.tree_map(added, one, other)


def _clipped(grads: Any, most: float) -> Any:
    """Gradients scaled to a norm of their own."""
    found = [leaf for leaf in tree.leaves(grads) if leaf is not None]
    return _weighed(grads, float(torch.clamp(most / (total_norm([found]) + 1e-6), max=1.0))) if found else grads


def _repeated(times: int, stages: Sequence[Sequence[Tensor]]) -> Tensor:
    return total_norm(stages) * times**0.5


def _with_ties(loop: Loop, stages: Sequence[Sequence[Tensor]]) -> Tensor:
    """The norm in which a tied parameter counts once for each stage that uses it."""
    squares = total_norm(stages) ** 2
    for uses in loop.model.tied_uses:
        names = [*loop.params[uses[0].owner]]
        squares = squares + (len(uses) - 1) * stages[uses[0].owner][names.index(uses[0].name)].norm() ** 2
    return squares.sqrt()


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
