"""Judge gradients from elsewhere: equal, to rounding, or by which mistake they differ from plain autograd's.

    scale * sum over microbatches i and stages s that use a parameter of times[i,s] * part[i,s]
    found = 4 x expected  -->  "4 x: summed over 4 microbatches or ranks instead of averaged?"

The fewest mistakes that explain all gradients are named, simple ones first. A gradient of few numbers fits many of them
by chance; which one is meant, the others say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil, log2
from typing import Literal

import torch
from torch import Tensor

from fpipe.model import Reduction
from fpipe.verification.report import distance, is_finite, largest, norm, tolerance, vanish, wide


@dataclass(frozen=True)
class Mistake:
    """A mistake: a microbatch or the use in a stage counts `times` (0 or 2), and all is scaled; `even`: all
    microbatches count the same, although they differ in rows, or in what a loss counts.

    >>> print(Mistake(microbatches=4, scale=4.0))
    4 x: summed over the 4 microbatches or 4 ranks instead of averaged?
    >>> print(Mistake(microbatches=4, microbatch=2, times=0))
    microbatch 2 of 4 is missing
    >>> print(Mistake(microbatches=4, stage=3, times=2, scale=0.25))
    the use in stage 3 counts twice, and all is 1/4 x: averaged over the 4 microbatches or 4 ranks once too often?
    """

    microbatches: int
    scale: float = 1.0
    microbatch: int | None = None
    stage: int | None = None
    times: int = 1
    even: bool = False
    reduction: Reduction = "mean"

    @property
    def plain(self) -> bool:
        """Whether its scale is one that a mistake makes."""
        return plain(self.scale)

    def __str__(self) -> str:
        how = "is missing" if self.times == 0 else "counts twice"
        if self.microbatch is not None:
            first = f"microbatch {self.microbatch} of {self.microbatches} {how}"
        elif self.stage is not None:
            first = f"the use in stage {self.stage} {how}"
        elif self.even:
            differ = "their counts differ" if self.reduction == "count" else "they differ in rows"
            first = f"each microbatch counts the same, although {differ}"
        else:
            return self._scaled()
        return first if self.scale == 1.0 else f"{first}, and all is {self._scaled()}"

    def _scaled(self) -> str:
        """The scale, and what often is behind it."""
        scale = self.scale
        if scale == 0.0:
            return "0: nothing was added to it"
        if scale == -1.0:
            return "-1 x: the sign is turned"
        if not plain(scale):
            return f"{scale:.6g} x"
        more = scale > 1.0
        many = round(scale if more else 1.0 / scale)
        times = f"{many} x" if more else f"1/{many} x"
        if many > _MANY:
            return f"{times}: a loss scale that was {'not divided out' if more else 'divided out twice'}?"
        the = f"the {many} microbatches or {many}" if many == self.microbatches else f"{many} microbatches or"
        other = (
            "once too often" if more == (self.reduction == "sum") else f"instead of {'averaged' if more else 'summed'}"
        )
        return f"{times}: {'summed' if more else 'averaged'} over {the} ranks {other}?"


_MANY = 1024


def plain(scale: float) -> bool:
    """Whether a scale is one that a mistake makes: a whole number or one by it, up to 1024 or a power of two, or -1, 0.

    >>> [plain(scale) for scale in (4.0, 0.125, 65536.0, -1.0, 0.0, 0.73)]
    [True, True, True, True, True, False]
    """
    if scale in (0.0, -1.0):
        return True
    many = scale if scale >= 1.0 else 1.0 / scale
    return scale > 0 and many == round(many) and (many <= _MANY or log2(many) == round(log2(many)))


def plainest(scale: float) -> float:
    """The plain scale nearest by, or itself.

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
    whole = norm(each.expected for each in gradients)
    patterns = [*_patterns(gradients, len(weights), reduction)]
    equal = [_equal(each, whole) for each in gradients]
    left = {at for at, each in enumerate(gradients) if equal[at] is None or not is_sure(each)}
    fits = {at: _fits(gradients[at], patterns, weights, equal[at] is not None) for at in left}
    tried = [(at, mistake) for at, found in fits.items() for mistake in found]
    pool = dict.fromkeys(mistake for at, mistake in tried if mistake.plain or gradients[at].expected.numel() > 1)
    verdicts = dict(enumerate(equal))
    while left and pool:
        explained = {mistake: {at for at in left if _explains(mistake, fits[at])} for mistake in pool}
        best = max(pool, key=lambda mistake: (len(explained[mistake]), mistake.plain, mistake.scale == 1.0))
        verdicts |= {at: Verdict("mistake", str(best), best) for at in explained[best]}
        left -= explained[best]
        pool.pop(best)
    return [verdicts[at] or Verdict("unknown", _unknown(each)) for at, each in enumerate(gradients)]


