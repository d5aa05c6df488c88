"""Hold what a step returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Result:
    """The results of a step, by name; None where the program does not give one.

    Attributes:
        loss: 0-d tensor, detached. Not merged: a tuple with one for each microbatch, as for all that follow.
        grads: one pytree per stage, like params; a parameter that the loss does not depend on gets zeros, a frozen one
            None.
        outputs: what the last stage returned, joined over microbatches.
        state: one pytree per stage, the module state after the step.
        aux: auxiliary results of the loss, detached, joined over microbatches like outputs.
        losses: the loss of each microbatch, where `merge(losses=True)` asked for them.
        input_grads: gradients of the inputs, where `program(model, input_grads=True)` asked for them; None for a leaf
            that has no gradient.
        timeline: when each op ran and the most bytes each rank held, where `build(record=True)` asked for it.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: (y - t).abs().mean())
    >>> step = fpipe.build(fpipe.program(model), model)
    >>> result = step(({"w": torch.tensor(2.0)},), (torch.ones(3), torch.zeros(3)))
    >>> result.loss, result.outputs, result.grads
    (tensor(2.), tensor([2., 2., 2.]), ({'w': tensor(1.)},))
    """

    loss: Any = None
    grads: Any = None
    outputs: Any = None
    state: Any = None
    aux: Any = None
    losses: Any = None
    input_grads: Any = None
    timeline: Any = None
