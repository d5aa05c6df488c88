"""Say in words what one does wrong when gradients are added up by hand.

scale * sum over microbatches i and stages s that use a parameter of times[i,s] * part[i,s]
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from fpipe.model import Reduction


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
