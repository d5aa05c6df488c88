"""Take the arguments of a training step: check them once, and hand them on as one value to whoever runs the program.

step(params, batch, state=, key=, opt=, lr=, scale=)        -->        run(StepInputs(params, batch, state, optim, key))
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.optimizers.optimizer_state import rates_of, update_of, words_of
from fpipe.meaning.purity.ambient import casting, refuse_odd_modes
from fpipe.meaning.single_device.params_and_state import padding_words, refuse_spread
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.stages.keys import fold_in
from fpipe.model import Model
from fpipe.program import Program
from fpipe.transforms.update import behind_norms, is_post_validated

Number = float | Tensor
Rate = Number | Mapping[str, Number]


MISSING = "this program reads {}: hand it in as step(..., {}={})."
NO_KEY = MISSING.format("key", "key", "...")


Keys = int | tuple[int, ...] | None
"""The key of a step; of several training steps one for each."""


Optim = tuple[Any, Any, Any] | None
"""The optimizer's state, the learning rates and the loss scale of a step, where its program updates parameters."""


@dataclass(frozen=True)
class StepInputs:
    """Arguments of one call of a step.

    Attributes:
        params: one pytree per stage.
        batch: inputs and target; of several training steps a batch for each.
        state: module state, one pytree per stage, or None.
        optim: what an update reads, or None.
        key: of a program that draws.
    """

    params: Any
    batch: Any
    state: Any = None
    optim: Optim = None
    key: Keys = None

    @property
    def trees(self) -> tuple[Any, Any, Any, Any]:
        """Everything that holds tensors, as one pytree: params, batch, state, and what an update reads."""
        return self.params, self.batch, self.state, self.optim


@dataclass(frozen=True)
class StepOptions:
    """Options of `build` about how a step runs, whatever the runtime.

    Attributes:
        trace: whether stages are traced, or run under autograd.
        compile: whether inductor compiles the traced graphs.
        record: whether a step returns its timeline.
        check_finite: whether a step raises at the first op that writes NaN or an infinite number.
        loss_scale: factor of the loss's cotangent.
        donate: whether UPDATE may overwrite parameters and optimizer state.
        audit: when a part of a step runs again by its definition.
        runs: False of a program that is lowered only to read its sizes or operations.
    """

    trace: bool = True
    compile: bool = False
    record: bool = False
    check_finite: bool = False
    loss_scale: float = 1.0
    donate: bool = False
    audit: Literal["first", "always", "never"] | int = "never"
    runs: bool = True


class Step:
    """A training step that `build` has made: a pure function, which changes nothing but what is donated.

    Attributes:
        warns: whether the next call, the first one, warns of what makes a training go wrong without an error.

    >>> import inspect
    >>> tuple(inspect.signature(Step.__call__).parameters)[1:]
    ('params', 'batch', 'more', 'state', 'key', 'opt', 'lr', 'scale')
    """

    def __init__(
        self,
        program: Program,
        model: Model,
        run: Callable[[StepInputs], Result],
        within: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._program, self._model, self._within = program, model, within
        self.run, self.warns = run, True

    def __call__(
        self,
        params: Sequence[Any],
        batch: tuple[Any, Any],
        *more: Any,
        state: Sequence[Any] | None = None,
        key: int | Sequence[int] | None = None,
        opt: Sequence[Any] | None = None,
        lr: Rate | Sequence[Rate] | None = None,
        scale: Any = None,
    ) -> Result:
        """Run the program once.

        Args:
            params: one pytree per stage.
            batch: inputs and target.
            state: module state, one pytree per stage, where a stage reads it.
            key: of a program that draws random numbers: one, or one for each of its steps.
            opt: the optimizer's state, of a program with an `update`, as `optimizer_state` makes it.
            lr: its learning rate where the program does not say one: a number, or one for each of its steps. A dict,
                such as {"lr": 3e-4, "weight_decay": 0.1}, hands in other numbers of the rule that the program does not
                say, too.
            scale: of `update(loss_scale=)`, a number, or `Result.scale` of the step before.
        """
        with self._within():  # a wrong argument on one rank is an error of the step on all of them
            refuse_odd_modes()
            keys = checked_key(self._program, more, key)
            tree.register_mappings(batch)
            if self.warns:
                self.warns = False
                warn_of_padding(self._program, self._model, batch)
            return self.run(StepInputs(params, batch, state, checked_optim(self._program, opt, lr, scale), keys))


def warn_of_padding(program: Program, model: Model, batch: Any) -> None:
    """Warn of labels that the loss ignores where the means of microbatches are averaged."""
    how = next((dict(op.how) for op in program.ops if op.kind == "SPLIT"), {})
    if model.reduction != "mean" or (program.microbatches == program.steps and "axis" not in how):
        return
    pairs: list[Any] = batch if isinstance(batch, list) else [batch]
    for pair in pairs:
        words = padding_words(model.loss, pair) if isinstance(pair, tuple) and len(pair) == 2 else ""  # pyright: ignore[reportUnknownArgumentType]
        if words:
            warnings.warn(words, stacklevel=3)
            return


def checked_key(program: Program, more: Sequence[Any], key: Any) -> Keys:
    """Return the key of a step; raise if the batch is spread, or a key is no number, or not one a training step."""
    refuse_spread(more, "step(params, {})")
    if program.steps == 1 or key is None:
        return key if key is None else (fold_in(key), key)[1]
    if not isinstance(key, list | tuple) or len(key) != program.steps:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"key is a list of {program.steps} whole numbers, one for each training step; found {key!r}.")
    return tuple((fold_in(number), number)[1] for number in key)  # pyright: ignore[reportUnknownVariableType]


