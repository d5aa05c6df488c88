"""Refuse writes to memory that a call did not make, and describe how tensors lie in memory.

y = x * 2; y.add_(1)        fine: made while the mode was on
x.add_(1)                   refused before the write, on the line that does it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.meaning.purity.sharded import is_sharded
from fpipe.torch_internals import (
    HigherOrderOperator,
    OpOverload,
    StorageWeakRef,
    TorchDispatchMode,
    returns_of,
    schema_arguments,
    storage_of,
)

# Ask the schema of an op what it does to its arguments.

ATEN: Any = torch.ops.aten
BATCH_NORMS = (ATEN.native_batch_norm.default, ATEN.cudnn_batch_norm.default, ATEN.miopen_batch_norm.default)
# In training these mutate their running statistics (arguments 3 and 4), though their schemas mark nothing as mutable.
_ALL_NORMS = (*BATCH_NORMS, ATEN.batch_norm.default, ATEN.instance_norm.default)
_TRAINING_INDEX = 5


def mutated_arguments(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call that its op mutates."""
    if op in _ALL_NORMS:
        return list(args[3:5]) if len(args) > _TRAINING_INDEX and args[_TRAINING_INDEX] else []
    indices, keywords = _mutable_by_schema(op)
    by_position = [args[index] for index in indices if index < len(args)]
    by_keyword = [kwargs[keyword] for keyword in keywords if keyword in kwargs]
    # Ops on many tensors, such as _foreach_add_, take lists.
    lists = [argument if isinstance(argument, list | tuple) else [argument] for argument in by_position + by_keyword]
    return [argument for arguments in lists for argument in arguments]


def mutated_nodes(node: fx.Node) -> list[fx.Node]:
    """Return the nodes of an fx graph whose values this node mutates."""
    return [value for value in mutated_arguments(node.target, node.args, node.kwargs) if isinstance(value, fx.Node)]


@cache
def is_view_in_place(op: Any) -> bool:
    """Whether an in-place op changes only a tensor's sizes and strides, as `t_` does, and no number."""
    return isinstance(op, OpOverload) and torch.Tag.inplace_view in op.tags


@cache
def is_check(op: Any) -> bool:
    """Whether an op reads tensors and returns nothing, so that it can only raise an error.

    >>> is_check(torch.ops.aten._linalg_check_errors.default), is_check(torch.ops.aten.add.Tensor)
    (True, False)
    """
    if not isinstance(op, OpOverload) or returns_of(op) or op is ATEN._assert_tensor_metadata.default:
        return False
    return any(isinstance(argument.type, torch.TensorType) for argument in schema_arguments(op)) and not any(
        _mutable_by_schema(op)
    )


