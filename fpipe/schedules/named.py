"""A schedule as it is typed: its name, and behind a colon its options, as in hanayo:waves=2."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fpipe.limits import MOST_OPS_OF_A_SHARE, expression, refuse_too_many_ops, whole
from fpipe.program import Program
from fpipe.schedules.registry import Schedule, about
from fpipe.timing.costs import Costs


@dataclass(frozen=True)
class Named:
    """A schedule of the registry with options of its own, and how many stages, if not as many as it wants.

    >>> parse("hanayo:waves=2").program(2, 4)
    <Program: 8 stages, 4 microbatches, 2 ranks, 97 ops>
    """

    schedule: Schedule
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    stages: int | None = None

    def program(self, ranks: int, microbatches: int, costs: Callable[[float], Costs] | None = None) -> Program:
        """Its program at a size.

        Args:
            costs: `f(parts)`, the costs where each rank cuts its share of a microbatch into so many ops; a schedule
                that orders by costs gets them, unless it has some among its options.

        Raises:
            ValueError: a rank cuts its share of a microbatch into too many ops, or they are too many for a program.
        """
        stages = self.schedule.wants(ranks, self.options) if self.stages is None else self.stages
        slices = self.options.get("slices")
        slices = slices if type(slices) is int else 1
        share = stages / ranks * slices
        if share > MOST_OPS_OF_A_SHARE:
            raise ValueError(
                f"a rank cuts its share of a microbatch into at most {MOST_OPS_OF_A_SHARE} forwards, "
                f"stages times slices; found {share:g}."
            )
        refuse_too_many_ops(stages * slices, microbatches)
        told = {"costs": costs(stages / ranks)} if costs is not None and "costs" in _parameters(self.schedule) else {}
        return self.schedule.program(ranks, microbatches, stages, **(told | self.options))


def parse(text: str) -> Named:
    """Read a name and its options; `stages` is the number of stages, whatever the schedule.

    Raises:
        ValueError: no name, no such schedule, or no such option of it.

    >>> parse("zb_auto:memory_cap=2.5,objective=span").options
    {'memory_cap': 2.5, 'objective': 'span'}
    >>> parse("gpipe:waves=2")
    Traceback (most recent call last):
    ValueError: gpipe has no option 'waves'; it has: stages.
    """
    return with_options(text, {})


def with_options(text: str, more: Mapping[str, Any]) -> Named:
    """A name and its options, and options that were said beside it."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            "a schedule is named here, as in 'gpipe' or 'hanayo:waves=2', and one of your own by "
            f"fpipe.schedules.register; found {type(text).__name__}."
        )
    name, _, said = text.partition(":")
    schedule = about(name)
    known = _parameters(schedule)
    sizes = {next(iter(known)), "ranks", "microbatches"}  # which are said beside a name
    options = dict(option(part) for part in re.split(r",(?=[A-Za-z_]\w*=)", said) if part) | dict(more)
    stages = options.pop("stages", None)
    if stages is not None:
        whole("stages", stages)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values())
    odd = next((word for word in options if word in sizes or (word not in known and not takes_any)), None)
    if odd is not None:
        has = ", ".join([*(word for word in list(known)[1:] if word != "costs"), "stages"])
        raise ValueError(f"{name} has no option {odd!r}; it has: {has}.")
    return Named(schedule, options, stages)


def option(text: str) -> tuple[str, Any]:
    """An option of a schedule.

    >>> option("waves=2"), option("placement=v")
    (('waves', 2), ('placement', 'v'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"an option reads waves=2, found {text!r}.")
    try:
        return name, ast.literal_eval(expression(value))
    except (ValueError, TypeError):
        return name, value


def _parameters(schedule: Schedule) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(schedule.factory).parameters)
