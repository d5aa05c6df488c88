"""Random models over rows of four numbers, as recipes: what each stage does and takes, how losses reduce, the dtype."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from fpipe.model import Model
from fpipe.models.from_functions import from_functions
from fpipe.testing.drawn_programs import Takes, graphs
from fpipe.testing.stage_functions import BODIES, LOSSES, SHAPES, Body


@dataclass(frozen=True)
class Net:
    """A model: what each stage does and takes, how its losses reduce, and in which dtype.

    >>> net = Net(("linear", "tied", "tied"), ("batch", 0, (1, "batch")))
    >>> net.ties, [sorted(stage) for stage in net.params()]
    ((((1, 'e'), (2, 'e')),), [['b', 'w'], ['b', 'e'], ['b']])
    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(3), fpipe.merge())(fpipe.program(net.model))
    >>> print(fpipe.verify(program, net.model, net.params(), net.batch(rows=5)))
    7 of 7 leaves bitwise equal to plain autograd, largest error 0
    The undivided batch gives the same loss and gradients, to rounding.
    """

    bodies: tuple[Body, ...]
    takes: Takes
    reduction: Literal["mean", "sum", "count"] = "mean"
    dtype: Literal["float32", "float64"] = "float32"

    @property
    def ties(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """The leaf "e" of all stages that say "tied" is one."""
        group = tuple((stage, "e") for stage, body in enumerate(self.bodies) if body == "tied")
        return (group,) if len(group) > 1 else ()

    @property
    def model(self) -> Model:
        """The model itself, one for equal nets, so that each is traced once."""
        return _model(self)

    def params(self, seed: int = 0) -> tuple[dict[str, Tensor], ...]:
        """Its parameters, one dict a stage; a tied leaf is in the first stage that reads it."""
        make = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        made: list[dict[str, Tensor]] = []
        for stage, body in enumerate(self.bodies):
            elsewhere = {name for group in self.ties for reader, name in group[1:] if reader == stage}
            shapes = [(name, shape) for name, shape in SHAPES[body].items() if name not in elsewhere]
            made.append({name: torch.randn(shape, generator=make, dtype=dtype) * 0.5 for name, shape in shapes})
        return tuple(made)

    def batch(self, rows: int, seed: int = 1) -> tuple[Tensor, Tensor]:
        """Inputs and targets of shape [rows, 4]."""
        make = torch.Generator().manual_seed(seed)
        dtype = getattr(torch, self.dtype)
        return torch.randn(rows, 4, generator=make, dtype=dtype), torch.randn(rows, 4, generator=make, dtype=dtype)


@lru_cache(maxsize=256)
def _model(net: Net) -> Model:
    functions, loss = [BODIES[body] for body in net.bodies], LOSSES[net.reduction]
    return from_functions(functions, loss, inputs=net.takes, ties=net.ties, reduction=net.reduction)


@st.composite
def models(draw: st.DrawFn, stages: st.SearchStrategy[int] | None = None) -> Net:
    """Draw a model: depth, stage functions, skips, ties, reduction, dtype.

    Args:
        stages: how many stages; 1 to 5 by default.

    Returns:
        A `Net`, which makes the model, its parameters and a batch.

    >>> from hypothesis import find
    >>> find(models(), lambda net: len(net.bodies) == 2)
    Net(bodies=('linear', 'linear'), takes=('batch', 0), reduction='mean', dtype='float32')
    """
    takes = draw(graphs(stages))
    bodies = draw(st.lists(st.sampled_from(list(BODIES)), min_size=len(takes), max_size=len(takes)))
    return Net(
        tuple(bodies),
        takes,
        draw(st.sampled_from(["mean", "sum", "count"])),
        draw(st.sampled_from(["float32", "float64"])),
    )
