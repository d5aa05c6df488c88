"""Call functions after each step of a training.

step = build(..)        -->        step = track(build(..), Progress(steps=100), CSV("run.csv"))
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from fpipe import tree
from fpipe.meaning.single_device.result import Result


@runtime_checkable
class Callback(Protocol):
    """Protocol of an object with `on_step`, called after each step; it may have `close()` for the end of the training.

    >>> class Losses:
    ...     def __init__(self) -> None:
    ...         self.losses = []
    ...     def on_step(self, result, seconds):
    ...         self.losses.append(float(result.loss))
    >>> isinstance(Losses(), Callback)
    True
    """

    def on_step(self, result: Result, seconds: float) -> None:
        """Take the result of a step and the seconds that it took."""
        ...


class TrackedStep:
    """Step that calls its callbacks, and context that closes them."""

    def __init__(self, step: Callable[..., Result], callbacks: tuple[Callback, ...]) -> None:
        self.step, self.callbacks = step, callbacks

    def __call__(self, *args: Any, **kwargs: Any) -> Result:
        """Run the step with these arguments, and then the callbacks."""
        if not self.callbacks:
            return self.step(*args, **kwargs)
        start = time.perf_counter()
        result = self.step(*args, **kwargs)
        # An accelerator computes on after the call has returned.
        devices = {leaf.device for leaf in tree.leaves((result.loss, result.params)) if isinstance(leaf, Tensor)}
        for device in devices - {torch.device("cpu"), torch.device("meta")}:
            torch.accelerator.synchronize(device)
        seconds = time.perf_counter() - start
        for callback in self.callbacks:
            callback.on_step(result, seconds)
        return result

    def __enter__(self) -> TrackedStep:
        return self

    def __exit__(self, *error: object) -> None:
        with ExitStack() as stack:
            for callback in self.callbacks:
                stack.callback(getattr(callback, "close", _do_nothing))


def track(step: Callable[..., Result], *callbacks: Callback, every_rank: bool = False) -> TrackedStep:
    """Return the step with functions that are called after it, by rank 0 alone where there are several processes.

    Args:
        step: what `fpipe.build` returned, or any function that returns a `Result`.
        callbacks: what is called after it, in this order.
        every_rank: whether all processes call them; rank 0 and the one that computes the loss know it.

    Returns:
        A step with the same arguments and results. As a context it closes its callbacks at the end.

    Raises:
        TypeError: a step that cannot be called, or a callback without `on_step(result, seconds)`.

    >>> import fpipe, torch
    >>> from fpipe import callbacks
    >>> class Losses:
    ...     def on_step(self, result, seconds):
    ...         print(f"loss {result.loss:g}, {seconds > 0}")
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).abs().mean())
    >>> with callbacks.track(fpipe.build(fpipe.program(model), model), Losses()) as step:
    ...     result = step(({"w": torch.tensor(2.0)},), (torch.ones(3), torch.zeros(3)))
    loss 2, True
    """
    # Other ranks do not know the loss, and ten files of one run are worse than one.
    is_silent = not every_rank and dist.is_initialized() and dist.get_rank() != 0
    return TrackedStep(step, () if is_silent else callbacks)


def _do_nothing() -> None:
    """Stand in for the missing `close` of a callback."""
