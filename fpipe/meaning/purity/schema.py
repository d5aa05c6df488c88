"""Ask the schema of an op what it does to its arguments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from fpipe.torch_internals import OpOverload, arguments_of, returns_of

_aten: Any = torch.ops.aten
BATCH_NORMS = (_aten.native_batch_norm.default, _aten.cudnn_batch_norm.default, _aten.miopen_batch_norm.default)
_NORMS = (*BATCH_NORMS, _aten.batch_norm.default, _aten.instance_norm.default)
"""In training these mutate their running statistics, though their schemas deny it."""
_TRAINING = 5  # the place of that argument


def written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of a call that the op mutates."""
    if op in _NORMS:
        return list(args[3:5]) if len(args) > _TRAINING and args[_TRAINING] else []
    places, words = _mutable(op)
    found = [args[place] for place in places if place < len(args)] + [kwargs[word] for word in words if word in kwargs]
    return [one for value in found for one in (value if isinstance(value, list | tuple) else [value])]


def mutated_by(node: fx.Node) -> list[fx.Node]:
    """Return the values of a graph that an op of it mutates."""
    return [value for value in written(node.target, node.args, node.kwargs) if isinstance(value, fx.Node)]


@cache
def is_view_in_place(op: Any) -> bool:
    """Whether an op in place changes only how a tensor looks at its memory, as `t_` does."""
    return isinstance(op, OpOverload) and torch.Tag.inplace_view in op.tags


@cache
def is_check(op: Any) -> bool:
    """Whether an op returns nothing and looks at data: it is there for the error that it may raise.

    >>> is_check(torch.ops.aten._linalg_check_errors.default), is_check(torch.ops.aten.add.Tensor)
    (True, False)
    """
    if not isinstance(op, OpOverload) or returns_of(op) or op is _aten._assert_tensor_metadata.default:
        return False
    return any(isinstance(one.type, torch.TensorType) for one in arguments_of(op)) and not any(_mutable(op))


@cache
def _mutable(op: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """The places and the names of the arguments that the schema of an op marks as mutable."""
    if not isinstance(op, OpOverload):
        return (), ()
    marked = [
        (place, argument.name)
        for place, argument in enumerate(arguments_of(op))
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(place for place, _ in marked), tuple(name for _, name in marked)
