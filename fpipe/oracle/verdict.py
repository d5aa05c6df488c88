"""Judge gradients from elsewhere: equal, to rounding, or by which mistake they differ from plain autograd's.

    scale * sum over microbatches i and stages s that use a parameter of times[i,s] * part[i,s]
    found = 4 x expected  -->  "4 x: summed over 4 microbatches or ranks instead of averaged?"

The fewest mistakes that explain all gradients are named, simple ones first. A gradient of few numbers fits many of them
by chance; the other gradients tell which of them was made.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Literal

import torch
from torch import Tensor

from fpipe.model import Reduction
from fpipe.oracle.differences import difference_in_words
from fpipe.verification.report import distance, is_finite, largest, norm, tolerance, vanish, wide


@dataclass(frozen=True)
class Mistake:
    """A mistake in adding up gradients: microbatches, or the use in a stage, count otherwise, and all is scaled.

    Attributes:
        counts: how often each microbatch counts; empty where all count once.
        stage, times: the use that counts so many times (0 or 2).
        even: all microbatches count the same, although they differ in rows, or in what a loss counts.

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
    even: bool = False
    reduction: Reduction = "mean"

    @property
    def plain(self) -> bool:
        """Whether its scale is one that a mistake makes."""
        return plain(self.scale)

    def __str__(self) -> str:
        if self.counts:
            sentence = self._counts_in_words()
        elif self.stage is not None:
            sentence = f"the use in stage {self.stage} {'is missing' if self.times == 0 else 'counts twice'}"
        elif self.even:
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
        """Say the scale, and what often is behind it."""
        scale = self.scale
        if scale == 0.0:
            return "0: nothing was added to it"
        if scale == -1.0:
            return "-1 x: the sign is turned"
        if not plain(scale):
            return f"{scale:.6g} x"
        is_more = scale > 1.0
        count = round(scale if is_more else 1.0 / scale)
        times = f"{count} x" if is_more else f"1/{count} x"
        if count > _MOST_RANKS:
            return f"{times}: a loss scale that was {'not divided out' if is_more else 'divided out twice'}?"
        parts = f"the {count} microbatches or {count}" if count == self.microbatches else f"{count} microbatches or"
        if is_more == (self.reduction == "sum"):
            mistake = "once too often"
        else:
            mistake = f"instead of {'averaged' if is_more else 'summed'}"
        return f"{times}: {'summed' if is_more else 'averaged'} over {parts} ranks {mistake}?"


_MOST_RANKS = 1024


def plain(scale: float) -> bool:
    """Whether a scale is one that a mistake makes: a whole number or one by it, up to 1024 or a power of two, or -1, 0.

    >>> [plain(scale) for scale in (4.0, 0.125, 65536.0, -1.0, 0.0, 0.73)]
    [True, True, True, True, True, False]
    """
    if scale in (0.0, -1.0):
        return True
    count = scale if scale >= 1.0 else 1.0 / scale
    return scale > 0 and count == round(count) and (count <= _MOST_RANKS or log2(count) == round(log2(count)))


def plainest(scale: float) -> float:
    """Return the plain scale nearest by, or the scale itself.

    >>> plainest(3.999), plainest(-0.98), plainest(0.26)
    (4.0, -1.0, 0.25)
    """
    size = abs(scale)
    if size < 1e-300:
        return 0.0
    near = float(round(size)) if size >= 1.0 else 1.0 / round(1.0 / size)
    near = near if scale > 0 else -near
    return near if plain(near) else scale


@dataclass(frozen=True)
class Gradient:
    """A gradient from elsewhere beside plain autograd's.

    Attributes:
        name: what errors call it.
        found, expected: both, of one shape.
        bitwise: whether they agree bit by bit.
        parts: what the expected one is the sum of, by microbatch and by stage that uses the parameter; empty where that
            is not known.
    """

    name: str
    found: Tensor
    expected: Tensor
    bitwise: bool = False
    parts: Mapping[tuple[int, int], Tensor] = field(default_factory=dict[tuple[int, int], Tensor])


@dataclass(frozen=True)
class Verdict:
    """The verdict on one gradient, in a word and in words."""

    kind: Literal["bitwise", "rounding", "mistake", "unknown"]
    words: str
    mistake: Mistake | None = None


def judge(gradients: Sequence[Gradient], weights: Sequence[float], reduction: Reduction = "mean") -> list[Verdict]:
    """Judge each gradient.

    Args:
        gradients: with their parts, if microbatches and uses are to be told apart.
        weights: the rows of each microbatch, or what its loss counts.
        reduction: how the model's loss is reduced.

    >>> right = torch.tensor([1.0, 2.0, 3.0])
    >>> print(judge([Gradient("w", 4 * right, right)], [2, 2])[0].words)
    4 x: summed over 4 microbatches or ranks instead of averaged?
    """
    size = norm(gradient.expected for gradient in gradients)
    equal = [_equal(gradient, size) for gradient in gradients]
    left = {k for k, gradient in enumerate(gradients) if equal[k] is None or not is_sure(gradient)}
    patterns = [*_patterns([gradients[k] for k in left], len(weights), reduction)]
    fits = {k: _fits(gradients[k], patterns, weights, equal[k] is not None) for k in left}
    pool = dict.fromkeys(
        mistake for k in fits for mistake in fits[k] if mistake.plain or gradients[k].expected.numel() > 1
    )
    verdicts = dict(enumerate(equal))
    while left and pool:
        explained = {mistake: {k for k in left if _explains(mistake, fits[k])} for mistake in pool}
        best = max(pool, key=lambda mistake: (len(explained[mistake]), mistake.plain, mistake.scale == 1.0))
        verdicts |= {k: Verdict("mistake", str(best), best) for k in explained[best]}
        left -= explained[best]
        pool.pop(best)
    return [
        verdicts[k] or Verdict("unknown", difference_in_words(gradient.found, gradient.expected))
        for k, gradient in enumerate(gradients)
    ]


