"""Read the words of an UPDATE, and make the state of an optimizer for the parameters of a program that has one.

params: ({"w": w},)        --> AdamW -->        ({"w": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0}},)
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
from fpipe.meaning.optimizers.rules import (
    OF_MATRICES,
    Words,
    check_together,
    class_of,
    initial_state,
    numbers_of,
    state_shapes,
)
from fpipe.program import Op, Program, the_program

# Read the words of an UPDATE: its rule, its clip, and the settings of each parameter by its name.
#
# {by='AdamW', clip=1.0, groups=(('*bias', (('weight_decay', 0.0),)),), weight_decay=0.1}


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


def optimizer_state(program: Program, params: Sequence[Any]) -> tuple[Any, ...]:
    """The state of a program's optimizer before the first step: for each leaf of params the dict that torch.optim keeps
    of it.

    Args:
        program: one that `update` made.
        params: as a step takes them: whole, as shards, on the meta device, or a rank's own and None for the stages of
            others.

    Returns:
        A tuple like params, a dict of tensors in place of each leaf. Where torch.optim has nothing before the first
        step there are zeros, and `step` is 0.

    Raises:
        ValueError: the program updates nothing, or says a rule or settings that there are not.

    >>> import fpipe, torch
    >>> params = ({"w": torch.ones(2)}, {"v": torch.ones(1)})
    >>> program = fpipe.chain(fpipe.split(2), fpipe.merge(), fpipe.update("SGD", momentum=0.9))(fpipe.program(2))
    >>> optimizer_state(program, params)[0]
    {'w': {'step': tensor(0.), 'momentum_buffer': tensor([0., 0.])}}
    """
    op = update_of(the_program(program))
    if op is None:
        raise ValueError("this program updates no parameters: fpipe.update('AdamW') behind fpipe.merge() does.")
    if not isinstance(params, tuple | list) or len(params) != program.stages:
        found = f"{len(params)} entries" if isinstance(params, tuple | list) else type(params).__name__
        raise ValueError(f"params is a tuple with one pytree for each of the {program.stages} stages; found {found}.")
    return initial_states(words_of(op.how), params)


def initial_states(words: UpdateWords, params: Sequence[Any]) -> tuple[Any, ...]:
    """The state of each stage before the first update."""

    def of_stage(stage: Any) -> Any:
        leaves, spec = tree.flatten(stage)
        each = zip(leaves, words.of(names_of(spec)), strict=True)
        return tree.unflatten(spec, [initial_state(words.by, settings, leaf) for leaf, settings in each])

    return tuple(None if stage is None else of_stage(stage) for stage in params)


def example_optim(program: Program, params: Sequence[Any]) -> tuple[Any, Any, Any] | None:
    """Optimizer state, learning rates and loss scale to trace for, where a program updates parameters."""
    op = update_of(program)
    if op is None:
        return None
    wanted = any(value.name == "lr" for value in op.reads)
    rates = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in range(program.steps)]
    scales = any(value.name == "valid" for value in op.reads)
    scale = torch.ones((), device="cpu"), torch.zeros((), dtype=torch.int32, device="cpu")
    return optimizer_state(program, params), rates if wanted else [], scale if scales else None


def check_update(program: Program, names: Sequence[str] | None) -> None:
    """A ValueError for a rule or settings that there are not, for a group of none of the `names` of parameters, where
    they are known, or for a rule of whole matrices where parameters are shards."""
    op = update_of(program)
    if op is None:
        return
    words = words_of(op.how)
    by, groups = words.by, words.groups
    if by in OF_MATRICES and op.reads[0].name == "shard":
        raise ValueError(f"{by} looks at whole matrices, of which replicas have shards: use fpipe.data_parallel().")
    for settings in (words.settings, *words.of([pattern for pattern, _ in groups])):
        state_shapes(by, settings, torch.empty(2, 2))
    if names is not None:
        check_groups(words, names)


def check_groups(words: UpdateWords, names: Sequence[str]) -> None:
    """A ValueError for a group of none of the `names` of parameters."""
    for pattern, _ in words.groups:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ValueError(f"no parameter has a name like {pattern!r} of groups=; there are {', '.join(names)}.")


def check_optimizer_state(words: UpdateWords, params: Sequence[Any], opt: Any) -> None:
    """A ValueError for an optimizer's state that is not of these parameters and this rule."""
    if not isinstance(opt, tuple | list) or len(opt) != len(params):
        raise ValueError(f"opt is a tuple with one entry for each of the {len(params)} stages, {_WAY}.")
    for number, (stage, states) in enumerate(zip(params, opt, strict=True)):
        leaves, spec = tree.flatten(stage)
        try:
            each = spec.flatten_up_to(states)
        except ValueError:
            raise ValueError(f"opt of stage {number} has other leaves than its params, {_WAY}.") from None
        names = names_of(spec)
        for name, settings, leaf, state in zip(names, words.of(names), leaves, each, strict=True):
            wanted = state_shapes(words.by, settings, leaf)
            if wanted is None:
                continue
            if not isinstance(state, dict) or {*state} != {*wanted}:
                found = ", ".join(state) if isinstance(state, dict) else type(state).__name__
                raise ValueError(
                    f"opt of stage {number} has {found or 'nothing'} of {name}, and {words.by} keeps "
                    f"{', '.join(wanted) or 'nothing'}, {_WAY}."
                )
            for word, shape in wanted.items():
                if tuple(state[word].shape) != shape:
                    now = f"{[*state[word].shape]}, and is of shape {[*shape]}"
                    raise ValueError(f"opt of stage {number} has {word} of {name} in shape {now}, {_WAY}.")


_WAY = "as fpipe.optimizer_state(program, params) makes it"
