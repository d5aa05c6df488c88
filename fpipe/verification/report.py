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


def is_comparable(found: object) -> bool:
    """Whether this is a tensor whose numbers can be compared; of others torch raises or ends the process.

    >>> is_comparable(torch.ones(2)), is_comparable(torch.arange(2)), is_comparable(torch.empty(2, device="meta"))
    (True, False, False)
    """
    if not isinstance(found, Tensor) or found.is_nested or found.is_meta:
        return False
    is_number = found.is_complex() or (found.is_floating_point() and found.itemsize > 1)
    return is_number and found.layout in (torch.strided, torch.sparse_coo)


def in_words(found: object) -> str:
    """A tensor's dtype, layout and device, or the type of what is none.

    >>> in_words(torch.arange(2))
    'a tensor of torch.int64, torch.strided, on cpu'
    """
    if not isinstance(found, Tensor):
        return f"a {type(found).__name__}"
    nested = "nested " * found.is_nested
    return f"a {nested}tensor of {found.dtype}, {found.layout}, on {found.device.type}"


@dataclass(frozen=True)
class Leaf:
    """One compared tensor.

    Attributes:
        name: `loss`, `grads[0]['w']`.
        bitwise: whether all bits agree.
        error: the largest absolute difference of any number.
        verdict: in `compare_grads`, what is found of it, in words.
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
        notes: what is worth a look although all agrees: numbers that are not finite, an undivided batch that gives
            something else without a reason that is known. Both are printed.

    >>> print(Report((Leaf("loss", True, 0.0), Leaf("grads[0]['w']", False, 0.25))))
    1 of 2 leaves bitwise equal to plain autograd, largest error 0.25
    """

    leaves: tuple[Leaf, ...]
    undivided: str = ""
    notes: tuple[str, ...] = ()

    @cached_property
    def bitwise(self) -> bool:
        """Every bit of every leaf agrees."""
        return all(leaf.bitwise for leaf in self.leaves)

    @cached_property
    def max_error(self) -> float:
        """The largest absolute difference."""
        return max((leaf.error for leaf in self.leaves), default=0.0)

    def __str__(self) -> str:
        same = sum(leaf.bitwise for leaf in self.leaves)
        first = f"{same} of {len(self.leaves)} leaves bitwise equal to plain autograd, largest error {self.max_error:g}"
        beside = [self.undivided] * (bool(self.undivided) and self.undivided not in self.notes)
        return "\n".join((first, *self.notes, *beside))


@dataclass(frozen=True)
class WrongValue:
    """The first value of a program that differs from plain autograd's.

    Attributes:
        op, value: the op that wrote it, and its name.
        where: stage, microbatch and rank, in words.
        error: the largest absolute difference of any number in it; infinite where it is of another kind.
        how: the difference in words.
    """

    op: Op
    value: Value
    where: str
    error: float
    how: str

    def __str__(self) -> str:
        return f"{self.value}, written by {self.op.cell} ({self.where}), {self.how}"


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


def compared(name: str, found: Tensor, expected: Tensor) -> Leaf:
    """One tensor beside the one to trust.

    Raises:
        GradientMismatch: it is of another dtype or shape.

    >>> compared("loss", torch.tensor(1.0), torch.tensor(1.5))
    Leaf(name='loss', bitwise=False, error=0.5, verdict='')
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise GradientMismatch(
            f"{name} is {found.dtype} of shape {tuple(found.shape)}; plain autograd gives {expected.dtype} of shape "
            f"{tuple(expected.shape)}."
        )
    bitwise = bool(torch.equal(_bits(found), _bits(expected)))
    return Leaf(name, bitwise, 0.0 if bitwise else largest(found, expected))


def largest(found: Tensor, expected: Tensor) -> float:
    """The largest absolute difference, infinite where there is one of NaN."""
    difference = (wide(found) - wide(expected)).abs()
    return float(difference.nan_to_num(float("inf")).max()) if difference.numel() else 0.0


def wide(tensor: Tensor) -> Tensor:
    """Its numbers in double precision."""
    made = dense(tensor.detach())
    return made.to(torch.complex128) if made.is_complex() else made.double()


def is_finite(tensor: Tensor) -> bool:
    """Whether a tensor has no NaN and nothing infinite."""
    return bool(torch.isfinite(dense(tensor)).all())


def dense(tensor: Tensor) -> Tensor:
    """A sparse tensor with its zeros."""
    return tensor.to_dense() if tensor.layout is not torch.strided else tensor


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bits, so that NaN equals NaN and 0 differs from -0."""
    tensor = dense(tensor).detach()
    # A clone: one row of a wider tensor is contiguous as it is, with strides that no view in bytes can have.
    return (tensor if tensor.ndim else tensor.reshape(1)).clone(memory_format=torch.contiguous_format).view(torch.uint8)


