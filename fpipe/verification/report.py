"""Reports of comparisons with plain autograd, leaf by leaf, and the rules by which two tensors agree.

Two computations of one gradient differ in their last bits, a mistake by more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fpipe.program import HtmlRepr, Op, Value
from fpipe.torch_internals import TorchDispatchMode


def is_comparable(value: object) -> bool:
    """Return whether a value is a tensor whose numbers torch can compare.

    >>> is_comparable(torch.ones(2)), is_comparable(torch.arange(2)), is_comparable(torch.empty(2, device="meta"))
    (True, False, False)
    """
    # On nested, quantized or 1-byte floating tensors torch's comparisons raise, or end the process.
    if not isinstance(value, Tensor) or value.is_nested or value.is_meta:
        return False
    is_number = value.is_complex() or (value.is_floating_point() and value.itemsize > 1)
    return is_number and value.layout in (torch.strided, torch.sparse_coo)


def describe_tensor(value: object) -> str:
    """Describe a tensor by dtype, layout and device, and any other value by its type.

    >>> describe_tensor(torch.arange(2))
    'a tensor of torch.int64, torch.strided, on cpu'
    """
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}"
    nested = "nested " * value.is_nested
    return f"a {nested}tensor of {value.dtype}, {value.layout}, on {value.device.type}"


@dataclass(frozen=True)
class Leaf:
    """One compared tensor.

    Attributes:
        name: `loss`, `grads[0]['w']`.
        bitwise: whether all bits agree.
        error: the largest absolute difference of any number.
        verdict: in `compare_grads`, a diagnosis in words.
    """

    name: str
    bitwise: bool
    error: float
    verdict: str = ""


@dataclass(frozen=True)
class Report(HtmlRepr):
    """Findings of `verify` or `compare_grads`, leaf by leaf.

    Attributes:
        leaves: every compared tensor, a `Leaf` with its name.
        undivided: in a sentence, whether the undivided batch in one go gives the same loss and gradients, or why it was
            not compared; empty where there is one microbatch.
        notes: sentences on what is worth a look although all agrees: numbers that are not finite, or an undivided batch
            that gives other results for no known reason. Both are printed.

    >>> print(Report((Leaf("loss", True, 0.0), Leaf("grads[0]['w']", False, 0.25))))
    1 of 2 leaves bitwise equal to plain autograd, largest error 0.25
    """

    leaves: tuple[Leaf, ...]
    undivided: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def bitwise(self) -> bool:
        """Whether every bit of every leaf agrees."""
        return all(leaf.bitwise for leaf in self.leaves)

    @cached_property
    def max_error(self) -> float:
        """The largest absolute difference."""
        return max((leaf.error for leaf in self.leaves), default=0.0)

    def __str__(self) -> str:
        bitwise_count = sum(leaf.bitwise for leaf in self.leaves)
        equal = f"{bitwise_count} of {len(self.leaves)} leaves bitwise equal to plain autograd"
        headline = f"{equal}, largest error {self.max_error:g}"
        sentences = [self.undivided] * (bool(self.undivided) and self.undivided not in self.notes)
        return "\n".join((headline, *self.notes, *sentences))


@dataclass(frozen=True)
class WrongValue:
    """The first value of a program that differs from plain autograd's.

    Attributes:
        op, value: the op that wrote it, and its name.
        location: stage, microbatch and rank, in words.
        error: the largest absolute difference of any number in it; infinite where it is of another kind.
        difference: the difference in words.
    """

    op: Op
    value: Value
    location: str
    error: float
    difference: str

    def __str__(self) -> str:
        return f"{self.value}, written by {self.op.cell} ({self.location}), {self.difference}"


class GradientMismatch(AssertionError):
    """A result that differs from plain autograd; the message says what, where and by how much.

    Attributes:
        report: every leaf, those that agree too.
        first: in `verify`, the first value of the program that is wrong; None where all are right that can be compared.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).square().mean())
    >>> params, batch = ({"w": torch.tensor(1.0)},), (torch.ones(4), torch.zeros(4))
    >>> fpipe.compare_grads(model, params, batch, ({"w": torch.tensor(4.0)},))
    Traceback (most recent call last):
    fpipe.verification.report.GradientMismatch: 1 of 1 gradients are not those of plain autograd.
    2 x: summed over 2 microbatches or ranks instead of averaged?
      0.w
    """

    def __init__(self, message: str, report: Report | None = None, first: WrongValue | None = None) -> None:
        super().__init__(message)
        self.report, self.first = report, first


def compare_leaf(name: str, actual: Tensor, expected: Tensor) -> Leaf:
    """Compare a tensor with the expected one.

    Raises:
        GradientMismatch: its dtype or shape is another.

    >>> compare_leaf("loss", torch.tensor(1.0), torch.tensor(1.5))
    Leaf(name='loss', bitwise=False, error=0.5, verdict='')
    """
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        raise GradientMismatch(
            f"{name} is {actual.dtype} of shape {tuple(actual.shape)}; plain autograd gives {expected.dtype} of shape "
            f"{tuple(expected.shape)}."
        )
    bitwise = bool(torch.equal(_bits(actual), _bits(expected)))
    return Leaf(name, bitwise, 0.0 if bitwise else largest_difference(actual, expected))


def largest_difference(actual: Tensor, expected: Tensor) -> float:
    """Return the largest absolute difference; infinite if a difference is NaN."""
    difference = (to_double(actual) - to_double(expected)).abs()
    return float(difference.nan_to_num(float("inf")).max()) if difference.numel() else 0.0


def to_double(tensor: Tensor) -> Tensor:
    """Return a dense copy of a tensor in double precision."""
    dense_tensor = to_dense(tensor.detach())
    return dense_tensor.to(torch.complex128) if dense_tensor.is_complex() else dense_tensor.double()


def is_finite(tensor: Tensor) -> bool:
    """Return whether all numbers of a tensor are finite."""
    return bool(torch.isfinite(to_dense(tensor)).all())


def to_dense(tensor: Tensor) -> Tensor:
    """Return a sparse tensor as a strided one."""
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _bits(tensor: Tensor) -> Tensor:
    """Return a tensor as bytes, so that NaN equals NaN and 0.0 differs from -0.0."""
    tensor = to_dense(tensor).detach()
    # A clone: torch calls one row of a wider tensor contiguous, but its strides allow no view as bytes.
    return (tensor if tensor.ndim else tensor.reshape(1)).clone(memory_format=torch.contiguous_format).view(torch.uint8)


@dataclass(frozen=True)
class Close:
    """A test of whether two tensors agree: bit by bit, or within a tolerance.

    >>> Close(rtol=1e-3)(torch.tensor(1.0), torch.tensor(1.0001)), Close()(torch.tensor(0.0), torch.tensor(-0.0))
    (True, False)
    """

    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        for name, tolerance in (("rtol", self.rtol), ("atol", self.atol)):
            if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{name} is None or a number from 0; found {tolerance!r}.")

    def __call__(self, actual: Tensor, expected: Tensor) -> bool:
        """Return whether two tensors of one shape and dtype agree."""
        if self.rtol is None and self.atol is None:
            return bool(torch.equal(_bits(actual), _bits(expected)))
        return torch.allclose(actual, expected, rtol=self.rtol or 0.0, atol=self.atol or 0.0, equal_nan=True)

    def __str__(self) -> str:
        if self.rtol is None and self.atol is None:
            return "every bit was to agree"
        return f"rtol={self.rtol or 0.0:g}, atol={self.atol or 0.0:g}"


def list_names(names: Sequence[str]) -> str:
    """Join the first five of a list of names.

    >>> list_names(["loss", "outputs"]), list_names(list("abcdefg"))
    ('loss, outputs', 'a, b, c, d, e ...')
    """
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def relative_distance(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference divided by the expected norm; infinite if there is a NaN.

    >>> relative_distance(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    wide_actual, wide_expected = to_double(actual), to_double(expected)
    error, size = float((wide_actual - wide_expected).norm()), float(wide_expected.norm())
    if error == 0.0:
        return 0.0
    return error / size if size and error == error else float("inf")


def rounding_tolerance(*tensors: Tensor) -> float:
    """Return the largest relative distance that rounding may cause: the root of the coarsest machine epsilon.

    Additions in another order move a gradient by few epsilons if its terms are of its own size, and by many if they
    cancel. A mistake moves half of its digits or more.

    >>> round(rounding_tolerance(torch.ones(1)), 5)
    0.00035
    """
    return max(torch.finfo(leaf.dtype).eps for leaf in tensors) ** 0.5


class PrecisionWatch(TorchDispatchMode):
    """A mode that notes the machine epsilon of the least precise results of ops, such as those under autocast.

    >>> with PrecisionWatch() as precision, torch.autocast("cpu", torch.bfloat16):
    ...     y = torch.ones(2, 2) @ torch.ones(2, 2)
    >>> precision.eps
    0.0078125
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for leaf in results if isinstance(results, tuple | list) else (results,):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return results


