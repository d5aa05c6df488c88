"""Do training steps again whose updates should have waited for their norms.

step(params, batch, ..)        valid is False        -->        the result of the same steps, updates behind their norms
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar, cast

from fpipe.program import Program
from fpipe.single_device.result import Result
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
