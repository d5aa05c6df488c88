"""Ask the policy of a selective checkpoint, and switch `torch.utils.checkpoint` off where a function is traced."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.utils import checkpoint as checkpoints
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

_SAVED = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTED = (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def all_ops() -> list[OpOverload]:
    """Every op that torch knows by now, by name (2.13: `_dispatch_get_all_op_names`)."""
    library: Any = torch._C  # pyright: ignore[reportPrivateUsage]
    found: list[OpOverload] = []
    for name in sorted(library._dispatch_get_all_op_names()):
        space, _, rest = name.partition("::")
        word, _, overload = rest.partition(".")
        packet: Any = getattr(getattr(torch.ops, space), word, None)
        op = getattr(packet, overload or "default", None)
        if isinstance(op, OpOverload):
            found.append(cast("OpOverload", op))
    return found


def selective_checkpoint_answers(policy: Callable[..., Any]) -> dict[str, bool]:
    """Ask a selective checkpoint policy of every op by name (2.13: the context is made by hand)."""
    context: Any = SelectiveCheckpointContext(is_recompute=False)  # pyright: ignore[reportCallIssue]
    return {str(op): _is_saved(policy, context, op) for op in all_ops()}


def _is_saved(policy: Callable[..., Any], context: Any, op: OpOverload) -> bool:
    try:
        answer = policy(context, op)
    except Exception as error:
        raise TypeError(
            f"the policy for {op} raised {type(error).__name__}: {error}. It is asked as policy(ctx, op), without "
            "tensors, since a program knows none."
        ) from error
    if answer not in (*_SAVED, *_RECOMPUTED):
        raise TypeError(f"a policy answers with a torch.utils.checkpoint.CheckpointPolicy, found {answer!r} for {op}.")
    return answer in _SAVED


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
