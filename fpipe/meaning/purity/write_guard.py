"""Tell which memory an op writes and how a tensor lies in it: a call may write what it made itself, and no other.

y = x * 2; y.add_(1)        fine: made since the mode is on
x.add_(1)                   refused before the write, on the line that does it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import Any

import torch
from torch import Tensor, fx

from fpipe.meaning.purity.sharded import of_sharded
from fpipe.torch_internals import OpOverload, StorageWeakRef, TorchDispatchMode, arguments_of, returns_of, storage_of

# Ask the schema of an op what it does to its arguments.

ATEN: Any = torch.ops.aten
BATCH_NORMS = (ATEN.native_batch_norm.default, ATEN.cudnn_batch_norm.default, ATEN.miopen_batch_norm.default)
_NORMS = (*BATCH_NORMS, ATEN.batch_norm.default, ATEN.instance_norm.default)
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
    if not isinstance(op, OpOverload) or returns_of(op) or op is ATEN._assert_tensor_metadata.default:
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


class OwnMemory(TorchDispatchMode):
    """While it is on, an op may write only storages that were made since, or if said all but the `forbidden` ones;
    `refuse` is called before any other write, and raises.

    Attributes:
        read: the storages that ops read and that were there before; moving, casting and detaching are no reading.
        wrote: the storages that ops wrote.
    """

    def __init__(self, refuse: Callable[[Tensor, Any], None], forbidden: Iterable[Tensor] | None = None) -> None:
        super().__init__()
        self.refuse = refuse
        self.forbidden = None if forbidden is None else {memory(tensor) for tensor in forbidden}
        self.made: dict[Any, StorageWeakRef] = {}  # weak: no memory lives longer for it, and no number is used again
        self.read: set[Any] = set()
        self.wrote: set[Any] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if of_sharded(types):
            return NotImplemented
        kwargs = kwargs or {}
        if func is _DEVICE:  # two calls in three, where tensors are fake
            return func(*args, **kwargs)
        for tensor in written(func, args, kwargs):
            if isinstance(tensor, Tensor) and tensor.numel():
                place = memory(tensor)
                self.wrote.add(place)
                if not self.is_own(place):
                    self.refuse(tensor, func)
        taken = {memory(tensor) for tensor in tensors_in((*args, *kwargs.values()))}
        if func not in _MOVES:
            self.read |= taken - self.made.keys()
        results = func(*args, **kwargs)
        for tensor in tensors_in(results if isinstance(results, list | tuple) else (results,)):
            place = memory(tensor)
            if place is not None and (place not in taken or func is _LITERAL):
                self.made[place] = StorageWeakRef(tensor.untyped_storage())
        return results

    def is_own(self, place: Any) -> bool:
        """Whether a storage may be written."""
        return place is None or (place in self.made if self.forbidden is None else place not in self.forbidden)


_MOVES = (ATEN._to_copy.default, ATEN.detach.default, ATEN.alias.default)
_DEVICE = torch.ops.prim.device.default
_LITERAL = ATEN.lift_fresh.default  # torch.tensor([1, 2]) in a function


def memory(tensor: Tensor) -> Any:
    """An identity of a tensor's storage among all that are alive; None where it has none, as sparse ones."""
    try:
        return storage_of(tensor)
    except (NotImplementedError, RuntimeError):
        return None


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among the arguments of an op, or its results: in lists and tuples too."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


# Describe how a tensor lies in memory, and alias the value that a stage reads.


def is_strided(tensor: Tensor) -> bool:
    """Whether it is in one piece of memory, by sizes and strides: sparse and nested tensors are not."""
    return tensor.layout is torch.strided and not tensor.is_nested


def layout_of(tensor: Tensor) -> str:
    """Name the layout of a tensor that is not strided."""
    return "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"


@lru_cache(maxsize=1024)
def span(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """How many places in memory a tensor reaches over."""
    return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))


@lru_cache(maxsize=1024)
def fills(shape: tuple[int, ...], stride: tuple[int, ...]) -> bool:
    """Whether these steps reach each place of the memory once."""
    steps = sorted((step, n) for n, step in zip(shape, stride, strict=True) if n != 1)
    expected = 1
    for step, n in steps:
        if step != expected:
            return False
        expected *= n
    return True


def laid_out_as(param: Any, grad: Any) -> Any:
    """A gradient in the strides of its parameter, as `.backward()` leaves it; contiguous if these have gaps.

    Fused rules and norms go through the memory of a gradient from one end to the other, whatever its strides.
    """
    if grad is None or not is_strided(param) or not is_strided(grad) or not grad.numel():
        return grad
    shape, stride = tuple(param.shape), param.stride()
    # Dimensions from the widest step to the narrowest: a gradient that is contiguous in this order has these strides.
    order = sorted(range(len(shape)), key=lambda dim: -stride[dim]) if fills(shape, stride) else [*range(len(shape))]
    turned = grad.permute(order)
    if turned.is_contiguous():
        return grad
    return turned.clone(memory_format=torch.contiguous_format).permute([order.index(dim) for dim in range(len(order))])


def alias(leaf: Any) -> Any:
    """Alias a value for the stage that reads it: no leaf of autograd's graph, as in the model that is not cut.

    Autocast casts a leaf once for all its uses, and so adds their gradients up in the lower precision. A view would not
    do: where a size is 1 it has other strides, by which torch picks other kernels. Sparse tensors have no alias."""
    is_known = isinstance(leaf, Tensor) and leaf.requires_grad and is_strided(leaf)
    return torch.ops.aten.alias.default(leaf) if is_known else leaf


# Hand each row of a microbatch parameters of its own, which are all equal: their gradient is then one for each row.


def rows_of(leaves: Iterable[Any]) -> int:
    """How many rows there are in what a stage takes: scalars and what is no tensor have none."""
    return next(leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.ndim)


def of_each_row(leaves: Sequence[Any], rows: int) -> list[Any]:
    """The parameters of a stage, each with a dimension of rows in front."""
    return [
        leaf.detach().expand(rows, *leaf.shape).requires_grad_(leaf.requires_grad) if isinstance(leaf, Tensor) else leaf
        for leaf in leaves
    ]
