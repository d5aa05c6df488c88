"""Outline a net as the ops that its Python calls and their numbers, on a rank that has a part of its parameters.

net with a dropout of .1  -->  embedding(..)  linear(..)  native_dropout(float32[8, 4], 0.1, True)  ..

Fake tensors stand for parameters, buffers and batch, so nothing is computed. Two outlines differ where the Python has
changed. The backward of a custom autograd.Function is not in them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.purity.attributes import AttributeSnapshot, CallCounter
from fpipe.model import Model
from fpipe.torch_internals import direct_members
from fpipe.torch_private.dispatch import TorchDispatchMode, fake_mode_class, without_modes

_MOST_NUMBERS = 100


class NetOutline:
    """The ops of a net's Python, and the numbers among its modules' attributes that it changes; they are put back."""

    def __init__(self, model: Model, params: Sequence[Any], batch: tuple[Any, Any]) -> None:
        self.ops: list[str] | None = None
        attributes = AttributeSnapshot(
            [] if model.fingerprint is None else model.fingerprint.modules, with_containers=True
        )
        # What does not run on fake tensors, since it looks at data, has no outline.
        with suppress(Exception):
            self.ops = _ops_of(model, params, batch)
        self.counters: list[CallCounter] = attributes.counters()
        attributes.restore()

    def difference_from(self, earlier: NetOutline) -> str | None:
        """Describe the first op that an earlier outline has not; None if they are equal, or one is missing."""
        if self.ops is None or earlier.ops is None:
            return None
        for number, (op, earlier_op) in enumerate(zip_longest(self.ops, earlier.ops)):
            if op != earlier_op:
                return f"op {number} is {op or 'missing'} now, and was {earlier_op or 'missing'}."
        return None


def _ops_of(model: Model, params: Sequence[Any], batch: tuple[Any, Any]) -> list[str]:
    assert model.function is not None
    leaf_by_name: Mapping[str, Any] = {name: leaf for stage in params for name, leaf in stage.items()}
    # Tensors of other ranks are on meta here: all go where the batch is.
    device = next((leaf.device for leaf in tree.leaves(batch) if isinstance(leaf, Tensor) and not leaf.is_meta), None)

    def as_fake(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device or "cpu")

    recorder = _OpRecorder()
    with fake_mode_class()(allow_non_fake_inputs=True):
        fakes = {name: as_fake(leaf) for name, leaf in leaf_by_name.items()}
        # Buffers too: those of a net on meta would be on another device than the batch.
        if model.params_spec is None:
            for path, module in model.fingerprint.modules if model.fingerprint is not None else ():
                for name, buffer in direct_members(module).buffers.items():
                    fakes.setdefault(f"{path}.{name}" if path else name, as_fake(buffer))
        arguments = (
            fakes
            if model.params_spec is None
            else tree.unflatten(model.params_spec[1], [fakes[n] for n in model.params_spec[0]])
        )
        fake_batch = tree.tree_map(as_fake, batch)
        # A forward calls all of the Python but custom backwards, so gradients are not needed.
        with torch.no_grad(), recorder:
            model.function.call(arguments, fake_batch, 0, 0)
    return recorder.ops


class _OpRecorder(TorchDispatchMode):
    """Records each op with its numbers, and the shapes of its tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operands = tree.leaves((args, kwargs or {}))
        # Of a new constant, such as torch.tensor(self.temperature), the numbers; other tensors may change.
        if func is torch.ops.aten.lift_fresh.default and operands[0].numel() <= _MOST_NUMBERS:
            with without_modes():
                operands = operands[0].tolist() if operands[0].ndim else [operands[0].item()]
        self.ops.append(f"{func}({', '.join(map(_describe, operands))})")
        return func(*args, **(kwargs or {}))


def _describe(operand: Any) -> str:
    if not isinstance(operand, Tensor):
        return "a generator" if isinstance(operand, torch.Generator) else repr(operand)
    return f"{str(operand.dtype).removeprefix('torch.')}{[*operand.shape]}"
