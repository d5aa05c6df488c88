"""The schedules people say by name, as starts of a search: each that serves a program on some ranks."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from fpipe.program import Program, ProgramError
from fpipe.schedules.named import parse
from fpipe.schedules.registry import about, names
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate
from fpipe.transforms._rewrite import Transform


def named_starts(
    program: Program,
    ranks: int,
    costs: Costs,
    room: tuple[float, float],
    objective: str,
    *,
    by_cost: bool,
    without: Collection[str] = (),
) -> Iterator[tuple[str, Transform]]:
    """Names, with options behind a colon, and what they make.

    Args:
        program: what they are to order.
        ranks: how many.
        costs: what schedules that order by costs are told.
        room: what those with a cap are told beside their own: microbatches a rank may hold, and the share of one that a
            W still needs after its I.
        objective: what those are told that can be told what to make short.
        by_cost: those that search by themselves, which takes them up to a second, or the others.
        without: names that are left out.
    """
    cap, kept = min(room[0], program.microbatches), room[1]
    for name in names():
        schedule = about(name)
        takes = inspect.signature(schedule.factory).parameters
        if name in without or ("objective" in takes) != by_cost:
            continue
        if schedule.refuses(ranks, program.stages, program.microbatches) is not None:
            continue
        told = _told(takes, costs, objective)
        said: list[dict[str, Any]] = [{}]
        if "waves" in takes and program.stages % (2 * ranks) == 0:
            said = [{"waves": program.stages // (2 * ranks)}]
        if by_cost and cap >= 1:
            # Without costs it is there in a moment, and holds as much as with them.
            published = schedule.factory(ranks)(program)
            fits = kept < 1 or max(simulate(published).peak) <= cap * (1 + 1e-9)
            said = [*(said if fits else []), {"memory_cap": cap} | ({"kept": kept} if kept < 1 else {})]
        for options in said:
            shown = ",".join(f"{word}={value:g}" for word, value in options.items())
            try:
                transform = schedule.factory(ranks, **told, **options)
            except (ProgramError, ValueError):
                continue
            yield f"{name}:{shown}" if shown else name, transform


def again(shown: str, ranks: int, costs: Costs, objective: str) -> Transform:
    """What a name makes that `named_starts` gave."""
    named = parse(shown)
    takes = inspect.signature(named.schedule.factory).parameters
    return named.schedule.factory(ranks, **_told(takes, costs, objective), **named.options)


def _told(takes: Mapping[str, object], costs: Costs, objective: str) -> dict[str, Any]:
    """What a schedule is told of what it asks for."""
    known = {"costs": costs, "objective": objective}
    return {word: value for word, value in known.items() if word in takes}
