"""Find the first value of a program that differs from plain autograd's: the op that wrote it is the one at fault.

    program      x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]* ...        1F0 read what was right and wrote what is wrong
    reference    x[0,0]  y[0,0]  x[0,1]  y[0,1]  y[1,0]

The reference has what SPLIT cuts, what passes between stages, losses, and each microbatch's gradients. A transfer hands
on what it reads, an ADD adds it up; what else there is (residuals, joined results) is not compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import Inputs, Residuals
from fpipe.meaning.meaning import summed
from fpipe.meaning.step import StepOptions
from fpipe.meaning.walk import place_of
from fpipe.model import Model
from fpipe.program import Op, Program, Value
from fpipe.runtimes.in_process.local import local
from fpipe.verification.report import Close, WrongValue, largest


class Expected(dict[Value, list[Any]]):
    """Plain autograd's values of a program, as lists of leaves, noted while the reference runs."""

    def see(self, value: Value, made: Any) -> None:
        """Note a value, under the name that it has in programs."""
        self[value] = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in tree.leaves(made)]


def first_wrong(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    state: Sequence[Any] | None,
    key: int | None,
    expected: Expected,
    close: Close,
) -> WrongValue | None:
    """Run a program beside what the reference noted; None where nothing that can be compared differs.

    Args:
        program, model, params, batch, state, key: as for a step.
        expected: what the reference noted of the same microbatches.
        close: whether two tensors of one shape and dtype agree.
    """
    watch = _Watch(program, model, expected, close)
    local(program, model, StepOptions(), see=watch.see)(params, batch, state=state, key=key)
    return watch.found


class _Watch:
    """Compares each value as it is written, until one is wrong."""

    def __init__(self, program: Program, model: Model, expected: Expected, close: Close) -> None:
        self.program, self.model, self.expected, self.close = program, model, expected, close
        self.seen: set[Value] = set()
        self.found: WrongValue | None = None

    def see(self, value: Value, made: Any) -> None:
        self.seen.add(value)
        right = None if self.found is not None or isinstance(made, Residuals | Inputs) else self.right(value)
        if right is None:
            return
        leaves = tree.leaves(made)
        wrong = [one for pair in zip(leaves, right, strict=False) if (one := self.difference(*pair)) is not None]
        if len(leaves) != len(right):
            wrong = [(float("inf"), f"has {len(leaves)} leaves, and not {len(right)}")]
        if wrong:
            op = self.writer(value)
            self.found = WrongValue(op, value, place_of(op, self.model), *max(wrong))

    def difference(self, found: Any, right: Any) -> tuple[float, str] | None:
        """How far a leaf is off, and in words; None where it agrees."""
        if not isinstance(found, Tensor) and not isinstance(right, Tensor):
            return None
        found = torch.zeros_like(right) if found is None else found  # no gradient is one of zeros
        right = torch.zeros_like(found) if right is None else right
        if (one := _kind(found)) != (other := _kind(right)):
            return float("inf"), f"is {one}, and not {other}"
        if self.close(found, right):
            return None
        error = largest(found, right)
        return error, f"is off by up to {error:.3g}"

    def right(self, value: Value) -> list[Any] | None:
        """The right leaves of a value, if they are known: an ADD's from what it reads."""
        value = value._replace(at="")
        at = self.program.writer.get(value)
        if value not in self.expected and at is not None and self.program.ops[at].kind == "ADD":
            parts = [self.right(read) for read in self.program.ops[at].reads]
            known = [part for part in parts if part is not None]
            if len(known) == len(parts):
                self.expected[value] = summed(known)
        return self.expected.get(value)

    def writer(self, value: Value) -> Op:
        """The op that wrote a value; where a backward adds to a sum itself, that backward."""
        op = self.program.ops[self.program.writer[value]]
        made = [read for read in op.reads if op.kind == "ADD" and read not in self.seen and read in self.program.writer]
        return self.program.ops[self.program.writer[made[0]]] if made else op


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype} of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else type(leaf).__name__