@dataclass(frozen=True)
class Close:
    """Whether two tensors agree: bit by bit, or within a tolerance where there is one.

    >>> Close(rtol=1e-3)(torch.tensor(1.0), torch.tensor(1.0001)), Close()(torch.tensor(0.0), torch.tensor(-0.0))
    (True, False)
    """

    rtol: float | None = None
    atol: float | None = None

    def __post_init__(self) -> None:
        for word, tolerance in (("rtol", self.rtol), ("atol", self.atol)):
            if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise ValueError(f"{word} is a number, at least 0, or None for every bit; found {tolerance!r}.")

    def __call__(self, found: Tensor, expected: Tensor) -> bool:
        """Whether two tensors of one shape and dtype do."""
        if self.rtol is None and self.atol is None:
            return bool(torch.equal(_bits(found), _bits(expected)))
        return torch.allclose(found, expected, rtol=self.rtol or 0.0, atol=self.atol or 0.0, equal_nan=True)

    def __str__(self) -> str:
        if self.rtol is None and self.atol is None:
            return "every bit was to agree"
        return f"rtol={self.rtol or 0.0:g}, atol={self.atol or 0.0:g}"


def listed(names: Sequence[str]) -> str:
    """The first five of a list of names.

    >>> listed(["loss", "outputs"]), listed(list("abcdefg"))
    ('loss, outputs', 'a, b, c, d, e ...')
    """
    return ", ".join(names[:5]) + (" ..." if len(names) > 5 else "")


def distance(found: Tensor, expected: Tensor) -> float:
    """The norm of the difference by that of what is expected; infinite where it is not a number.

    >>> distance(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0]))
    0.2
    """
    one, other = wide(found), wide(expected)
    error, size = float((one - other).norm()), float(other.norm())
    if error == 0.0:
        return 0.0
    return error / size if size and error == error else float("inf")


def tolerance(*tensors: Tensor) -> float:
    """How large a distance rounding may make: the root of the machine epsilon of the least precise one.

    Additions in another order move a gradient by few epsilons where its terms are of its size, and by many where they
    cancel; a mistake moves half of its digits or more.

    >>> round(tolerance(torch.ones(1)), 5)
    0.00035
    """
    return max(torch.finfo(leaf.dtype).eps for leaf in tensors) ** 0.5


class Coarsest(TorchDispatchMode):
    """Looks for the least precise numbers that ops compute with: under autocast these are not the parameters'.

    >>> with Coarsest() as seen, torch.autocast("cpu", torch.bfloat16):
    ...     y = torch.ones(2, 2) @ torch.ones(2, 2)
    >>> seen.eps
    0.0078125
    """

    def __init__(self) -> None:
        super().__init__()
        self.eps = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for leaf in made if isinstance(made, tuple | list) else (made,):
            if isinstance(leaf, Tensor) and leaf.is_floating_point():
                self.eps = max(self.eps, torch.finfo(leaf.dtype).eps)
        return made


def norm(tensors: Iterable[Tensor]) -> float:
    """The norm of all of them together."""
    return sum(float(wide(leaf).norm()) ** 2 for leaf in tensors) ** 0.5


def vanish(found: Tensor, expected: Tensor, whole: float) -> bool:
    """Whether both are zero but for the rounding of a gradient whose norm is `whole`, as that of a key's bias under
    softmax is: its terms cancel."""
    eps = tolerance(found, expected) ** 2
    return max(float(wide(found).norm()), float(wide(expected).norm())) <= 10 * eps * whole


def to_rounding(pairs: Iterable[tuple[Tensor, Tensor]], eps: float = 0.0) -> bool:
    """Whether gradients agree but for rounding with those expected, each leaf for itself; `eps` is that of the least
    precise numbers that they were computed with."""
    both = list(pairs)
    whole = norm(expected for _, expected in both)
    return all(distance(a, b) <= max(tolerance(a, b), eps**0.5) or vanish(a, b, whole) for a, b in both)


def is_mean_to_rounding(one: Tensor, other: Tensor, eps: float = 0.0) -> bool:
    """Whether two means over many rows agree but for rounding, which cancels in them: within the epsilon to the power
    of three quarters, 6e-6 in float32.

    >>> is_mean_to_rounding(torch.tensor(5.57124), torch.tensor(5.57056))
    False
    """
    return distance(one, other) <= max(tolerance(one, other), eps**0.5) ** 1.5
