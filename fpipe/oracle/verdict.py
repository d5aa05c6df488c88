"""Judge gradients of another pipeline: equal, equal to rounding, or which mistake explains the difference.

    scale * sum over microbatches i and stages s that use a parameter of times[i,s] * part[i,s]
    found = 4 x expected  -->  "4 x: summed over 4 microbatches or ranks instead of averaged?"

The fewest mistakes that explain all gradients are named, simple ones first. A gradient of few numbers fits many
mistakes by chance; the other gradients tell which one was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Literal

import torch
from torch import Tensor

from fpipe.model import Reduction
from fpipe.oracle.differences import describe_difference
from fpipe.verification.report import (
    are_negligible,
    is_finite,
    joint_norm,
    largest_difference,
    relative_distance,
    rounding_tolerance,
    to_double,
)


@dataclass(frozen=True)
class Mistake:
    """A mistake in adding up gradients: a microbatch or the use in a stage is counted wrongly, and all is scaled.

    Attributes:
        counts: how often each microbatch counts; empty where all count once.
        stage, times: the use that counts `times` times, 0 or 2.
        weighs_evenly: all microbatches weigh the same, although they differ in rows, or in what a loss counts.

    >>> print(Mistake(microbatches=4, scale=4.0))
    4 x: summed over the 4 microbatches or 4 ranks instead of averaged?
    >>> print(Mistake(microbatches=4, counts=(1, 0, 1, 0)))
    microbatches 1 and 3 of 4 are missing
    >>> print(Mistake(microbatches=4, stage=3, times=2, scale=0.25))
    the use in stage 3 counts twice, and all is 1/4 x: averaged over the 4 microbatches or 4 ranks once too often?
    """

    microbatches: int
    scale: float = 1.0
    counts: tuple[int, ...] = ()
    stage: int | None = None
    times: int = 1
    weighs_evenly: bool = False
    reduction: Reduction = "mean"

    @property
    def is_plain(self) -> bool:
        """Whether the scale is one that a mistake causes, as `is_plain_scale` says."""
        return is_plain_scale(self.scale)

    def __str__(self) -> str:
        if self.counts:
            sentence = self._counts_in_words()
        elif self.stage is not None:
            sentence = f"the use in stage {self.stage} {'is missing' if self.times == 0 else 'counts twice'}"
        elif self.weighs_evenly:
            differ = "their counts differ" if self.reduction == "count" else "they differ in rows"
            sentence = f"each microbatch counts the same, although {differ}"
        else:
            return self._scale_in_words()
        return sentence if self.scale == 1.0 else f"{sentence}, and all is {self._scale_in_words()}"

    def _counts_in_words(self) -> str:
        if not {*self.counts} <= {0, 1, 2}:
            return f"the {self.microbatches} microbatches count {', '.join(map(str, self.counts))} times"
        missing, repeated = ([str(k) for k, count in enumerate(self.counts) if count == times] for times in (0, 2))
        of, sentences = f" of {self.microbatches}", list[str]()
        for numbers, verb, plural in (
            (missing, "is missing", "are missing"),
            (repeated, "counts twice", "count twice"),
        ):
            if len(numbers) == 1:
                sentences.append(f"microbatch {numbers[0]}{of} {verb}")
            elif numbers:
                sentences.append(f"microbatches {', '.join(numbers[:-1])} and {numbers[-1]}{of} {plural}")
            of = "" if sentences else of
        return ", and ".join(sentences)

    def _scale_in_words(self) -> str:
        """Describe the scale, and its usual cause."""
        scale = self.scale
        if scale == 0.0:
            return "0: nothing was added to it"
        if scale == -1.0:
            return "-1 x: the sign is turned"
        if not is_plain_scale(scale):
            return f"{scale:.6g} x"
        is_more = scale > 1.0
        count = round(scale if is_more else 1.0 / scale)
        times = f"{count} x" if is_more else f"1/{count} x"
        if count > _MAX_RANKS:
            return f"{times}: a loss scale that was {'not divided out' if is_more else 'divided out twice'}?"
        parts = f"the {count} microbatches or {count}" if count == self.microbatches else f"{count} microbatches or"
        if is_more == (self.reduction == "sum"):
            mistake = "once too often"
        else:
            mistake = f"instead of {'averaged' if is_more else 'summed'}"
        return f"{times}: {'summed' if is_more else 'averaged'} over {parts} ranks {mistake}?"


_MAX_RANKS = 1024


def is_plain_scale(scale: float) -> bool:
    """Whether a scale is one that a mistake causes: n or 1/n, with n up to 1024 or a power of two, or -1 or 0.

    >>> [is_plain_scale(scale) for scale in (4.0, 0.125, 65536.0, -1.0, 0.0, 0.73)]
    [True, True, True, True, True, False]
    """
    if scale in (0.0, -1.0):
        return True
    count = scale if scale >= 1.0 else 1.0 / scale
    return scale > 0 and count == round(count) and (count <= _MAX_RANKS or log2(count) == round(log2(count)))


def nearest_plain_scale(scale: float) -> float:
    """Return the nearest plain scale, or the scale itself if that is not plain.

    >>> nearest_plain_scale(3.999), nearest_plain_scale(-0.98), nearest_plain_scale(0.26)
    (4.0, -1.0, 0.25)
    """
    # 1 / size of a smaller number would overflow.
    size = abs(scale)
    if size < 1e-300:
        return 0.0
    near = float(round(size)) if size >= 1.0 else 1.0 / round(1.0 / size)
    near = near if scale > 0 else -near
    return near if is_plain_scale(near) else scale


@dataclass(frozen=True)
class Gradient:
    """A gradient of another pipeline and the right one.

    Attributes:
        name: the name of the parameter in errors.
        actual, expected: the other pipeline's gradient and plain autograd's, of one shape.
        bitwise: whether they agree bitwise.
        parts: the addends of the expected gradient, by microbatch and by stage that uses the parameter; empty where
            they are not known.
    """

    name: str
    actual: Tensor
    expected: Tensor
    bitwise: bool = False
    parts: Mapping[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])


@dataclass(frozen=True)
class Verdict:
    """The verdict on one gradient: its kind, a sentence for the report, and the mistake if one explains it."""

    kind: Literal["bitwise", "rounding", "mistake", "unknown"]
    sentence: str
    mistake: Mistake | None = None


def judge(gradients: Sequence[Gradient], weights: Sequence[float], reduction: Reduction = "mean") -> list[Verdict]:
    """Judge each gradient.

    Args:
        gradients: the gradients, with their parts if microbatches and uses are to be distinguished.
        weights: the number of rows of each microbatch, or of what its loss counts.
        reduction: how the model's loss is reduced.

    >>> right = torch.tensor([1.0, 2.0, 3.0])
    >>> print(judge([Gradient("w", 4 * right, right)], [2, 2])[0].sentence)
    4 x: summed over 4 microbatches or ranks instead of averaged?
    """
    total_norm = joint_norm(gradient.expected for gradient in gradients)
    equal_verdicts = [_verdict_if_equal(gradient, total_norm) for gradient in gradients]
    # A gradient that is equal to rounding is tried as well, unless it is sure: a small mistake may hide in it.
    unexplained = {i for i, gradient in enumerate(gradients) if equal_verdicts[i] is None or not is_sure(gradient)}
    patterns = [*_patterns([gradients[index] for index in unexplained], len(weights), reduction)]
    fits = {
        index: _fitting_mistakes(gradients[index], patterns, weights, equal_verdicts[index] is not None)
        for index in unexplained
    }
    candidates = dict.fromkeys(
        mistake
        for index in fits
        for mistake in fits[index]
        if mistake.is_plain or gradients[index].expected.numel() > 1
    )
    verdicts = dict(enumerate(equal_verdicts))
    # Greedy set cover: name the mistake that explains most of the gradients that are left, and repeat.
    while unexplained and candidates:
        explained = {mistake: {i for i in unexplained if _explains(mistake, fits[i])} for mistake in candidates}
        best = max(candidates, key=lambda mistake: (len(explained[mistake]), mistake.is_plain, mistake.scale == 1.0))
        verdicts |= {index: Verdict("mistake", str(best), best) for index in explained[best]}
        unexplained -= explained[best]
        candidates.pop(best)
    return [
        verdicts[index] or Verdict("unknown", describe_difference(gradient.actual, gradient.expected))
        for index, gradient in enumerate(gradients)
    ]


def _verdict_if_equal(gradient: Gradient, total_norm: float) -> Verdict | None:
    actual, expected = gradient.actual, gradient.expected
    if gradient.bitwise:
        return Verdict("bitwise", "equal, bit by bit")
    if relative_distance(actual, expected) <= rounding_tolerance(actual, expected):
        error = largest_difference(actual, expected)
        ulps = (
            ceil(error / (float(to_double(expected).abs().max()) * rounding_tolerance(actual, expected) ** 2))
            if error
            else 0
        )
        return Verdict("rounding", f"equal to rounding, {ulps} ulps of its largest number at most")
    if are_negligible(actual, expected, total_norm):
        return Verdict("rounding", "zero but for the rounding of its terms")
    return None


def is_sure(gradient: Gradient) -> bool:
    """Whether a gradient differs so little that only rounding can be the cause."""
    actual, expected = gradient.actual, gradient.expected
    return gradient.bitwise or relative_distance(actual, expected) <= rounding_tolerance(actual, expected) ** 1.5


def _patterns(gradients: Sequence[Gradient], microbatches: int, reduction: Reduction) -> Iterator[Mistake]:
    """Yield the mistakes to try, without their scale, which is fitted to each gradient."""
    scale_alone = Mistake(microbatches, reduction=reduction)
    yield scale_alone
    stages_by_gradient = [{stage for _, stage in gradient.parts} for gradient in gradients]
    # By microbatch: one is missing or counts twice, all weigh the same, or counts that are fitted to the gradients.
    if microbatches > 1 and any(stages_by_gradient):
        for index in range(microbatches):
            yield from (replace(scale_alone, counts=_counts_with(times, index, microbatches)) for times in (0, 2))
        yield replace(scale_alone, weighs_evenly=True)
        fitted = dict.fromkeys(_fitted_counts(gradient, microbatches) for gradient in gradients)
        yield from (replace(scale_alone, counts=counts) for counts in fitted if sum(count != 1 for count in counts) > 1)
    for stage in sorted({stage for stages in stages_by_gradient if len(stages) > 1 for stage in stages}):
        yield from (replace(scale_alone, stage=stage, times=times) for times in (0, 2))


def _counts_with(times: int, index: int, microbatches: int) -> tuple[int, ...]:
    return tuple(times if other_index == index else 1 for other_index in range(microbatches))


def _fitted_counts(gradient: Gradient, microbatches: int) -> tuple[int, ...]:
    """Return how often each microbatch counts in a gradient, up to a scale, by least squares; () where it is unsure.

    Minimize |actual - sum_i counts[i] * share[i]|. The normal equations have one row for each microbatch, however large
    the gradient is.
    """
    shares = [to_double(torch.zeros_like(gradient.expected)).flatten() for _ in range(microbatches)]
    for (index, _), part in gradient.parts.items():
        shares[index] += to_double(part).flatten()
    actual = to_double(gradient.actual).flatten()
    if actual.numel() < _NUMBERS_A_COUNT * microbatches or not is_finite(actual):
        return ()
    # gram[i, j] = <share i, share j>. Where it is nearly singular, microbatches cannot be told apart.
    gram = torch.stack([torch.stack([torch.vdot(a, b).real for b in shares]) for a in shares])
    if not float(torch.linalg.cond(gram)) < _WORST_CONDITION:
        return ()
    counts = torch.linalg.solve(gram, torch.stack([torch.vdot(share, actual).real for share in shares]))
    smallest = counts[counts.abs() > 1e-2 * counts.abs().max()].abs().min()
    # Up to a scale: the smallest count that is not zero becomes 1.
    return tuple(round(float(count / smallest)) for count in counts)


_NUMBERS_A_COUNT = 2
_WORST_CONDITION = 1e10


def _apply_pattern(pattern: Mistake, gradient: Gradient, weights: Sequence[float]) -> Tensor | None:
    """Return the gradient that a mistake without its scale would give; None if it leaves this gradient unchanged."""
    mean = sum(weights) / len(weights)
    changes: list[Tensor] = []
    for (index, stage), part in gradient.parts.items():
        if pattern.weighs_evenly:
            factor = mean / weights[index] if weights[index] else 1
        else:
            factor = pattern.times if stage == pattern.stage else pattern.counts[index] if pattern.counts else 1
        if factor != 1:
            changes.append(to_double(part) * (factor - 1.0))
    right = to_double(gradient.expected)
    if changes:
        return sum(changes, right)
    return right if pattern.stage is None and not pattern.counts and not pattern.weighs_evenly else None


def _fitting_mistakes(
    gradient: Gradient, patterns: Sequence[Mistake], weights: Sequence[float], is_equal: bool
) -> dict[Mistake, None]:
    """Return the mistakes whose gradient is at least ten times closer to the actual one than the right gradient is.

    For a gradient that is equal to rounding, only mistakes that count something differently are tried.
    """
    if not is_finite(gradient.actual):
        return {}
    actual = to_double(gradient.actual).flatten()
    error = float((actual - to_double(gradient.expected).flatten()).norm())
    limit = min(rounding_tolerance(gradient.actual, gradient.expected) * float(actual.norm()), error / 10)
    fits: dict[Mistake, None] = {}
    # The first pattern is a scale alone.
    for pattern in patterns[1 if is_equal else 0 :]:
        mistaken = _apply_pattern(pattern, gradient, weights)
        if mistaken is None or not mistaken.count_nonzero():
            continue
        mistaken = mistaken.flatten()
        # The least-squares scale: <mistaken, actual> / <mistaken, mistaken>.
        scale = float(torch.vdot(mistaken, actual).real / torch.vdot(mistaken, mistaken).real)
        for fitted_scale in (1.0,) if is_equal else (nearest_plain_scale(scale), scale):
            if float((actual - fitted_scale * mistaken).norm()) <= limit:
                fits[replace(pattern, scale=fitted_scale)] = None
                break
    return fits


def _explains(mistake: Mistake, fits: Mapping[Mistake, None]) -> bool:
    near = (fit for fit in fits if abs(fit.scale - mistake.scale) <= 1e-3 * abs(mistake.scale))
    return any(replace(fit, scale=mistake.scale) == mistake for fit in near)
