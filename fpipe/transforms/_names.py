"""Names of values as a transform is given them, and that a program has values of these names."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fpipe.program import Program, ProgramError


def names_of(word: str, given: Any) -> tuple[str, ...]:
    """The names that were given: one, or several."""
    names: tuple[Any, ...] = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
    odd = [name for name in names if not isinstance(name, str)]
    if odd:
        raise ValueError(f"{word}= takes names of values, such as ('res',); found {odd[0]!r}.")
    return names


def check_names(word: str, names: Iterable[str], program: Program, also: Iterable[str] = ()) -> None:
    """Refuse a name that no value of the program has; those in `also` some programs have, and need not."""
    has = {end.value.name for end in program.inputs} | {value.name for op in program.ops for value in op.writes}
    odd = [name for name in names if name not in has and name not in also]
    if odd:
        raise ProgramError(f"{word}= names {odd[0]!r}, this program has values named {', '.join(sorted(has))}.")
