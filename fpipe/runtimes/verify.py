"""Prove a program right: its gradients against plain autograd, leaf by leaf, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.model import Model
from fpipe.program import Program, the_program
from fpipe.runtimes.build import build
from fpipe.runtimes.microbatch import cut, rows_of_each, streams
from fpipe.runtimes.reference import Joined, Sliced, over_parts
from fpipe.runtimes.result import Result
from fpipe.transforms.merge import merge
from fpipe.transforms.specs import spec_of


class GradientMismatch(AssertionError):
    """A result that differs from plain autograd; the message names the leaf, its stage and by how much.

    >>> import fpipe, torch
    >>> compare(fpipe.Result(loss=torch.tensor(1.0)), fpipe.Result(loss=torch.tensor(1.5)))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    fpipe.runtimes.verify.GradientMismatch: loss differs from plain autograd by up to 0.5 (every bit was to agree); ...
    """


@dataclass(frozen=True)
class Leaf:
    """One compared tensor: its name, whether all bits agree, and the largest difference."""

    name: str
    bitwise: bool
    error: float


@dataclass(frozen=True)
class Report:
    """What `verify` found, leaf by leaf.

    `bitwise`: every bit agrees. `max_error`: the largest absolute difference of any number in any leaf.

    >>> print(Report((Leaf("loss", True, 0.0), Leaf("grads[0]['w']", False, 0.25))))
    1 of 2 leaves bitwise equal to plain autograd, largest error 0.25
    """

    leaves: tuple[Leaf, ...]

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
        return f"{same} of {len(self.leaves)} leaves bitwise equal to plain autograd, largest error {self.max_error:g}"


def verify(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
) -> Report:
    """Run a program and compare loss, gradients, outputs and state with `reference`.

    Args:
        program, model, params, batch, state, key: as for `build` and its step. What a program leaves per microbatch is
            merged first.
        rtol, atol: relative and absolute tolerance. Without either every bit must agree.

    Returns:
        A `Report`; params, batch, random state and module are as before.

    Raises:
        ValueError: a tolerance that is no number from 0.
        GradientMismatch: a leaf that differs, by name, with its stage and the size of the error.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> batch = (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0]))
    >>> program = fpipe.chain(fpipe.split(2), fpipe.merge())(fpipe.program(model))
    >>> print(fpipe.verify(program, model, ({"w": torch.tensor(3.0)},), batch))
    3 of 3 leaves bitwise equal to plain autograd, largest error 0
    """
    for word, tolerance in (("rtol", rtol), ("atol", atol)):
        if tolerance is not None and not (isinstance(tolerance, int | float) and tolerance >= 0):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ValueError(f"{word} is a number, at least 0, or None for every bit; found {tolerance!r}.")
    if any(end.name.microbatch is not None and end.name.name == "grads" for end in the_program(program).outputs):
        program = merge()(program)
    found = build(program, model)(params, batch, state=state, key=key)
    how = next((dict(op.how) for op in program.ops if op.kind == "SPLIT"), {})
    spec, size = spec_of(how.get("spec")), how.get("size")
    if "presplit" in how:
        batch = streams(batch, program.microbatches)
        parts = [*zip(zip(*batch, strict=True), rows_of_each(batch, spec), strict=True)]
    else:
        parts = [cut(batch, index, program.microbatches, spec, size=size) for index in range(program.microbatches)]
    joined = _joined(program, batch, "stream" if "presplit" in how else spec)
    expected = over_parts(model, params, parts, state=state, key=key, sliced=_sliced(how), joined=joined)
    return compare(found, expected, rtol=rtol, atol=atol)


def _joined(program: Program, batch: tuple[Any, Any], spec: Any) -> Joined:
    """How a program joins what its microbatches give."""
    said = next((dict(op.how) for op in program.ops if op.kind == "MERGE" and op.reads[0].name != "inputs"), {})
    names = {end.name.name for end in program.outputs}
    streams = {end.name.name for end in program.outputs if end.name.microbatch is not None}
    return Joined(
        "stream" if "outputs" in streams or "outputs" not in names else spec_of(said.get("spec")),
        "stream" if "aux" in streams else spec_of(said.get("aux")),
        batch[0] if "input_grads" in names else None,
        spec[0] if isinstance(spec, tuple) else spec,
    )


def _sliced(how: Mapping[str, Any]) -> Sliced:
    """How a SPLIT says that sequences are cut."""
    specs, row_specs = spec_of(how.get("sequence")), spec_of(how.get("spec"))
    return Sliced(how.get("slices", 1), how.get("dim", 1), _both(specs), _both(row_specs))


def _both(spec: Any) -> tuple[Any, Any]:
    return spec if isinstance(spec, tuple) else (spec, spec)


def compare(found: Result, expected: Result, *, rtol: float | None = None, atol: float | None = None) -> Report:
    """Compare two results leaf by leaf; the second is the one to trust."""
    pairs: list[tuple[str, Any, Any]] = []
    for part in ("loss", "grads", "outputs", "state", "aux", "input_grads"):
        ours, theirs = getattr(found, part), getattr(expected, part)
        if ours is None or (part == "state" and theirs is None):
            continue
        for (name, a), (_, b) in zip(tree.paths(ours), tree.paths(theirs), strict=True):
            if isinstance(b, Tensor):
                pairs.append((_name(part, name), a, b))
    leaves = tuple(_compared(name, a, b) for name, a, b in pairs)
    for leaf, (_, a, b) in zip(leaves, pairs, strict=True):
        close = (
            leaf.bitwise
            if rtol is None and atol is None
            else torch.allclose(a, b, rtol=rtol or 0.0, atol=atol or 0.0, equal_nan=True)
        )
        if not close:
            wanted = (
                "every bit was to agree"
                if rtol is None and atol is None
                else f"rtol={rtol or 0.0:g}, atol={atol or 0.0:g}"
            )
            worst = [other.name for other in leaves if not other.bitwise]
            names = ", ".join(worst[:5]) + (" ..." if len(worst) > 5 else "")
            raise GradientMismatch(
                f"{leaf.name} differs from plain autograd by up to {leaf.error:.3g} ({wanted}); "
                f"{len(worst)} of {len(leaves)} leaves differ: {names}."
            )
    return Report(leaves)


def _name(part: str, path: str) -> str:
    return f"{part}{path}"


def _compared(name: str, found: Tensor, expected: Tensor) -> Leaf:
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise GradientMismatch(
            f"{name} is {found.dtype} of shape {tuple(found.shape)}; plain autograd gives {expected.dtype} of shape "
            f"{tuple(expected.shape)}."
        )
    bitwise = bool(torch.equal(_bits(found), _bits(expected)))
    error = 0.0 if bitwise else float((found.double() - expected.double()).abs().nan_to_num(float("inf")).max())
    return Leaf(name, bitwise, error)


def _bits(tensor: Tensor) -> Tensor:
    """The tensor's bits, so that NaN equals NaN and 0 differs from -0."""
    tensor = tensor.to_dense() if tensor.layout is not torch.strided else tensor
    return (
        tensor.detach().contiguous().view(torch.uint8) if tensor.ndim else tensor.detach().reshape(1).view(torch.uint8)
    )
