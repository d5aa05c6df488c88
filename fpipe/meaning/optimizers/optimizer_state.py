"""Read the settings of an UPDATE, and make and check the optimizer state of a program's parameters.

params: ({"w": w},)        --> AdamW -->        ({"w": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0}},)
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from fpipe import tree
from fpipe.meaning.optimizers.rule_names import RULES
from fpipe.meaning.optimizers.rules import (
    MATRIX_RULES,
    RuleSettings,
    as_number_by_name,
    check_torch_settings,
    class_of,
    initial_state,
    rule_of,
    state_shapes,
)
from fpipe.program import Op, Program

# Read the settings of an UPDATE: its rule, its clip, and the settings of each parameter by its name.
#
# {by='AdamW', clip=1.0, groups=(('*bias', (('weight_decay', 0.0),)),), weight_decay=0.1}


class UpdateSettings(NamedTuple):
    """The settings of an UPDATE.

    Attributes:
        rule: the name of the optimizer's rule.
        clip: the largest norm of all gradients, or None.
        groups: settings of the parameters whose names fit a pattern; the first pattern that fits counts.
        settings: settings of all other parameters, and of those where a group does not say otherwise.
    """

    rule: str
    clip: float | None
    groups: tuple[tuple[str | tuple[str, ...], RuleSettings], ...]
    settings: RuleSettings

    def of(self, names: Sequence[str], leaves: Sequence[Any]) -> list[RuleSettings]:
        """Return the settings of each parameter: the common ones, overridden by the first group whose pattern fits."""
        ndims = (len(getattr(leaf, "shape", ())) for leaf in leaves)
        return [
            next((self.combined(settings) for pattern, settings in self.groups if fits(pattern, name, ndim)), None)
            or self.settings
            for name, ndim in zip(names, ndims, strict=True)
        ]

    def combined(self, group: RuleSettings) -> RuleSettings:
        """Return the settings of a group, over the common ones unless it names a rule of its own."""
        has_rule = bool(group) and group[0][0] == "by"
        return group if has_rule else tuple((dict(self.settings) | dict(group)).items())

    @property
    def distinct_settings(self) -> list[RuleSettings]:
        """The common settings, followed by the settings of each group."""
        return [self.settings, *(self.combined(group) for _, group in self.groups)]


def fits(pattern: str | tuple[str, ...], name: str, ndim: int | None) -> bool:
    """Whether a pattern fits a parameter: "*bias" by its name, "*@2d" by its dimensions too, if these are known.

    A tuple lists names.

    >>> fits("*.weight@2d", "head.weight", 2), fits("*.weight@2d", "norm.weight", 1), fits("*bias", "head.bias", 1)
    (True, False, True)
    """
    if isinstance(pattern, tuple):
        return name in pattern
    stem, _, dimensions = pattern.rpartition("@")
    if stem and re.fullmatch(r"\dd", dimensions):
        return fnmatchcase(name, stem) and ndim in (None, int(dimensions[0]))
    return fnmatchcase(name, pattern)


@lru_cache(maxsize=1024)
def update_settings(op_settings: tuple[tuple[str, Any], ...]) -> UpdateSettings:
    """Return the settings of an UPDATE from the options of the op."""
    settings = dict(op_settings)
    rule, clip, groups = settings.pop("by"), settings.pop("clip", None), settings.pop("groups", ())
    return UpdateSettings(rule, None if clip is None else float(clip), groups, tuple(settings.items()))


def find_update(program: Program) -> Op | None:
    """Return the first UPDATE of a program, or None; all others have the same settings."""
    # Each step asks for it, and a program may have a million ops: the answer is kept in the program.
    if "find_update" not in program.__dict__:
        program.__dict__["find_update"] = next((op for op in program.ops if op.kind == "UPDATE"), None)
    return program.__dict__["find_update"]


def named_leaves(params: Any) -> list[tuple[str, Any]]:
    """Return the leaves of the parameters of a stage with their names."""
    leaves, spec = tree.flatten(params)
    return [*zip(names_of_leaves(spec), leaves, strict=True)]


def names_of_leaves(spec: tree.Spec) -> list[str]:
    """Return the names of leaves: the keys of their paths, joined by dots."""
    return [".".join(map(str, path)) for path in spec.paths()]


# Read the numbers that a step hands to its rule: the learning rate, and others that the program leaves open.

Rate = float | Mapping[str, float]
"""The learning rate of a step, alone or among other numbers of its rule."""


def rates_by_step(lr: Any, steps: int, update: UpdateSettings) -> list[Any]:
    """Return for each step its learning rate, or a dict of numbers of the rule; None if the program sets the rate."""
    fixed_rate = dict(update.settings).get("lr")
    if fixed_rate is not None and lr is not None:
        raise ValueError(f"the program says lr={fixed_rate} itself; leave lr= out.")
    if fixed_rate is not None:
        return [None] * steps
    rates: list[Any] = [*lr] if isinstance(lr, list | tuple) else [lr] * steps
    if len(rates) != steps:
        raise ValueError(f"lr is one number, or a list of {steps}, one for each step; found {len(rates)}.")
    return [_as_step_numbers(rate, update) for rate in rates]


def _as_step_numbers(numbers: Any, update: UpdateSettings) -> Any:
    """Return a learning rate as a 0-d tensor, or a dict of it and of other numbers that the program leaves open."""
    if not isinstance(numbers, Mapping):
        return _as_step_number(numbers)
    open_settings = _open_settings(update.rule, update.settings)
    allowed = None if open_settings is None else {"lr", *open_settings}
    misfit = next((name for name in numbers if allowed is not None and name not in allowed), None)  # pyright: ignore[reportUnknownVariableType]
    if misfit in dict(update.settings):
        raise ValueError(
            f"{misfit} is said twice: {numbers[misfit]} by lr={{..}}, {dict(update.settings)[misfit]} beside it."
        )
    if misfit is not None or "lr" not in numbers:
        takes = ", ".join(["lr", *(open_settings or ())])
        raise ValueError(
            f"lr is a number, or a dict of {takes}, which this program leaves to its steps; found {[*numbers]}. "  # pyright: ignore[reportUnknownArgumentType]
            "update() says the others."
        )
    number_by_name = {str(name): _as_step_number(value, str(name)) for name, value in numbers.items()}  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    for settings in update.distinct_settings:
        if rule_of(update.rule, settings)[0] not in RULES:
            other_numbers = {name: number for name, number in as_number_by_name(number_by_name).items() if name != "lr"}
            rule, settings = rule_of(update.rule, settings)
            check_torch_settings(rule, tuple((other_numbers | dict(settings)).items()))
    return number_by_name


def _as_step_number(lr: Any, name: str = "lr") -> torch.Tensor:
    """Return a learning rate, or another number of a rule, as a 0-d tensor of doubles."""
    if isinstance(lr, bool) or not (isinstance(lr, int | float) or (isinstance(lr, torch.Tensor) and not lr.ndim)):
        raise TypeError(f"{name} is a number or a 0-d tensor; found {type(lr).__name__}.")
    rate = float(lr)
    if not 0 <= rate < math.inf:
        raise ValueError(f"{name} is a finite number from 0; found {rate}.")
    return torch.tensor(rate, dtype=torch.float64, device="cpu")


def _open_settings(rule: str, settings: RuleSettings) -> Mapping[str, float] | None:
    """Return the settings besides the learning rate that a step may set, with their defaults.

    These are numbers that the program does not set and that no optimizer state depends on. None for a registered rule,
    which may have any.
    """
    if rule in RULES:
        return None
    parameters = inspect.signature(class_of(rule) or torch.optim.SGD).parameters.values()
    fixed_names = {"lr", *dict(settings), *_STATE_SETTINGS}
    numeric = [
        parameter
        for parameter in parameters
        if isinstance(parameter.default, int | float) and not isinstance(parameter.default, bool)
    ]
    return {parameter.name: parameter.default for parameter in numeric if parameter.name not in fixed_names}


# Optimizer state depends on the first two; ns_steps counts Muon's iterations, which is no number to vary.
_STATE_SETTINGS = ("momentum", "initial_accumulator_value", "ns_steps")


def optimizer_state(program: Program, params: Sequence[Any]) -> tuple[Any, ...]:
    """Return the optimizer state before the first step: for each leaf of params the dict that torch.optim keeps.

    Args:
        program: one that `update` made.
        params: as a step takes them: whole, as shards, or on the meta device; None for the stages of other ranks.

    Returns:
        A tuple like params, with a dict of tensors in place of each leaf. It has zeros where torch.optim has nothing
        before the first step, and `step` is 0.

    Raises:
        ValueError: the program updates nothing, or has an unknown rule or setting.

    >>> import fpipe, torch
    >>> params = ({"w": torch.ones(2)}, {"v": torch.ones(1)})
    >>> program = fpipe.chain(fpipe.split(2), fpipe.merge(), fpipe.update("SGD", momentum=0.9))(fpipe.program(2))
    >>> optimizer_state(program, params)[0]
    {'w': {'step': tensor(0.), 'momentum_buffer': tensor([0., 0.])}}
    """
    op = find_update(program)
    if op is None:
        raise ValueError("this program updates no parameters: fpipe.update('AdamW') behind fpipe.merge() does.")
    if not isinstance(params, tuple | list) or len(params) != program.stages:
        description = f"{len(params)} entries" if isinstance(params, tuple | list) else type(params).__name__
        raise ValueError(
            f"params is a tuple with one pytree for each of the {program.stages} stages; found {description}."
        )
    return initial_states(update_settings(op.options), params)


def initial_states(update: UpdateSettings, params: Sequence[Any]) -> tuple[Any, ...]:
    """Return the optimizer state of each stage before the first update; None for a stage without params."""

    def of_stage(stage: Any) -> Any:
        leaves, spec = tree.flatten(stage)
        pairs = zip(leaves, update.of(names_of_leaves(spec), leaves), strict=True)
        return tree.unflatten(spec, [initial_state(update.rule, settings, leaf) for leaf, settings in pairs])

    return tuple(None if stage is None else of_stage(stage) for stage in params)


def example_optim(program: Program, params: Sequence[Any]) -> tuple[Any, Any, Any] | None:
    """Return optimizer state, learning rates and loss scale to trace a step with, or None without an update."""
    op = find_update(program)
    if op is None:
        return None
    reads_rate = any(value.name == "lr" for value in op.reads)
    rates = [torch.zeros((), dtype=torch.float64, device="cpu") for _ in range(program.steps)]
    reads_scale = any(value.name == "valid" for value in op.reads)
    scale = torch.ones((), device="cpu"), torch.zeros((), dtype=torch.int32, device="cpu")
    return optimizer_state(program, params), rates if reads_rate else [], scale if reads_scale else None


def check_update(program: Program, names: Sequence[str] | None) -> None:
    """Raise ValueError for an unknown rule or setting, a group that fits no parameter, or Muon on shards.

    Groups are checked only if the names of the parameters are known.
    """
    op = find_update(program)
    if op is None:
        return
    update = update_settings(op.options)
    for settings in update.distinct_settings:
        rule, _ = rule_of(update.rule, settings)
        if rule in MATRIX_RULES and op.reads[0].name == "shard":
            raise ValueError(
                f"{rule} looks at whole matrices, of which replicas have shards: use fpipe.data_parallel()."
            )
        state_shapes(update.rule, settings, torch.empty(2, 2))
    if names is not None:
        check_groups(update, names)


def check_groups(update: UpdateSettings, names: Sequence[str]) -> None:
    """Raise ValueError for a group whose pattern fits none of the names."""
    for pattern, _ in update.groups:
        if not any(fits(pattern, name, None) for name in names):
            raise ValueError(f"no parameter has a name like {pattern!r} of groups=; there are {', '.join(names)}.")


def check_optimizer_state(update: UpdateSettings, params: Sequence[Any], opt: Any) -> None:
    """Raise ValueError for optimizer state that does not belong to these parameters and this rule."""
    if not isinstance(opt, tuple | list) or len(opt) != len(params):
        raise ValueError(f"opt is a tuple with one entry for each of the {len(params)} stages, {_REMEDY}.")
    for number, (stage, states) in enumerate(zip(params, opt, strict=True)):
        leaves, spec = tree.flatten(stage)
        try:
            leaf_states = spec.flatten_up_to(states)
        except ValueError:
            raise ValueError(f"opt of stage {number} has other leaves than its params, {_REMEDY}.") from None
        names = names_of_leaves(spec)
        for name, settings, leaf, state in zip(names, update.of(names, leaves), leaves, leaf_states, strict=True):
            shape_by_name = state_shapes(update.rule, settings, leaf)
            if shape_by_name is None:
                continue
            if not isinstance(state, dict) or {*state} != {*shape_by_name}:
                description = ", ".join(state) if isinstance(state, dict) else type(state).__name__
                raise ValueError(
                    f"opt of stage {number} has {description or 'nothing'} of {name}, and "
                    f"{rule_of(update.rule, settings)[0]} keeps "
                    f"{', '.join(shape_by_name) or 'nothing'}, {_REMEDY}."
                )
            for state_name, shape in shape_by_name.items():
                if tuple(state[state_name].shape) != shape:
                    actual = f"{[*state[state_name].shape]}, and is of shape {[*shape]}"
                    raise ValueError(f"opt of stage {number} has {state_name} of {name} in shape {actual}, {_REMEDY}.")


_REMEDY = "as fpipe.optimizer_state(program, params) makes it"
