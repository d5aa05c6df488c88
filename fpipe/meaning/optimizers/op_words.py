"""Read the words of an UPDATE: its rule, its clip, and the settings of each parameter by its name.

{by='AdamW', clip=1.0, groups=(('*bias', (('weight_decay', 0.0),)),), weight_decay=0.1}
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fpipe import tree
from fpipe.meaning.optimizers.rule_names import RULES
from fpipe.meaning.optimizers.rules import Words, check_together, class_of, numbers_of
from fpipe.program import Op, Program


class UpdateWords(NamedTuple):
    """Words of an UPDATE: by which rule, the largest norm, and settings, some by patterns of parameters' names."""

    by: str
    clip: float | None
    groups: tuple[tuple[str, Words], ...]
    settings: Words

    def of(self, names: Sequence[str]) -> list[Words]:
        """The settings of each of some parameters: those of the first group of its name in place of all others'."""
        owns = (next((words for pattern, words in self.groups if fnmatchcase(name, pattern)), ()) for name in names)
        return [tuple((dict(self.settings) | dict(own)).items()) if own else self.settings for own in owns]


@lru_cache(maxsize=1024)
def words_of(how: tuple[tuple[str, Any], ...]) -> UpdateWords:
    """The words of an UPDATE, in their places."""
    said = dict(how)
    by, clip, groups = said.pop("by"), said.pop("clip", None), said.pop("groups", ())
    return UpdateWords(by, None if clip is None else float(clip), groups, tuple(said.items()))


def update_of(program: Program) -> Op | None:
    """The first UPDATE of a program; the others say the same. Each step asks, so it is looked for once."""
    if "update_of" not in program.__dict__:
        program.__dict__["update_of"] = next((op for op in program.ops if op.kind == "UPDATE"), None)
    return program.__dict__["update_of"]


def names_of(spec: tree.Spec) -> list[str]:
    """The names of leaves: the keys on the way to each, with dots between."""
    return [".".join(map(str, path)) for path in spec.paths()]


# Read the numbers that a step hands to its rule: the learning rate, and others that the program leaves open.

Rate = float | Mapping[str, float]
"""The learning rate of a step, alone or among other numbers of its rule."""


def rates_of(lr: Any, steps: int, words: UpdateWords) -> list[Any]:
    """The learning rate of each step, or a dict of it and of other numbers of the rule; None where the words say it."""
    said = dict(words.settings).get("lr")
    if said is not None and lr is not None:
        raise ValueError(f"the program says lr={said} itself; leave lr= out.")
    if said is not None:
        return [None] * steps
    rates: list[Any] = [*lr] if isinstance(lr, list | tuple) else [lr] * steps
    if len(rates) != steps:
        raise ValueError(f"lr is one number, or a list of {steps}, one for each step; found {len(rates)}.")
    return [_numbers(one, words) for one in rates]


def _numbers(given: Any, words: UpdateWords) -> Any:
    """A learning rate as a step has it, or a dict of it and of other numbers that the program leaves open."""
    if not isinstance(given, Mapping):
        return _rate(given)
    known = _handed_in(words.by, words.settings)
    odd = next((word for word in given if word != "lr" and known is not None and word not in known), None)  # pyright: ignore[reportUnknownVariableType]
    if odd in dict(words.settings):
        raise ValueError(f"{odd} is said twice: {given[odd]} by lr={{..}}, and {dict(words.settings)[odd]} beside it.")
    if odd is not None or "lr" not in given:
        takes = ", ".join(["lr", *(known or ())])
        raise ValueError(
            f"lr is a number, or a dict of {takes}, which are numbers that this program leaves to its steps; found "
            f"{[*given]}. update() says the others."  # pyright: ignore[reportUnknownArgumentType]
        )
    made = {str(word): _rate(one, str(word)) for word, one in given.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    for settings in (words.settings, *words.of([pattern for pattern, _ in words.groups])):
        if words.by not in RULES:
            others = {word: number for word, number in numbers_of(made).items() if word != "lr"}
            check_together(words.by, tuple((others | dict(settings)).items()))
    return made


def _rate(lr: Any, word: str = "lr") -> torch.Tensor:
    """A learning rate, or another number of this name, as a step has it."""
    if isinstance(lr, bool) or not (isinstance(lr, int | float) or (isinstance(lr, torch.Tensor) and not lr.ndim)):
        raise TypeError(f"{word} is a number or a 0-d tensor; found {type(lr).__name__}.")
    rate = float(lr)
    if not 0 <= rate < math.inf:
        raise ValueError(f"{word} is a finite number from 0, such as 3e-4; found {rate}.")
    return torch.tensor(rate, dtype=torch.float64, device="cpu")


def _handed_in(by: str, settings: Words) -> Mapping[str, float] | None:
    """Settings besides the learning rate that a step may be handed, with their defaults: numbers that the program does
    not say, and on which no state depends; None of a rule of a user's own, which may have any."""
    if by in RULES:
        return None
    takes = inspect.signature(class_of(by) or torch.optim.SGD).parameters.values()
    said = {"lr", *dict(settings), *_AT_THE_BEGINNING}
    numbers = [one for one in takes if isinstance(one.default, int | float) and not isinstance(one.default, bool)]
    return {one.name: one.default for one in numbers if one.name not in said}


# State depends on these, but for a count of iterations, which is no number to vary.
_AT_THE_BEGINNING = ("momentum", "initial_accumulator_value", "ns_steps")
