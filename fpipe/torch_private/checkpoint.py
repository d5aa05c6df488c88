"""Switch `torch.utils.checkpoint` off where a function is traced."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint as checkpoints


@contextmanager
def without_checkpoints(refuse: Callable[[], Any]) -> Generator[None]:
    """Meanwhile a checkpoint calls its function and no more; a reentrant one calls `refuse` (2.13: the
    functions of its module that `checkpoint` looks up when it is called)."""

    class Refused:
        @staticmethod
        def apply(*_: Any) -> Any:
            return refuse()

    def around(*_: Any, **__: Any) -> Generator[None]:
        yield

    torchs: Any = checkpoints
    before = torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator
    torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator = Refused, around
    try:
        yield
    finally:
        torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator = before
