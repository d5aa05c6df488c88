"""Tensors without data that lie in memory as real ones would, so that a trace meets the views and copies of a real run.

torch tells what an op will write by a Python retelling of it, and some retell another order in memory: `hardtanh` of
transposed data, whose gradient then is viewed where plain autograd copies. Who does not rely on it asks the op itself.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.purity.ambient import Untraceable, kernels
from fpipe.meaning.purity.own_memory import tensors_in
from fpipe.meaning.purity.sharded import is_collective
from fpipe.meaning.stages.keys import seeded
from fpipe.torch_internals import returns_of
from fpipe.torch_private.dispatch import (
    OpOverload,
    fake_mode_class,
    refused_data_assignments,
    unlogged_fake_errors,
    without_modes,
)

_aten: Any = torch.ops.aten
# Torch tells truly what they write, whatever they are handed, and they are the ones that take long.
_LONG = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot", "_scaled_dot_product_flash_attention_for_cpu_backward")
_TRUSTED = tuple(getattr(_aten, name).default for name in _LONG)


def fake_mode() -> Any:
    """Return a mode under which tensors have no data; its first import of torch's takes a second."""
    return _mode()(allow_non_fake_inputs=True)


class LeakedTensor(RuntimeError):
    """A fake tensor outlives the run that made it: real runs would find it."""


@contextmanager
def no_leaks(mode: Any) -> Generator[None]:
    """Raise LeakedTensor if a function leaves fake tensors behind, as under `jax.checking_leaks`."""
    mode.made = references = list[weakref.ref[Tensor]]()
    yield
    mode.made = None
    if any(reference() is not None for reference in references):
        gc.collect()  # some may be gone but for references to themselves
    tensors = (reference() for reference in references)
    leaked = next((tensor for tensor in tensors if tensor is not None), None)
    if leaked is not None:
        types = {type(holder).__name__ for holder in gc.get_referrers(leaked)}
        kinds = types & {"dict", "list", "tuple", "set", "cell"}
        raise LeakedTensor(
            f"a tensor of shape {tuple(leaked.shape)} that was made of fake tensors, and so has no data, is left behind"
            f"{f' in a {min(kinds)}' if kinds else ''}, where real runs would find it. Clear it there, and run the "
            "stage on real data first, as a step does, so that what it caches is real; or let it keep no tensors."
        )


def watched_memory() -> AbstractContextManager[None]:
    """End a trace where `tensor.data = other` gives a fake tensor another's memory.

    That is no op, so what is computed from the tensor would be what was computed from it before.
    """
    return refused_data_assignments(_refuse_assignment)


def _refuse_assignment() -> None:
    raise Untraceable("it assigns the .data of a tensor, which no trace sees")


@cache
def _mode() -> Any:

    class Mode(fake_mode_class()):
        """torch's own, whose tensors get the strides that the ops really write; `made` takes what ops make."""

        made: list[Any] | None = None

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with unlogged_fake_errors():  # a mistake in a stage is raised; torch would print it too, with its own stack
                results = super().__torch_dispatch__(func, types, args, kwargs or {})
            if self.made is not None:
                self.made += map(weakref.ref, tensors_in(results if isinstance(results, list | tuple) else [results]))
            return results

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            results: Any = super().dispatch(func, types, args, kwargs or {})
            if not _writes_its_own(func) or _trusts_meta_strides(func, args):
                return results
            strides = _strides(func, args, kwargs or {})
            if isinstance(results, Tensor):
                return self._restrided(results, *strides) if len(strides) == 1 else results
            if not isinstance(results, list | tuple) or len(results) != len(strides):
                return results
            return (list if isinstance(results, list) else tuple)(map(self._restrided, results, strides))

        def _restrided(self, result: Any, strides: Any) -> Any:
            if not isinstance(result, Tensor) or strides is None or strides == result.stride():
                return result
            with self:
                return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)

    return Mode


@cache
def _writes_its_own(op: Any) -> bool:
    """Whether an op writes tensors of its own, whose order in memory it chooses."""
    if not isinstance(op, OpOverload) or op.namespace == "prim" or op in _TRUSTED or is_collective(op):
        return False
    results = returns_of(op)
    return bool(results) and all(result.alias_info is None for result in results)


def _trusts_meta_strides(op: Any, args: Any) -> bool:
    """Whether to believe the strides that torch's meta kernels report; an op must never run on invented indices."""
    tensors = [*tensors_in(args)]
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    alike = len({(tensor.shape, tensor.stride()) for tensor in tensors if tensor.dim()}) == 1
    numbers = (torch.bool, *(tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex()))
    odd = any(tensor.dtype not in numbers for tensor in tensors)
    seeded = torch.Tag.nondeterministic_seeded in op.tags  # rrelu of transposed data writes another order than told
    return odd or (alike and torch.Tag.pointwise in op.tags and not seeded)


_KNOWN: dict[Any, list[tuple[int, ...] | None]] = {}
_MOST = 4096


def _strides(op: Any, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[int, ...] | None]:
    """Return the strides of what an op writes, by running it once on zeros; nothing if it cannot run on those."""
    key = (op, kernels(), _described(args), _described(kwargs.items()))
    if key not in _KNOWN:
        if len(_KNOWN) >= _MOST:
            _KNOWN.clear()
        with without_modes(), torch.no_grad(), seeded(0, ""):
            try:
                results = op(*_zeros(args), **{word: _zeros(arg) for word, arg in kwargs.items()})
            except Exception:  # zeros may be no matrix to invert
                results = []
            results = results if isinstance(results, list | tuple) else [results]
            _KNOWN[key] = [result.stride() if isinstance(result, Tensor) else None for result in results]
    return _KNOWN[key]


def _described(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return tuple(arg.shape), arg.stride(), arg.dtype, arg.device
    return tuple(map(_described, arg)) if not isinstance(arg, str) and hasattr(arg, "__iter__") else repr(arg)


def _zeros(arg: Any) -> Any:
    if isinstance(arg, Tensor):
        return torch.empty_strided(arg.shape, arg.stride(), dtype=arg.dtype, device=arg.device).zero_()
    return type(arg)(map(_zeros, arg)) if isinstance(arg, list | tuple) else arg
