"""Which ops a recomputing backward finds saved, as names: a list of ops, or a policy asked of every op there is."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from fpipe.graphs.keep import ALL_BUT

_SAVED = (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
_RECOMPUTED = (False, CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


def saved_ops(save: Iterable[Any] | Callable[..., Any]) -> tuple[str, ...]:
    """The names of the ops whose results are saved, in order; of those that are not after "all but", if they are fewer.

    Raises:
        TypeError: something that is no op; a policy that wants to see tensors, or answers with something else.

    >>> saved_ops([torch.ops.aten.mm.default])
    ('aten.mm.default',)
    >>> saved_ops(lambda ctx, op: op is not torch.ops.aten.tanh.default)
    ('all but', 'aten.tanh.default')
    """
    if isinstance(save, str) or not (callable(save) or isinstance(save, Iterable)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"save lists ops, such as [torch.ops.aten.mm.default], or is policy(ctx, op); found {save!r}.")
    if not callable(save):
        for op in save:
            if not isinstance(op, OpOverload):
                raise TypeError(f"an op is named with its overload, such as torch.ops.aten.mm.default; found {op!r}.")
        return tuple(sorted({str(op) for op in save}))
    context: Any = SelectiveCheckpointContext(is_recompute=False)  # pyright: ignore[reportCallIssue]
    said = {str(op): _wanted(save, context, op) for op in _all_ops()}
    saved = tuple(name for name, wanted in said.items() if wanted)
    others = tuple(name for name, wanted in said.items() if not wanted)
    return saved if len(saved) <= len(others) else (ALL_BUT, *others)


def _wanted(policy: Callable[..., Any], context: Any, op: OpOverload) -> bool:
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


def _all_ops() -> list[OpOverload]:
    """Every op that torch knows by now, by name."""
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