def checked_optim(program: Program, opt: Any, lr: Any, scale: Any) -> Optim:
    """Return the optimizer's state, learning rates with the bits of the floats, and loss scale that a program reads.

    Raises ValueError if one is missing or not read, or TypeError for a scale that is no number.
    """
    op = update_of(program)
    if op is None:
        for word, given in (("opt", opt), ("lr", lr), ("scale", scale)):
            if given is not None:
                raise ValueError(f"this program updates no parameters, and takes no {word}=; fpipe.update() does.")
        return None
    if opt is None:
        raise ValueError(MISSING.format("opt", "opt", "fpipe.optimizer_state(program, params)"))
    wanted = any(value.name == "lr" for value in op.reads)
    if wanted and lr is None:
        raise ValueError(MISSING.format("lr", "lr", "3e-4"))
    rates = rates_of(lr, program.steps, words_of(op.how))
    scales = any(value.name == "valid" for value in op.reads)
    if scales is not (scale is not None):
        none = "this program scales no loss; leave scale= out, or say fpipe.update(loss_scale=)."
        raise ValueError(MISSING.format("scale", "scale", "2.0**16") if scales else none)
    return opt, rates if wanted else [], _scale(scale) if scales else None


def _scale(given: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss scale, and for how many steps all gradients have been finite: of a number none."""
    if isinstance(given, int | float) and not isinstance(given, bool) and given > 0:
        return torch.tensor(float(given)), torch.tensor(0, dtype=torch.int32)
    if not isinstance(given, tuple) or [getattr(one, "dtype", None) for one in given] != [torch.float32, torch.int32]:  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        raise TypeError(f"scale is a number above 0, or the scale of a result; found {given!r}.")
    return given  # pyright: ignore[reportUnknownVariableType]


# Make steps that run others: once more with updates behind their norms, or under autocast.

S = TypeVar("S", bound=Callable[..., Result])


def post_validated(program: Program, make: Callable[[Program, bool], S], donate: bool) -> S:
    """The step of a program that `make(program, donate)` makes, done again from what it was handed where a norm is not
    valid. So only the step that is done again may overwrite that."""
    if not is_post_validated(program):
        return make(program, donate)
    step, again = make(program, False), make(behind_norms(program), donate)

    @wraps(step)
    def checked(*args: Any, **more: Any) -> Result:
        result = step(*args, **more)
        valid = result.valid if isinstance(result.valid, tuple) else (result.valid,)
        return result if all(map(bool, valid)) else again(*args, **more)

    return cast("S", checked)


def under_autocast(dtype: torch.dtype | None, make: Callable[[], S]) -> S:
    """The step that `make` makes, under autocast to a dtype on the CPU and on an accelerator, if one is there."""
    if dtype is None:
        return make()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = tuple((kind, dtype, True) for kind in ("cpu", *([] if accelerator is None else [accelerator.type])))
    with casting(kinds):
        made = make()

    @wraps(made)
    def step(*args: Any, **more: Any) -> Result:
        with casting(kinds):
            return made(*args, **more)

    return cast("S", step)


def refuse_no_autocast(dtype: object) -> None:
    """A ValueError for what autocast does not cast to."""
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast is torch.bfloat16, torch.float16 or None; found {dtype!r}.")
