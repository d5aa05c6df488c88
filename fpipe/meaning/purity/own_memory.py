"""Watch which memory ops write: a call may write what it made itself, and no other.

y = x * 2; y.add_(1)        fine: made since the mode is on
x.add_(1)                   refused before the write, on the line that does it
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.purity.schema import written
from fpipe.meaning.purity.sharded import of_sharded
from fpipe.torch_internals import StorageWeakRef, TorchDispatchMode, storage_of


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


_aten: Any = torch.ops.aten
_MOVES = (_aten._to_copy.default, _aten.detach.default, _aten.alias.default)
_DEVICE = torch.ops.prim.device.default
_LITERAL = _aten.lift_fresh.default  # torch.tensor([1, 2]) in a function


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
