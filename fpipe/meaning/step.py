"""The arguments of a training step, checked once and passed to the runtime as one value.

step(params, batch, state=, key=, opt=, lr=, scale=)        -->        run(StepInputs(params, batch, state, optim, key))
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.optimizers.optimizer_state import find_update, rates_by_step, update_settings
from fpipe.meaning.purity.ambient import autocast_as, refuse_unsupported_modes
from fpipe.meaning.purity.keys import fold_in
from fpipe.meaning.single_device.label_means import describe_padding
from fpipe.meaning.single_device.params_and_state import refuse_extra_arguments
from fpipe.meaning.single_device.result import Result
from fpipe.model import MeanLabels, Model
from fpipe.program import Program
from fpipe.torch_internals import warn
from fpipe.transforms.update import is_post_validated, with_waiting_updates

Number = float | Tensor
Rate = Number | Mapping[str, Number]


MISSING = "this program reads {}: hand it in as step(..., {}={})."
NO_KEY = MISSING.format("key", "key", "...")


Keys = int | tuple[int, ...] | None
"""The key of a step, or one for each of several training steps."""


Optim = tuple[Any, Any, Any] | None
"""The optimizer's state, learning rates and loss scale of a step whose program updates parameters; else None."""


@dataclass(frozen=True)
class StepInputs:
    """Arguments of one call of a step.

    Attributes:
        params: one pytree per stage.
        batch: inputs and target, or a batch for each of several training steps.
        state: module state, one pytree per stage, or None.
        optim: the values that an update reads, or None.
        key: the random key, if the program draws.
        warns: whether to look for padding that makes the loss a wrong mean, once the loss is traced.
    """

    params: Any
    batch: Any
    state: Any = None
    optim: Optim = None
    key: Keys = None
    warns: bool = False

    @property
    def trees(self) -> tuple[Any, Any, Any, Any]:
        """Params, batch, state and optimizer values: all that holds tensors, as one pytree."""
        return self.params, self.batch, self.state, self.optim


@dataclass(frozen=True)
class StepOptions:
    """Options of `build` that hold for every runtime.

    Attributes:
        trace: whether stages are traced, or run under autograd.
        compile: whether inductor compiles the traced graphs.
        record: whether a step returns its timeline.
        check_finite: whether a step raises at the first op that writes NaN or an infinite number.
        loss_scale: factor of the loss's cotangent.
        donate: whether UPDATE may overwrite parameters and optimizer state.
        audit: when a part of a step is run again by its definition and compared.
        hoist: whether what depends on parameters alone is computed once for all microbatches.
        graph: whether the whole step is captured as one graph of the device.
        runs: False for a program that is lowered only to read its sizes or operations.
    """

    trace: bool = True
    compile: bool = False
    record: bool = False
    check_finite: bool = False
    loss_scale: float = 1.0
    donate: bool = False
    audit: Literal["first", "always", "never"] | int = "never"
    hoist: bool = True
    graph: bool = False
    runs: bool = True


S = TypeVar("S", bound=Callable[..., Result])


def _require_batch(call: S) -> S:
    """Raise TypeError for step(batch), which Python would answer with the name of a method."""

    @wraps(call)
    def call_with_batch(*args: Any, **kwargs: Any) -> Result:
        # args[0] is the step itself.
        if len(args) + ("params" in kwargs) + ("batch" in kwargs) < 3:
            raise TypeError("a step takes parameters and a batch: step(params, (inputs, target)).")
        return call(*args, **kwargs)

    return cast("S", call_with_batch)