def joint_norm(tensors: Iterable[Tensor]) -> float:
    """Return the norm of all tensors together."""
    return sum(float(to_double(leaf).norm()) ** 2 for leaf in tensors) ** 0.5


def are_negligible(actual: Tensor, expected: Tensor, total_norm: float) -> bool:
    """Return whether two gradients are zero but for the rounding of all gradients, whose norm is `total_norm`."""
    # The gradient of a key's bias under softmax is such a one: its terms cancel, and their rounding is left.
    eps = rounding_tolerance(actual, expected) ** 2
    return max(float(to_double(actual).norm()), float(to_double(expected).norm())) <= 10 * eps * total_norm


def agree_to_rounding(pairs: Iterable[tuple[Tensor, Tensor]], eps: float = 0.0) -> bool:
    """Return whether gradients agree with the expected ones but for rounding, leaf by leaf.

    Args:
        pairs: the actual and the expected gradient of each leaf.
        eps: the machine epsilon of the least precise numbers that they were computed with.
    """
    pair_list = list(pairs)
    total_norm = joint_norm(expected for _, expected in pair_list)
    return all(
        relative_distance(actual, gradient) <= max(rounding_tolerance(actual, gradient), eps**0.5)
        or are_negligible(actual, gradient, total_norm)
        for actual, gradient in pair_list
    )


def means_agree_to_rounding(actual: Tensor, expected: Tensor, eps: float = 0.0) -> bool:
    """Return whether two means over many rows agree but for rounding.

    Roundings cancel in a mean, so the limit is epsilon to the power of three quarters: 6e-6 in float32.

    >>> means_agree_to_rounding(torch.tensor(5.57124), torch.tensor(5.57056))
    False
    """
    return relative_distance(actual, expected) <= max(rounding_tolerance(actual, expected), eps**0.5) ** 1.5