def _equal(gradient: Gradient, size: float) -> Verdict | None:
    """Return a verdict if the gradient is the right one; `size` is the norm of all gradients."""
    found, expected = gradient.found, gradient.expected
    if gradient.bitwise:
        return Verdict("bitwise", "equal, bit by bit")
    if distance(found, expected) <= tolerance(found, expected):
        error = largest(found, expected)
        ulps = ceil(error / (float(wide(expected).abs().max()) * tolerance(found, expected) ** 2)) if error else 0
        return Verdict("rounding", f"equal to rounding, {ulps} ulps of its largest number at most")
    if vanish(found, expected, size):
        return Verdict("rounding", "zero but for the rounding of its terms")
    return None


def is_sure(gradient: Gradient) -> bool:
    """Whether a gradient differs so little that nothing else than rounding need be looked for."""
    found, expected = gradient.found, gradient.expected
    return gradient.bitwise or distance(found, expected) <= tolerance(found, expected) ** 1.5


def _patterns(gradients: Sequence[Gradient], microbatches: int, reduction: Reduction) -> Iterator[Mistake]:
    """Yield the mistakes that are tried, up to a scale."""
    scale_alone = Mistake(microbatches, reduction=reduction)
    yield scale_alone
    stages_by_gradient = [{stage for _, stage in gradient.parts} for gradient in gradients]
    if microbatches > 1 and any(stages_by_gradient):
        for index in range(microbatches):
            yield from (replace(scale_alone, counts=_one_counts(times, index, microbatches)) for times in (0, 2))
        yield replace(scale_alone, even=True)
        fitted = dict.fromkeys(_fitted_counts(gradient, microbatches) for gradient in gradients)
        yield from (replace(scale_alone, counts=counts) for counts in fitted if sum(count != 1 for count in counts) > 1)
    for stage in sorted({stage for stages in stages_by_gradient if len(stages) > 1 for stage in stages}):
        yield from (replace(scale_alone, stage=stage, times=times) for times in (0, 2))


def _one_counts(times: int, index: int, microbatches: int) -> tuple[int, ...]:
    return tuple(times if k == index else 1 for k in range(microbatches))


def _fitted_counts(gradient: Gradient, microbatches: int) -> tuple[int, ...]:
    """Return how often each microbatch counts in a gradient, up to a scale, by least squares; () where it is unsure.

    The normal equations have one row a microbatch, however large the gradient is.
    """
    shares = [wide(torch.zeros_like(gradient.expected)).flatten() for _ in range(microbatches)]
    for (index, _), part in gradient.parts.items():
        shares[index] += wide(part).flatten()
    found = wide(gradient.found).flatten()
    if found.numel() < _NUMBERS_A_COUNT * microbatches or not is_finite(found):
        return ()
    gram = torch.stack([torch.stack([torch.vdot(a, b).real for b in shares]) for a in shares])
    if not float(torch.linalg.cond(gram)) < _WORST_CONDITION:
        return ()
    counts = torch.linalg.solve(gram, torch.stack([torch.vdot(share, found).real for share in shares]))
    least = counts[counts.abs() > 1e-2 * counts.abs().max()].abs().min()
    return tuple(round(float(count / least)) for count in counts)


_NUMBERS_A_COUNT = 2
_WORST_CONDITION = 1e10


def _applied(pattern: Mistake, gradient: Gradient, weights: Sequence[float]) -> Tensor | None:
    """Return the gradient that a mistake would give, but for the scale; None where it stays as it is."""
    mean = sum(weights) / len(weights)
    changes: list[Tensor] = []
    for (index, stage), part in gradient.parts.items():
        if pattern.even:
            factor = mean / weights[index] if weights[index] else 1
        else:
            factor = pattern.times if stage == pattern.stage else pattern.counts[index] if pattern.counts else 1
        if factor != 1:
            changes.append(wide(part) * (factor - 1.0))
    right = wide(gradient.expected)
    if changes:
        return sum(changes, right)
    return right if pattern.stage is None and not pattern.counts and not pattern.even else None


def _fits(
    gradient: Gradient, patterns: Sequence[Mistake], weights: Sequence[float], equal: bool
) -> dict[Mistake, None]:
    """Return the mistakes that give what was found ten times closer than none does.

    Of a gradient that is equal, to rounding, only those that count something otherwise.
    """
    if not is_finite(gradient.found):
        return {}
    found = wide(gradient.found).flatten()
    error = float((found - wide(gradient.expected).flatten()).norm())
    limit = min(tolerance(gradient.found, gradient.expected) * float(found.norm()), error / 10)
    fits: dict[Mistake, None] = {}
    for pattern in patterns[1 if equal else 0 :]:  # the first is a scale alone
        mistaken = _applied(pattern, gradient, weights)
        if mistaken is None or not mistaken.count_nonzero():
            continue
        mistaken = mistaken.flatten()
        scale = float(torch.vdot(mistaken, found).real / torch.vdot(mistaken, mistaken).real)
        for near in (1.0,) if equal else (plainest(scale), scale):
            if float((found - near * mistaken).norm()) <= limit:
                fits[replace(pattern, scale=near)] = None
                break
    return fits


def _explains(mistake: Mistake, fits: Mapping[Mistake, None]) -> bool:
    """Whether a gradient fits a mistake, or the same with a scale nearby."""
    near = (fit for fit in fits if abs(fit.scale - mistake.scale) <= 1e-3 * abs(mistake.scale))
    return any(replace(fit, scale=mistake.scale) == mistake for fit in near)
