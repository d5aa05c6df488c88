"""The verdict on a recorded run: where it goes wrong, in which phase, and by which mistake.

reference under noise of one unit of its dtype, three times --> spread        |recorded - reference| <= 4 spread + 2 eps
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fpipe.verification.report import Close, GradientMismatch, Leaf, Report, largest_difference, to_double

PHASES = (
    "start",
    "batch",
    "forward",
    "loss",
    "backward",
    "accumulation",
    "reduction",
    "norm",
    "clip",
    "update",
    "replicas",
)
"""The phases of a step, in the order in which they are judged."""

# How many spreads, and how many epsilons of its norm, a tensor may be away from the reference.
_SPREADS, _EPSILONS = 4.0, 2.0
_SEEDS = (1, 2, 3)

# Faults after the first that a message lists.
_MAX_LISTED = 4


@dataclass(frozen=True)
class Fault:
    """A place at which a recorded run differs from its reference.

    Attributes:
        subject: the module, the parameter or `rank 1`.
        phase: one of PHASES.
        mistake: a sentence without its full stop.
        moment: (step, phase, microbatch, ..), by which the first fault is chosen.
    """

    subject: str
    phase: str
    mistake: str
    moment: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.subject}, {self.phase} of step {self.moment[0]}: {self.mistake}."


@dataclass(frozen=True)
class RunReport(Report):
    """The report of `compare_run`.

    Attributes:
        where: the first module, parameter or rank that is wrong; None where all is right.
        phase: the phase in which it is: start, batch, forward, loss, backward, accumulation, reduction, norm, clip,
            update or replicas.
        mistake: the mistake in words.

    >>> print(RunReport((Leaf("w", True, 0.0),)))
    1 of 1 tensors of the run bitwise equal to the reference, largest error 0
    """

    where: str | None = None
    phase: str | None = None
    mistake: str | None = None

    def __str__(self) -> str:
        bitwise_count = sum(leaf.bitwise for leaf in self.leaves)
        equal = f"{bitwise_count} of {len(self.leaves)} tensors of the run bitwise equal to the reference"
        return "\n".join((f"{equal}, largest error {self.max_error:g}", *self.notes))


@dataclass
class Findings:
    """Faults, compared tensors and notes, collected while a record is judged.

    Attributes:
        close: a tolerance instead of that of rounding.
    """

    faults: list[Fault] = field(default_factory=list[Fault])
    leaves: list[Leaf] = field(default_factory=list[Leaf])
    notes: dict[str, None] = field(default_factory=dict[str, None])
    close: Close | None = None

    def agree(self, name: str, actual: Tensor, expected: Tensor, limit: Callable[[], float]) -> bool:
        """Compare two tensors, note the result, and return whether they agree bitwise or within the limit."""
        if actual.shape != expected.shape:
            self.leaves.append(Leaf(name, False, float("inf")))
            return False
        bitwise = actual.dtype == expected.dtype and Close()(actual, expected)
        self.leaves.append(Leaf(name, bitwise, 0.0 if bitwise else largest_difference(actual, expected)))
        if self.close is not None:
            return self.close(actual.to(expected.dtype), expected)
        return bitwise or distance(actual, expected) <= limit()


def report_of(findings: Findings) -> RunReport:
    """Return the report, or raise GradientMismatch with the first fault of the first step that has one."""
    report = RunReport(tuple(findings.leaves), notes=tuple(findings.notes))
    if not findings.faults:
        return report
    faults = sorted(findings.faults, key=lambda fault: fault.moment)
    sentence, *later_sentences = dict.fromkeys(map(str, faults))
    listed = [f"  also {text}" for text in later_sentences[:_MAX_LISTED]]
    listed += [f"  and {len(later_sentences) - _MAX_LISTED} more"] * (len(later_sentences) > _MAX_LISTED)
    first_fault = faults[0]
    raise GradientMismatch(
        "\n".join([sentence, *listed]),
        replace(report, where=first_fault.subject, phase=first_fault.phase, mistake=first_fault.mistake),
    )


def distance(actual: Tensor, expected: Tensor) -> float:
    """Return the norm of the difference of two tensors; infinite if only one has a NaN, or their shapes differ."""
    if actual.shape != expected.shape:
        return float("inf")
    wide_actual, wide_expected = to_double(actual), to_double(expected)
    # Equal infinities and NaN, as in a mask, are no difference.
    is_equal = (wide_actual == wide_expected) | (wide_actual.isnan() & wide_expected.isnan())
    error = float(torch.where(is_equal, 0.0, wide_actual - wide_expected).norm())
    return error if error == error else float("inf")


def rounding_limit(expected: Tensor, moved: Sequence[Tensor], eps: float) -> float:
    """Return how far rounding may take a tensor from the expected one, by how far noise has moved it.

    >>> rounding_limit(torch.ones(1), [torch.tensor([1.5])], eps=0.25)
    2.5
    """
    finite = to_double(expected).nan_to_num(0.0, 0.0, 0.0)
    spread = max((distance(tensor, expected) for tensor in moved), default=0.0)
    return _SPREADS * spread + _EPSILONS * eps * float(finite.norm())


def rounding_shift(expected: Tensor, moved: Sequence[Tensor], eps: float) -> float:
    """Return how far rounding may take a single number of a tensor, by how far noise has moved the numbers.

    >>> rounding_shift(torch.tensor([1.0, 4.0]), [torch.tensor([1.5, 4.0])], eps=0.25)
    4.0
    """
    # Masked scores are infinite, and stay so.
    shifts = (float((to_double(x) - to_double(expected)).nan_to_num(0.0).abs().max()) for x in moved)
    largest = float(to_double(expected).nan_to_num(0.0, 0.0, 0.0).abs().max())
    return _SPREADS * max(shifts, default=0.0) + _EPSILONS * eps * largest


def eps_of(*tensors: Tensor) -> float:
    """Return the coarsest machine epsilon of the floating tensors among these.

    >>> eps_of(torch.ones(1), torch.ones(1, dtype=torch.bfloat16), torch.arange(2))
    0.0078125
    """
    inexact = (tensor.dtype for tensor in tensors if tensor.is_floating_point() or tensor.is_complex())
    return max((torch.finfo(dtype).eps for dtype in inexact), default=0.0)


def noises(eps: float) -> list[Callable[[Tensor], Tensor]]:
    """Return three functions that move each number of a tensor up or down by one unit of a precision."""

    def noise(seed: int) -> Callable[[Tensor], Tensor]:
        generator = torch.Generator().manual_seed(seed)

        def moved(tensor: Tensor) -> Tensor:
            if not tensor.is_floating_point():
                return tensor
            signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
            return (tensor.double() * (1 + max(eps, torch.finfo(tensor.dtype).eps) * signs)).to(tensor.dtype)

        return moved

    return [noise(seed) for seed in _SEEDS]
