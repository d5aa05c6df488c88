"""Make steps that run others: once more with updates behind their norms, or under autocast.

step(params, batch, ..)        valid is False        -->        the result of the same steps, updates behind their norms
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

import torch

from fpipe.meaning.purity.ambient import casting
from fpipe.meaning.single_device.result import Result
from fpipe.program import Program
from fpipe.transforms.update import behind_norms, is_post_validated

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
