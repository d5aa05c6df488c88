"""Build and run steps under autocast, whatever is around the call.

build(.., autocast=torch.bfloat16)        -->        with torch.autocast(..): a step, forwards and backwards
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from fpipe.graphs.purity.ambient import casting
from fpipe.runtimes.definition.walk import Step


def under_autocast(dtype: torch.dtype | None, make: Callable[[], Step]) -> Step:
    """The step that `make` makes, under autocast to a dtype on the CPU and on an accelerator, if one is there."""
    if dtype is None:
        return make()
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kinds = tuple((kind, dtype, True) for kind in ("cpu", *([] if accelerator is None else [accelerator.type])))

    with casting(kinds):
        made = make()

    @wraps(made)
    def step(*args: Any, **more: Any) -> Any:
        with casting(kinds):
            return made(*args, **more)

    return step


def refuse_no_autocast(dtype: object) -> None:
    """A ValueError for what autocast does not cast to."""
    if dtype not in (None, torch.bfloat16, torch.float16):
        raise ValueError(f"autocast is torch.bfloat16, torch.float16 or None; found {dtype!r}.")
