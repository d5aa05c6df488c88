"""Schedules as text: a name, with options behind a colon, such as hanayo:waves=2."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fpipe.limits import MOST_OPS_OF_A_SHARE, check_whole_number, parse_expression, refuse_too_many_ops
from fpipe.program import Program
from fpipe.schedules.registry import Schedule, about
from fpipe.timing.costs import Costs


@dataclass(frozen=True)
class NamedSchedule:
    """A schedule of the registry with options, and a number of stages if not its default.

    >>> parse("hanayo:waves=2").program(2, 4)
    <Program: 8 stages, 4 microbatches, 2 ranks, 97 ops>
    """

    schedule: Schedule
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    stages: int | None = None

    def program(self, ranks: int, microbatches: int, costs: Callable[[float], Costs] | None = None) -> Program:
        """Return the program of a step at this size.

        Args:
            costs: `f(parts)`, the costs of an op if each rank cuts its share of a microbatch into this many; a schedule
                that orders by costs gets them, unless its options have some.

        Raises:
            ValueError: a rank cuts its share of a microbatch into too many ops, or they are too many for a program.
        """
        stages = self.schedule.wants(ranks, self.options) if self.stages is None else self.stages
        slices = self.options.get("slices")
        slices = slices if type(slices) is int else 1
        ops_per_rank = stages / ranks * slices
        if ops_per_rank > MOST_OPS_OF_A_SHARE:
            raise ValueError(f"stages times slices on a rank is at most {MOST_OPS_OF_A_SHARE}, found {ops_per_rank:g}.")
        refuse_too_many_ops(stages * slices, microbatches)
        takes_costs = "costs" in _parameters(self.schedule)
        options = ({"costs": costs(stages / ranks)} if costs is not None and takes_costs else {}) | self.options
        return self.schedule.program(ranks, microbatches, stages, **options)


def parse(text: str) -> NamedSchedule:
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


def with_options(text: str, more_options: Mapping[str, Any]) -> NamedSchedule:
    """Read a name and its options, and add further options."""
    if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(
            f"a schedule is given by name, such as 'hanayo:waves=2', found {type(text).__name__}. Name your own by "
            "fpipe.schedules.register."
        )
    name, _, option_text = text.partition(":")
    schedule = about(name)
    parameters = _parameters(schedule)
    size_names = {next(iter(parameters)), "ranks", "microbatches"}
    # A comma separates options only in front of the next `name=`: a value may be a list with commas.
    options = dict(option(part) for part in re.split(r",(?=[A-Za-z_]\w*=)", option_text) if part) | dict(more_options)
    stages = options.pop("stages", None)
    if stages is not None:
        check_whole_number("stages", stages)
    # A factory with **options checks its own.
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    unknown = (key for key in options if key in size_names or (key not in parameters and not takes_any))
    unknown_option = next(unknown, None)
    if unknown_option is not None:
        option_names = ", ".join([*(parameter for parameter in list(parameters)[1:] if parameter != "costs"), "stages"])
        raise ValueError(f"{name} has no option {unknown_option!r}; it has: {option_names}.")
    return NamedSchedule(schedule, options, stages)


def option(text: str) -> tuple[str, Any]:
    """Read one option as its name and value; a value that is no literal stays text.

    >>> option("waves=2"), option("placement=v")
    (('waves', 2), ('placement', 'v'))
    """
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise ValueError(f"an option reads waves=2, found {text!r}.")
    try:
        return name, ast.literal_eval(parse_expression(value))
    except (ValueError, TypeError):
        return name, value


def _parameters(schedule: Schedule) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(schedule.factory).parameters)
