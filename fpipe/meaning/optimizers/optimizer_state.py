"""Make the state of an optimizer for the parameters of a program that updates them.

params: ({"w": w},)        --> AdamW -->        ({"w": {"step": 0, "exp_avg": 0, "exp_avg_sq": 0}},)
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch

from fpipe import tree
from fpipe.meaning.optimizers.op_words import UpdateWords, names_of, update_of, words_of
from fpipe.meaning.optimizers.rules import OF_MATRICES, initial_state, state_shapes
from fpipe.program import Program, the_program


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
