"""Compare the tensors of a step, or of its replay by a graph, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.fingerprint import StepChanged
from fpipe.meaning.purity.sharded import local_shard
from fpipe.meaning.purity.write_guard import is_strided, storage_span
from fpipe.verification.report import Close, largest_difference, to_dense, to_double

_ALIGNMENT = 64
_close = Close()


def refuse_wrong_replay(replayed: Mapping[str, Any], expected: Mapping[str, Any], repeated: Mapping[str, Any]) -> None:
    """Raise StepChanged if a replay has other results than the instructions of the step, which ran twice.

    Where these gave other bits the second time, as kernels do that add in any order, only losses and gradients are
    compared, to rounding.
    """
    expected_leaves, repeated_leaves = ([*map(local_shard, tree.leaves(side))] for side in (expected, repeated))
    pairs = zip(expected_leaves, repeated_leaves, strict=True)
    is_repeatable = all(have_same_bits(*pair) for pair in pairs if are_same_shape(*pair))
    for (path, replayed_leaf), defined in zip(tree.paths(replayed), expected_leaves, strict=True):
        leaf = local_shard(replayed_leaf)
        if not are_same_shape(leaf, defined) or have_same_bits(leaf, defined):
            continue
        error = largest_error(leaf, defined)
        # A rule may turn a gradient's last bit into a step of another sign.
        is_smooth = path.startswith(("['loss']", "['grads']", "['input_grads']"))
        if is_repeatable or (is_smooth and not may_be_rounding(leaf, defined, [defined])):
            raise StepChanged(
                f"the graph replays {path} off by up to {error:.3g} from its ops. If a "
                "kernel read a number on the host at the capture, build anew, or say graph=False."
            )


def may_be_rounding(actual: Tensor, defined: Tensor, expected: Sequence[Any], least_eps: float = 0.0) -> bool:
    """Return whether rounding explains the difference of two tensors.

    Sums in another order differ by far less than sqrt(eps) of the largest number in `expected`. What has overflowed is
    infinite or NaN, as the order of the ops has it.
    """
    has_overflowed = ~(to_double(actual).isfinite() | to_double(defined).isfinite())
    error = largest_error(*(to_double(leaf).masked_fill(has_overflowed, 0) for leaf in (actual, defined)))
    eps = max(torch.finfo(actual.dtype).eps, least_eps) if _has_numbers(actual) else 0.0
    return error <= eps**0.5 * max((largest_magnitude(leaf) for leaf in expected if _has_numbers(leaf)), default=0.0)


def have_same_bits(actual: Tensor, defined: Tensor) -> bool:
    """Return whether two tensors of one shape and dtype have equal bits."""
    if actual.dtype is not torch.float32:
        return _close(actual.detach(), defined.detach())
    # As integers: NaN equals itself, 0.0 and -0.0 differ, and nothing is copied.
    return torch.equal(actual.detach().view(torch.int32), defined.detach().view(torch.int32))


def largest_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference; huge where only one of two numbers is finite, or two infinities differ."""
    actual, expected = to_dense(actual.detach()), to_dense(expected.detach())
    is_equal = actual == expected
    if _has_numbers(actual):
        is_equal |= actual.isnan() & expected.isnan()
    return largest_difference(torch.where(is_equal, 0, actual), torch.where(is_equal, 0, expected))


def are_same_shape(actual: Any, defined: Any) -> bool:
    """Return whether two leaves are tensors of one shape and dtype."""
    are_tensors = isinstance(actual, Tensor) and isinstance(defined, Tensor)
    return are_tensors and (actual.shape, actual.dtype) == (defined.shape, defined.dtype)


def copy_leaf(leaf: Any) -> Any:
    """Copy a tensor with its strides and its alignment, by which kernels choose the order of their sums."""
    if not isinstance(leaf, Tensor):
        return leaf
    leaf = leaf.detach()
    if not is_strided(leaf) or leaf.is_conj() or leaf.is_neg():
        return leaf.clone()
    span, start = storage_span(leaf.shape, leaf.stride()), leaf.data_ptr() % _ALIGNMENT // leaf.itemsize
    memory = leaf.new_empty(start + span)
    memory[start:] = leaf.as_strided((span,), (1,))
    return memory.as_strided(leaf.shape, leaf.stride(), start)


def largest_magnitude(tensor: Tensor) -> float:
    """Return the largest absolute value; NaN and infinities count as 0."""
    return float(to_dense(tensor.detach()).abs().nan_to_num(0.0, posinf=0.0).max())


def _has_numbers(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.numel() > 0 and (leaf.is_floating_point() or leaf.is_complex())
