"""Find the first value of a program that differs from plain autograd's: the op that wrote it is the one at fault.

    program      x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]* ...        1F0 read what was right and wrote what is wrong
    reference    x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]

The reference has what SPLIT cuts, what passes between stages, losses, and each microbatch's gradients. A transfer hands
on what it reads, an ADD adds it up; residuals and joined results are not compared. The program is walked down op by op,
by its definition: where all its values are right, the step that ran it is at fault.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import Inputs, Residuals
from fpipe.meaning.meaning import summed
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepOptions
from fpipe.meaning.walk import place_of, walk
from fpipe.model import Model
from fpipe.program import Program, Value
from fpipe.verification.reference_settings import StepArguments
from fpipe.verification.report import Close, WrongValue, largest


class ReferenceValues(dict[Value, list[Any]]):
    """Plain autograd's values, as lists of leaves under the names that programs have for them."""

    def see(self, value: Value, pytree: Any) -> None:
        """Note a value while the reference runs."""
        self[value] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree.leaves(pytree)]


def first_wrong(
    program: Program, model: Model, arguments: StepArguments, expected: ReferenceValues, close: Close
) -> tuple[Result, WrongValue | None]:
    """Walk a program beside the reference, and return its result and the first value that differs.

    Args:
        program, model, arguments: as for a step.
        expected: the reference's values for the same microbatches.
        close: whether two tensors of one shape and dtype agree.
    """
    watch = _ValueWatch(program, model, expected, close)
    return arguments.call(walk(program, model, StepOptions(), see=watch.see)), watch.first


class _ValueWatch:
    """Compares each value as it is written, until one is wrong."""

    def __init__(self, program: Program, model: Model, expected: ReferenceValues, close: Close) -> None:
        self.program, self.model, self.expected, self.close = program, model, expected, close
        self.first: WrongValue | None = None

    def see(self, value: Value, pytree: Any) -> None:
        right = None if self.first is not None or isinstance(pytree, Residuals | Inputs) else self.right(value)
        if right is None:
            return
        leaves = tree.leaves(pytree)
        pairs = zip(leaves, right, strict=False)
        differences = [found for pair in pairs if (found := self.difference(*pair)) is not None]
        if len(leaves) != len(right):
            differences = [(float("inf"), f"has {len(leaves)} leaves, and not {len(right)}")]
        if differences:
            op = self.program.ops[self.program.writer[value]]
            self.first = WrongValue(op, value, place_of(op, self.model), *max(differences))

    def difference(self, leaf: Any, right: Any) -> tuple[float, str] | None:
        """How far a leaf is off, and in words; None where it agrees."""
        if not isinstance(leaf, Tensor) and not isinstance(right, Tensor):
            return None
        leaf = torch.zeros_like(right) if leaf is None else leaf  # no gradient is one of zeros
        right = torch.zeros_like(leaf) if right is None else right
        if (kind := _kind(leaf)) != (right_kind := _kind(right)):
            return float("inf"), f"is {kind}, and not {right_kind}"
        if self.close(leaf, right):
            return None
        error = largest(leaf, right)
        return error, f"is off by up to {error:.3g}"

    def right(self, value: Value) -> list[Any] | None:
        """The right leaves of a value, if they are known: an ADD's from what it reads."""
        value = value._replace(at="")
        position = self.program.writer.get(value)
        if value not in self.expected and position is not None and self.program.ops[position].kind == "ADD":
            addends = [self.right(read) for read in self.program.ops[position].reads]
            known = [addend for addend in addends if addend is not None]
            if len(known) == len(addends):
                self.expected[value] = summed(known)
        return self.expected.get(value)


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
