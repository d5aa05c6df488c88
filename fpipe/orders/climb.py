"""Climb to a better order, one small change after another.

A change that makes it no worse stays. With a memory of some steps so does one that is no worse than what stood so many
steps ago (late acceptance, Burke and Bykov 2017), so that the climb leaves a dead end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from fpipe.orders.play import Played
from fpipe.timing.timeline import Timeline

Value = tuple[float, float]
"""The makespan and span of an order, or the other way round: first the one that is to be short."""


def worth(found: Played | Timeline, objective: str) -> Value:
    """The makespan and then the span, or the other way round."""
    return (found.makespan, found.span) if objective == "makespan" else (found.span, found.makespan)


class Valued(Protocol):
    """An order that knows what it is worth, the less the better."""

    @property
    def value(self) -> Value:
        """Its worth."""
        ...


S = TypeVar("S", bound=Valued)


class Climb(Generic[S]):
    """An order that is being improved: where it stands, the best so far, after how many steps, and since which.

    >>> from typing import NamedTuple
    >>> Point = NamedTuple("Point", [("value", tuple[float, float])])
    >>> climb = Climb(Point((9.0, 0.0)))
    >>> climb.on(50, lambda point, late: Point((abs(point.value[0] - 2.0), 0.0)), lambda value: value[0] < 1.5)
    >>> climb.best, climb.steps
    (Point(value=(1.0, 0.0)), 4)
    """

    def __init__(self, start: S, memory: int = 1) -> None:
        self.now = self.best = start
        self.seen = deque([start.value] * memory)
        self.steps = self.since = 0

    def on(self, steps: int, change: Callable[[S, Value], S | None], enough: Callable[[Value], bool]) -> None:
        """Try so many changes, until the best value is `enough`.

        The value of a change counts only if it is no more than the one that `change` is given; None is no change.
        """
        for _ in range(steps):
            if enough(self.best.value):
                break
            self.steps += 1
            late = max(self.now.value, self.seen[0])
            found = change(self.now, late)
            if found is None:
                continue
            if found.value <= late:
                self.now = found
                if found.value < self.best.value:
                    self.best, self.since = found, self.steps
            self.seen.popleft()
            self.seen.append(self.now.value)
