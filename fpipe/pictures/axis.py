"""Numbers as a picture says them: times in a unit that suits them, round ticks, amounts held."""

from __future__ import annotations

import math
from typing import NamedTuple


class Clock(NamedTuple):
    """The unit that a picture counts time in, and how many of it are a second."""

    unit: str
    per_second: float

    def __call__(self, seconds: float) -> str:
        """A time without its unit."""
        return f"{seconds * self.per_second:.5g}"

    def full(self, seconds: float) -> str:
        """A time with its unit, if it has one to say: plain numbers are seconds."""
        return f"{self(seconds)} {self.unit}".rstrip()


def clock(end: float) -> Clock:
    """The clock for times up to `end` seconds.

    >>> clock(18).full(18), clock(0.0123).full(0.004)
    ('18', '4 ms')
    """
    for unit, size in (("", 1.0), ("ms", 1e3), ("µs", 1e6)):
        if end * size >= 1 or not end:
            return Clock(unit, size)
    return Clock("ns", 1e9)


def ticks(start: float, end: float, most: int) -> list[float]:
    """Round times from start to end, at most so many: the step is 1, 2 or 5 times a power of ten.

    >>> ticks(0, 18, 10)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0]
    >>> ticks(7, 18, 5)
    [10.0, 15.0]
    """
    if end <= start:
        return [start]
    least = (end - start) / max(1, most)
    power = 10.0 ** math.floor(math.log10(least))
    step = next(step for step in (power, 2 * power, 5 * power, 10 * power) if step >= least * (1 - 1e-9))
    return [at * step for at in range(math.ceil(start / step - 1e-9), math.floor(end / step * (1 + 1e-9)) + 1)]
