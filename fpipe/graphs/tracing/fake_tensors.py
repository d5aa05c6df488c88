"""Fake tensors with the strides of real ones, so that a trace takes the same views and copies as a real run.

    x.t() --> hardtanh --> meta kernel: strides (3, 1)        real kernel: strides (1, 2)

torch finds the result of an op on fake tensors by a meta kernel, a rewrite of the op in Python, and some of them report
other strides than the op writes. A wrong stride changes which later ops view and which copy, and so the traced ops.
Where strides may differ, the op itself runs once on zeros, and its strides are cached.
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

from fpipe.meaning.purity.ambient import Untraceable, kernel_settings
from fpipe.meaning.purity.keys import with_seed
from fpipe.meaning.purity.sharded import is_collective
from fpipe.meaning.purity.write_guard import tensors_in
from fpipe.torch_internals import HigherOrderOperator, as_expression, returns_of
from fpipe.torch_private.dispatch import (
    OpOverload,
    fake_mode_class,
    fake_rule_of,
    numbers_of_data_refused,
    python_dispatcher,
    refuse_data_assignments,
    silence_fake_errors,
    without_modes,
)
from fpipe.torch_private.fx import example_number

_aten: Any = torch.ops.aten
# The meta kernels of these report the right strides for all inputs, and running them on zeros would take long.
_PRODUCTS = ("mm", "bmm", "addmm", "baddbmm", "mv", "addmv", "dot")
_ATTENTION_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward"
_TRUSTED_OPS = tuple(getattr(_aten, name).default for name in (*_PRODUCTS, _ATTENTION_BACKWARD))


def fake_mode(shape_env: Any = None) -> Any:
    """Return a mode under which ops create fake tensors, with the symbols of `shape_env` as open sizes."""
    # The class is built on first use: its import takes a second.
    mode = _fake_mode_subclass()(allow_non_fake_inputs=True, shape_env=shape_env)
    # With open sizes a look-up in torch's cache of results takes longer than the meta kernel.
    mode.cache_enabled = mode.cache_enabled and shape_env is None
    return mode


class LeakedTensor(RuntimeError):
    """A fake tensor outlives the run that created it, and real runs would find it."""


@contextmanager
def refuse_leaks(mode: Any) -> Generator[None]:
    """Raise LeakedTensor if the code inside leaves fake tensors behind, as `jax.checking_leaks` does."""
    mode.created = references = list[weakref.ref[Tensor]]()
    yield
    mode.created = None
    if any(reference() is not None for reference in references):
        # A tensor in a reference cycle is dead, though its weak reference still finds it. Collecting is slow, so only
        # where something seems to be left.
        gc.collect()
    # `leaked` may be bound in no nested function: the cell of its closure would count as a holder.
    tensors = (reference() for reference in references)
    leaked = next((tensor for tensor in tensors if tensor is not None), None)
    if leaked is not None:
        types = {type(holder).__name__ for holder in gc.get_referrers(leaked)}
        kinds = types & {"dict", "list", "tuple", "set", "cell"}
        raise LeakedTensor(
            f"a tensor of shape {tuple(leaked.shape)} without data is left behind"
            f"{f' in a {min(kinds)}' if kinds else ''}. Clear it, or run the stage on "
            "real data first."
        )


def refuse_data_assignment() -> AbstractContextManager[None]:
    """Raise Untraceable where `tensor.data = other` gives a fake tensor the memory of another.

    The assignment is no op, so a trace would go on computing with the old value.
    """
    return refuse_data_assignments(_raise_data_assignment)


def _raise_data_assignment() -> None:
    raise Untraceable("it assigns a tensor's .data, which no trace sees")


@cache
def _fake_mode_subclass() -> Any:

    class Mode(fake_mode_class()):
        """torch's fake mode with true strides; `created` collects references to the results of ops."""

        created: list[Any] | None = None
        supports_higher_order_operators = True

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if isinstance(func, HigherOrderOperator) and (rule := fake_rule_of(func)) is not None:
                with numbers_of_data_refused(self):
                    return rule(self, *args, **(kwargs or {}))
            # A mistake in a stage is raised; torch would log it as well, with a stack of its own.
            with silence_fake_errors():
                results = super().__torch_dispatch__(func, types, args, kwargs or {})
            if self.created is not None:
                self.created += map(
                    weakref.ref, tensors_in(results if isinstance(results, list | tuple) else [results])
                )
            return results

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if self.shape_env is None:
                results: Any = super().dispatch(func, types, args, kwargs or {})
            else:
                # Some meta kernels know open sizes in Python alone. Around a whole trace the dispatcher would replace
                # composite ops above autograd, and with them the ops of the gradient.
                with python_dispatcher():
                    results = super().dispatch(func, types, args, kwargs or {})
            if results is NotImplemented or not _allocates_results(func) or _trusts_meta_strides(func, args):
                return results
            strides = _probe_strides(func, args, kwargs or {})
            if self.shape_env is not None:
                # A probe knows the strides of the example alone: where they differ, no expression is known.
                reported = results if isinstance(results, list | tuple) else [results]
                if strides and strides != [x.stride() and example_numbers(x.stride()) for x in reported]:
                    raise Untraceable(f"the strides that {func} writes are known for numbers alone")
                return results
            if isinstance(results, Tensor):
                return self._with_strides(results, *strides) if len(strides) == 1 else results
            if not isinstance(results, list | tuple) or len(results) != len(strides):
                return results
            return (list if isinstance(results, list) else tuple)(map(self._with_strides, results, strides))

        def _with_strides(self, result: Any, strides: Any) -> Any:
            if not isinstance(result, Tensor) or strides is None or strides == result.stride():
                return result
            with self:
                return torch.empty_strided(result.shape, strides, dtype=result.dtype, device=result.device)

    return Mode