def _equal(gradient: Gradient, whole: float) -> Verdict | None:
    """A verdict, if the gradient is the right one."""
    found, expected = gradient.found, gradient.expected
    if gradient.bitwise:
        return Verdict("bitwise", "equal, bit by bit")
    if distance(found, expected) <= tolerance(found, expected):
        off = largest(found, expected)
        ulps = ceil(off / (float(wide(expected).abs().max()) * tolerance(found, expected) ** 2)) if off else 0
        return Verdict("rounding", f"equal to rounding, {ulps} ulps of its largest number at most")
    if vanish(found, expected, whole):
        return Verdict("rounding", "zero but for the rounding of its terms")
    return None


def is_sure(gradient: Gradient) -> bool:
    """Whether a gradient differs too little for a look at what else than rounding it could be."""
    found, expected = gradient.found, gradient.expected
    return gradient.bitwise or distance(found, expected) <= tolerance(found, expected) ** 1.5


def _patterns(gradients: Sequence[Gradient], microbatches: int, reduction: Reduction) -> Iterator[Mistake]:
    """The mistakes that are tried, up to a scale."""
    none = Mistake(microbatches, reduction=reduction)
    yield none
    used = [{stage for _, stage in each.parts} for each in gradients]
    if microbatches > 1 and any(used):
        yield from (replace(none, microbatch=index, times=times) for index in range(microbatches) for times in (0, 2))
        yield replace(none, even=True)
    tied = sorted({stage for stages in used if len(stages) > 1 for stage in stages})
    yield from (replace(none, stage=stage, times=times) for stage in tied for times in (0, 2))


def _applied(pattern: Mistake, gradient: Gradient, weights: Sequence[float]) -> Tensor | None:
    """The gradient that a mistake would give, but for the scale; None where it stays as it is."""
    mean = sum(weights) / len(weights)
    more: list[Tensor] = []
    for (index, stage), part in gradient.parts.items():
        if pattern.even:
            factor = mean / weights[index] if weights[index] else 1
        else:
            factor = pattern.times if index == pattern.microbatch or stage == pattern.stage else 1
        if factor != 1:
            more.append(wide(part) * (factor - 1.0))
    right = wide(gradient.expected)
    if more:
        return sum(more, right)
    return right if pattern.times == 1 and not pattern.even else None


def _fits(
    gradient: Gradient, patterns: Sequence[Mistake], weights: Sequence[float], equal: bool
) -> dict[Mistake, None]:
    """The mistakes that give what was found ten times closer than none does; of one that is equal, to rounding, only
    those that count something otherwise."""
    if not is_finite(gradient.found):
        return {}
    found = wide(gradient.found).flatten()
    off = float((found - wide(gradient.expected).flatten()).norm())
    limit = min(tolerance(gradient.found, gradient.expected) * float(found.norm()), off / 10)
    fits: dict[Mistake, None] = {}
    for pattern in patterns[1 if equal else 0 :]:  # the first is a scale alone
        made = _applied(pattern, gradient, weights)
        if made is None or not made.count_nonzero():
            continue
        made = made.flatten()
        scale = float(torch.vdot(made, found).real / torch.vdot(made, made).real)
        tried = (1.0,) if equal else (plainest(scale), scale)
        chosen = next((one for one in tried if float((found - one * made).norm()) <= limit), None)
        if chosen is not None:
            fits[replace(pattern, scale=chosen)] = None
    return fits


def _explains(mistake: Mistake, fits: Mapping[Mistake, None]) -> bool:
    """Whether a gradient fits a mistake: it, or the same with a scale that is near by."""
    near = (one for one in fits if abs(one.scale - mistake.scale) <= 1e-3 * abs(mistake.scale))
    return any(replace(one, scale=mistake.scale) == mistake for one in near)


def _unknown(gradient: Gradient) -> str:
    """How a gradient differs that no mistake explains."""
    if not is_finite(gradient.found):
        return "NaN or infinite numbers"
    found, expected = wide(gradient.found).flatten(), wide(gradient.expected).flatten()
    size = float(found.norm() * expected.norm())
    if not size:
        return "zero where it should not be" if not found.count_nonzero() else "not zero where it should be"
    cosine = float(torch.vdot(expected, found).real) / size
    return f"of {float(found.norm() / expected.norm()):.3g} x the norm, its cosine with the right one {cosine:.3g}"
