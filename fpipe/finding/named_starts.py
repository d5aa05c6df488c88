"""The schedules people say by name, as starts of a search: each that serves a program on some ranks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fpipe.program import Program, ProgramError
from fpipe.schedules.registry import about, names
from fpipe.timing.costs import Costs
from fpipe.transforms._rewrite import Transform

WITHOUT = " without costs"
"""Behind the name of a schedule that could be told the costs."""


def named_starts(
    program: Program, ranks: int, costs: Costs, cap: float, *, most: int, without: Collection[str] = ()
) -> Iterator[tuple[str, Transform]]:
    """Names, with options behind a colon, and what they make.

    Args:
        cap: the microbatches that a rank may hold, for those that take a cap beside their own.
        most: microbatches of the step that they are for; this one may be shorter.
        without: names that are left out.
    """
    for name in names():
        schedule = about(name)
        if name in without or schedule.refuses(ranks, program.stages, program.microbatches) is not None:
            continue
        ways: dict[str, dict[str, Any]] = {"": {}}
        if chooses(name):  # without costs it may hold less
            ways = {"": {"costs": costs}, WITHOUT: {}}
        for options in _ways(_takes(name), ranks, program.stages, cap if cap < most else None):
            shown = ",".join(f"{word}={value:g}" for word, value in options.items())
            for word, known in ways.items():
                try:
                    transform = schedule.factory(ranks, **known, **options)
                except (ProgramError, ValueError):
                    continue
                yield name + word + (f":{shown}" if shown else ""), transform


def schedule_of(start: str) -> str:
    """The schedule of a start, without options.

    >>> schedule_of("interleaved without costs"), schedule_of("pipe_offload:cap=2")
    ('interleaved', 'pipe_offload')
    """
    return start.replace(":", " ").split()[0]


def chooses(start: str) -> bool:
    """Whether it takes the shortest of a few orders, and so maybe another for another number of microbatches."""
    return "costs" in _takes(start) and not about(schedule_of(start)).searches


def _takes(start: str) -> Mapping[str, object]:
    """Parameters of the schedule of a start."""
    return inspect.signature(about(schedule_of(start)).factory).parameters


def _ways(takes: Collection[str], ranks: int, stages: int, cap: float | None) -> list[dict[str, Any]]:
    """The options with which a schedule is tried: as it is, and each choice that changes how much it holds."""
    said: list[dict[str, Any]] = [{}]
    if "waves" in takes and stages % (2 * ranks) == 0:
        said = [{"waves": stages // (2 * ranks)}]
    if "overlap" in takes:
        said.append({"overlap": False})
    if "group" in takes and ranks > 1:
        said += [{"group": ranks}, {"group": -(-ranks // 2)}]  # all refuse one of the two, or do it unasked
    if "cap" in takes and cap is not None:
        said += [options | {"cap": cap} for options in said]
    return said