@cache
def _allocates_results(op: Any) -> bool:
    """Whether an op allocates its results, and so chooses their strides, rather than returning views of its inputs."""
    if not isinstance(op, OpOverload) or op.namespace == "prim" or op in _TRUSTED_OPS or is_collective(op):
        return False
    results = returns_of(op)
    return bool(results) and all(result.alias_info is None for result in results)


def _trusts_meta_strides(op: Any, args: Any) -> bool:
    """Whether to believe the strides that torch's meta kernels report; an op must never run on invented indices."""
    tensors = [*tensors_in(args)]
    # Meta kernels are right for contiguous inputs, the usual case.
    if all(tensor.is_contiguous() for tensor in tensors):
        return True
    # Pointwise ops keep the strides of inputs that all have the same; meta kernels agree. An exception are random ops:
    # rrelu of transposed data writes other strides than its meta kernel reports.
    same_layout = len({layout_of_open(tensor) for tensor in tensors if tensor.dim()}) == 1
    value_dtypes = (torch.bool, *(x.dtype for x in tensors if x.is_floating_point() or x.is_complex()))
    # Zeros would be valid indices only by luck: index ops read and write where their integers say.
    has_indices = any(tensor.dtype not in value_dtypes for tensor in tensors)
    is_random = torch.Tag.nondeterministic_seeded in op.tags
    return has_indices or (same_layout and torch.Tag.pointwise in op.tags and not is_random)


_STRIDES_BY_CALL: dict[Any, list[tuple[int, ...] | None]] = {}
_MAX_CALLS = 4096


def _probe_strides(op: Any, args: Any, kwargs: Mapping[str, Any]) -> list[tuple[int, ...] | None]:
    """Return the strides of the results of an op, found by one run on zeros; an empty list if that run fails."""
    key = (op, kernel_settings(), _layout_key(args), _layout_key(kwargs.items()))
    if key not in _STRIDES_BY_CALL:
        if len(_STRIDES_BY_CALL) >= _MAX_CALLS:
            _STRIDES_BY_CALL.clear()
        with without_modes(), torch.no_grad(), with_seed(0, ""):
            try:
                results = op(*_zeros_like(args), **{name: _zeros_like(argument) for name, argument in kwargs.items()})
            except Exception:  # zeros are no invertible matrix, say: then the meta kernel is believed
                results = []
            results = results if isinstance(results, list | tuple) else [results]
            _STRIDES_BY_CALL[key] = [result.stride() if isinstance(result, Tensor) else None for result in results]
    return _STRIDES_BY_CALL[key]


def example_numbers(sizes: Any) -> tuple[int, ...]:
    """Return sizes with the numbers of the example in place of open ones."""
    return tuple(map(example_number, sizes))


def layout_of_open(tensor: Tensor) -> Any:
    """Return the sizes and strides of a tensor, open ones as expressions: torch's open sizes have no hash."""
    return tuple(map(as_expression, tensor.shape)), tuple(map(as_expression, tensor.stride()))


def _layout_key(x: Any) -> Any:
    if isinstance(x, Tensor):
        return example_numbers(x.shape), example_numbers(x.stride()), x.dtype, x.device
    return tuple(map(_layout_key, x)) if not isinstance(x, str) and hasattr(x, "__iter__") else repr(example_number(x))


def _zeros_like(x: Any) -> Any:
    if isinstance(x, Tensor):
        shape, stride = example_numbers(x.shape), example_numbers(x.stride())
        return torch.empty_strided(shape, stride, dtype=x.dtype, device=x.device).zero_()
    return type(x)(map(_zeros_like, x)) if isinstance(x, list | tuple) else example_number(x)