@cache
def _mutable_by_schema(op: Any) -> tuple[tuple[int, ...], tuple[str, ...]]:
    if not isinstance(op, OpOverload):
        return (), ()
    marked = [
        (index, argument.name)
        for index, argument in enumerate(schema_arguments(op))
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(index for index, _ in marked), tuple(name for _, name in marked)


class WriteGuard(TorchDispatchMode):
    """A dispatch mode under which ops write only storages that were made while it was on.

    Args:
        refuse: called with tensor and op before any other write; it raises.
        forbidden: if given, these tensors are the only ones that must not be written.

    Attributes:
        storages_made: the storages of tensors that ops returned.
        storages_read: the older storages that ops read; copies, casts and detaching do not count.
        storages_written: the storages that ops wrote.
    """

    supports_higher_order_operators = True

    def __init__(self, refuse: Callable[[Tensor, Any], None], forbidden: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.refuse = refuse
        self.forbidden = None if forbidden is None else {storage_key(tensor) for tensor in forbidden}
        self.storages_made: dict[Any, StorageWeakRef] = {}  # weak: keeps no memory, only its address taken
        self.storages_read: set[Any] = set()
        self.storages_written: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # A tensor that wraps others, such as a DTensor, runs first: the ops on what is inside come here again.
        if involves_wrapper(types):
            return NotImplemented
        kwargs = kwargs or {}
        # The functions of a higher-order op may not write what they are handed: torch refuses it.
        if isinstance(func, HigherOrderOperator):
            results = func(*args, **kwargs)
            self.storages_read |= {storage_key(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
            self.storages_made |= {
                storage_key(tensor): StorageWeakRef(tensor.untyped_storage()) for tensor in tensors_in((results,))
            }
            return results
        if func is _DEVICE_OP:  # a short cut: two calls in three under fake tensors
            return func(*args, **kwargs)
        for tensor in mutated_arguments(func, args, kwargs):
            if isinstance(tensor, Tensor) and tensor.numel():
                key = storage_key(tensor)
                self.storages_written.add(key)
                if not self.may_write(key):
                    self.refuse(tensor, func)
        argument_keys = {storage_key(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        if func not in _COPYING_OPS:
            self.storages_read |= argument_keys - self.storages_made.keys()
        results = func(*args, **kwargs)
        for tensor in tensors_in(results if isinstance(results, list | tuple) else (results,)):
            key = storage_key(tensor)
            # A result in the memory of an argument is a view, and as forbidden as the argument.
            if key is not None and (key not in argument_keys or func is _LITERAL_OP):
                self.storages_made[key] = StorageWeakRef(tensor.untyped_storage())
        return results

    def may_write(self, key: Any) -> bool:
        """Whether ops may write the storage with this key."""
        # Tensors without storage, such as sparse ones, cannot be told apart: writes to them pass.
        return key is None or (key in self.storages_made if self.forbidden is None else key not in self.forbidden)


_COPYING_OPS = (ATEN._to_copy.default, ATEN.detach.default, ATEN.alias.default)
_DEVICE_OP = torch.ops.prim.device.default
_LITERAL_OP = ATEN.lift_fresh.default  # torch.tensor([1, 2]) in a function: returns its argument, made by the call


def storage_key(tensor: Tensor) -> Any:
    """Return a key that is equal for tensors in one storage; None if a tensor has no storage, as sparse ones."""
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among an op's arguments or results, also those in lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


# Describe how a tensor lies in memory, and alias the value that a stage reads.


def involves_wrapper(types: Iterable[type]) -> bool:
    """Whether an op on tensors of these types is for a class that wraps other tensors to run."""
    return any(hasattr(tensor_type, "__tensor_flatten__") for tensor_type in types)


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor is of a class that wraps other tensors, such as a quantized weight; DTensors do not count."""
    return hasattr(type(tensor), "__tensor_flatten__") and not tensor.is_nested and not is_sharded(tensor)


def is_strided(tensor: Tensor) -> bool:
    """Whether a tensor is described by sizes and strides: sparse and nested tensors are not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def layout_of(tensor: Tensor) -> str:
    """Name the layout of a tensor that is not strided."""
    return "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"


@lru_cache(maxsize=1024)
def storage_span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Return the number of elements from a tensor's first to its last in memory, gaps included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * dim_stride for size, dim_stride in zip(shape, stride, strict=True))


@lru_cache(maxsize=1024)
def is_dense(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether a tensor of these strides has neither gaps nor overlaps in memory."""
    # Without gaps each stride is the product of the sizes of all dimensions with smaller strides. Dimensions of size 1
    # have arbitrary strides.
    steps = sorted((dim_stride, size) for size, dim_stride in zip(shape, stride, strict=True) if size != 1)
    expected = 1
    for dim_stride, size in steps:
        if dim_stride != expected:
            return False
        expected *= size
    return True


def with_layout_of(param: Any, grad: Any) -> Any:
    """Return a gradient in the strides of its parameter, as `.backward()` leaves it; contiguous if these have gaps.

    Fused optimizer kernels and norms walk through the memory of parameter and gradient in one order, whatever the
    strides: with other strides a fused update would add numbers to the wrong places.
    """
    if grad is None or not is_strided(param) or not is_strided(grad) or not grad.numel():
        return grad
    shape, stride = tuple(param.shape), param.stride()
    # Dimensions from the largest stride to the smallest: a gradient that is contiguous in this order has these strides.
    dims = sorted(range(len(shape)), key=lambda dim: -stride[dim]) if is_dense(shape, stride) else [*range(len(shape))]
    permuted = grad.permute(dims)
    if permuted.is_contiguous():
        return grad
    return permuted.clone(memory_format=torch.contiguous_format).permute([dims.index(dim) for dim in range(len(dims))])


def alias(leaf: Any) -> Any:
    """Return an alias of a value for the stage that reads it, which is no leaf of autograd's graph.

    In the whole model an activation is no leaf either. Autocast casts a leaf once for all its uses, so it would add
    their gradients up in the lower precision.
    """
    # A view would not do: where a size is 1 it has other strides, by which torch picks other kernels. Sparse tensors
    # have no alias.
    is_known = isinstance(leaf, Tensor) and leaf.requires_grad and is_strided(leaf)
    return torch.ops.aten.alias.default(leaf) if is_known else leaf


# Per-row gradients: expand each parameter by a dimension of rows, so that its gradient has an entry for each row.


def count_rows(leaves: Iterable[Any]) -> int:
    """Return the number of rows of a stage's inputs, from the first leaf that has a dimension."""
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)


def expand_per_row(leaves: Sequence[Any], rows: int) -> list[Any]:
    """Return a stage's parameters, each expanded to a leading dimension of rows."""
    return [
        leaf.detach().expand(rows, *leaf.shape).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
