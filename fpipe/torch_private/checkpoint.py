"""Ask the policy of a selective checkpoint, and switch `torch.utils.checkpoint` off where a function is traced."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as checkpoints


@contextmanager
def without_checkpoints(refuse: Callable[[], Any]) -> Generator[None]:
    """Meanwhile a checkpoint calls its function and no more; a reentrant one calls `refuse` (2.13, 2.15: the functions
    of its module that `checkpoint` looks up when it is called)."""

    class Refused:
        @staticmethod
        def apply(*_: Any) -> Any:
            return refuse()

    def around(*_: Any, **__: Any) -> Generator[None]:
        yield

    torchs: Any = checkpoints
    ours = {"CheckpointFunction": Refused, _GENERATOR: around}
    before = {name: getattr(torchs, name) for name in ours}
    vars(torchs).update(ours)
    try:
        yield
    finally:
        vars(torchs).update(before)


# What stands around a checkpoint's function; torch 2.15 calls it by the second name.
_NAMES = "_checkpoint_without_reentrant_generator", "_checkpoint_without_reentrant_generator_impl"
_GENERATOR = _NAMES[hasattr(checkpoints, _NAMES[1])]