class Step:
    """A training step made by `build`: a pure function, which overwrites nothing but donated arguments.

    Attributes:
        run: runs the program on checked arguments.
        warns: whether the next call looks for padding that would make the loss a wrong mean; True before the first.

    >>> import inspect
    >>> tuple(inspect.signature(Step.__call__).parameters)[1:]
    ('params', 'batch', 'extra', 'state', 'key', 'opt', 'lr', 'scale')
    """

    def __init__(
        self,
        program: Program,
        model: Model,
        run: Callable[[StepInputs], Result],
        run_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        self._program, self._model, self._run_context = program, model, run_context
        self.run, self.warns = run, True

    @_require_batch
    def __call__(
        self,
        params: Sequence[Any],
        batch: tuple[Any, Any],
        *extra: Any,
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
            state: module state, one pytree per stage, if a stage reads it.
            key: for a program that draws random numbers: one key, or one for each of its steps.
            opt: for a program with an `update`: the optimizer's state, as `optimizer_state` makes it.
            lr: its learning rate, if the program does not set one: a number, or one for each of its steps. A dict,
                such as {"lr": 3e-4, "weight_decay": 0.1}, sets other numbers of the rule too.
            scale: for `update(loss_scale=)`: a number, or `Result.scale` of the step before.
        """
        # Arguments are checked inside the context: a wrong one on one rank becomes an error of the step on all ranks.
        with self._run_context():
            refuse_unsupported_modes()
            keys = check_key(self._program, extra, key)
            tree.register_mappings(batch)
            warns, self.warns = self.warns, False
            return self.run(StepInputs(params, batch, state, check_optim(self._program, opt, lr, scale), keys, warns))


def warn_of_padding(program: Program, model: Model, batch: Any, labels: MeanLabels) -> None:
    """Warn if means over the labels of microbatches are averaged where that is not the mean of the batch."""
    split_settings = next((dict(op.options) for op in program.ops if op.kind == "SPLIT"), {})
    if model.reduction != "mean" or (program.microbatches == program.steps and "axis" not in split_settings):
        return
    presplit = "presplit" in split_settings
    batches: list[Any] = batch if program.steps > 1 and isinstance(batch, list) else [batch]
    for step_batch in batches:
        pair = step_batch
        if presplit and isinstance(step_batch, list) and all(map(_is_pair, step_batch)):  # pyright: ignore[reportUnknownArgumentType]
            pair = tuple(zip(*step_batch, strict=True))  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        if not _is_pair(pair):
            continue  # a wrong batch, which the step refuses
        warning = describe_padding(labels, pair, presplit=presplit)  # pyright: ignore[reportUnknownArgumentType]
        if warning:
            warn(warning, stacklevel=3)
            return


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple) and len(batch) == 2  # pyright: ignore[reportUnknownArgumentType]


def check_key(program: Program, extra: Sequence[Any], key: Any) -> Keys:
    """Return the key of a step; raise for extra arguments, a key that is no number, or a wrong number of keys."""
    refuse_extra_arguments(extra, "step(params, {})")
    if program.steps == 1 or key is None:
        # fold_in raises TypeError for a key that is no whole number.
        return key if key is None else (fold_in(key), key)[1]
    if not isinstance(key, list | tuple) or len(key) != program.steps:  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"key is a list of {program.steps} whole numbers, one for each training step; found {key!r}.")
    return tuple((fold_in(number), number)[1] for number in key)  # pyright: ignore[reportUnknownVariableType]


def check_optim(program: Program, opt: Any, lr: Any, scale: Any) -> Optim:
    """Return the optimizer's state, learning rates and loss scale that a program reads, or None without an update.

    Raises:
        ValueError: one of them is missing, or is given and not read.
        TypeError: the scale is no number.
    """
    op = find_update(program)
    if op is None:
        for name, argument in (("opt", opt), ("lr", lr), ("scale", scale)):
            if argument is not None:
                raise ValueError(f"without fpipe.update() a program takes no {name}=.")
        return None
    if opt is None:
        raise ValueError(MISSING.format("opt", "opt", "fpipe.optimizer_state(program, params)"))
    reads_rate = any(value.name == "lr" for value in op.reads)
    if reads_rate and lr is None:
        raise ValueError(MISSING.format("lr", "lr", "3e-4"))
    # Rates travel as tensors of doubles: the bits of the caller's floats, whatever the parameters' dtype.
    rates = rates_by_step(lr, program.steps, update_settings(op.options))
    reads_scale = any(value.name == "valid" for value in op.reads)
    if reads_scale is not (scale is not None):
        unread = "this program scales no loss; leave scale= out, or say fpipe.update(loss_scale=)."
        raise ValueError(MISSING.format("scale", "scale", "2.0**16") if reads_scale else unread)
    return opt, rates if reads_rate else [], _as_loss_scale(scale) if reads_scale else None


def _as_loss_scale(scale: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a loss scale and the number of finite steps since it last grew, which is 0 for a plain number."""
    if isinstance(scale, int | float) and not isinstance(scale, bool) and scale > 0:
        return torch.tensor(float(scale)), torch.tensor(0, dtype=torch.int32)
    if not isinstance(scale, tuple) or [getattr(part, "dtype", None) for part in scale] != [torch.float32, torch.int32]:  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        raise TypeError(f"scale is a number above 0, or the scale of a result; found {scale!r}.")
    return scale  # pyright: ignore[reportUnknownVariableType]


# Wrap steps: repeat a step whose norm was not valid, or run it under autocast.


def repeat_if_invalid(program: Program, make_step: Callable[[Program, bool], S], donate: bool) -> S:
    """Return the step of a program, which runs again, with updates that wait for norms, if it was invalid.

    Post-validation updates parameters before the global norm is known. The repetition starts from the same arguments,
    so only the repetition may overwrite them.
    """
    if not is_post_validated(program):
        return make_step(program, donate)
    step, waiting_step = make_step(program, False), make_step(with_waiting_updates(program), donate)

    @wraps(step)
    def checked(*args: Any, **kwargs: Any) -> Result:
        result = step(*args, **kwargs)
        valid = result.valid if isinstance(result.valid, tuple) else (result.valid,)
        return result if all(map(bool, valid)) else waiting_step(*args, **kwargs)

    return cast("S", checked)


def under_autocast(dtype: torch.dtype | None, make: Callable[[], S]) -> S:
    """Return the step of `make`, made and run under autocast to a dtype on the CPU and an accelerator, if any."""
    if dtype is None:
        return make()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    settings = tuple(
        (device_type, dtype, True) for device_type in ("cpu", *([] if accelerator is None else [accelerator.type]))
    )
    with autocast_as(settings):
        inner_step = make()

    @wraps(inner_step)
    def step(*args: Any, **kwargs: Any) -> Result:
        with autocast_as(settings):
            return inner_step(*args, **kwargs)

    return cast("S", step)


def check_autocast_dtype(dtype: object) -> None:
    """Raise ValueError for a dtype that autocast does not cast to."""
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast is torch.bfloat16, torch.float16 or None; found {dtype!r}.")
