"""Draw random models, as recipes: the body and the inputs of each stage, the loss's reduction, the dtype."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from hypothesis import strategies as st
from torch import Tensor

from fpipe.meaning.from_functions import from_functions
from fpipe.model import Model
from property_tests.drawn_programs import Takes, graphs
from property_tests.stage_functions import BODIES, LOSSES, DrawnStage


@dataclass(frozen=True)
class Net:
    """A recipe of a model: the body and the inputs of each stage, the loss's reduction, and the dtype.

    >>> net = Net(("linear", "tied", "tied"), ("batch", 0, (1, "batch")))
    >>> net.ties, [sorted(stage) for stage in net.params()]
    ((((1, 'e'), (2, 'e')),), [['b', 'w'], ['b', 'e'], ['b']])
    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(3), fpipe.merge())(fpipe.program(net.model))
    >>> print(fpipe.verify(program, net.model, net.params(), net.batch(rows=5)))
    7 of 7 leaves bitwise equal to plain autograd, largest error 0
    The undivided batch gives the same loss and gradients, to rounding.

    Attributes:
        bodies: of each stage its name in `BODIES`, or a recipe that has a dtype of its own.
        tie: whether the leaf "e" of all stages that have one is one.
    """

    bodies: tuple[str | DrawnStage, ...]
    takes: Takes
    reduction: Literal["mean", "sum", "count"] = "mean"
    dtype: Literal["float32", "float64"] = "float32"
    tie: bool = True

    @property
    def stages(self) -> tuple[DrawnStage, ...]:
        return tuple(replace(BODIES[body], dtype=self.dtype) if isinstance(body, str) else body for body in self.bodies)

    @property
    def ties(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """The stages and names of the leaf that several stages share."""
        group = tuple((number, "e") for number, stage in enumerate(self.stages) if "e" in stage.shapes)
        return (group,) if self.tie and len(group) > 1 else ()

    @property
    def model(self) -> Model:
        """The model, one object for equal recipes, so that each is traced once."""
        return _model(self)

    def params(self, seed: int = 0) -> tuple[dict[str, Tensor], ...]:
        """Draw parameters, one dict a stage; a tied leaf is in the first stage that reads it."""
        stage_params = [stage.params(seed + 100 * number) for number, stage in enumerate(self.stages)]
        for group in self.ties:
            for number, leaf in group[1:]:
                del stage_params[number][leaf]
        return tuple(stage_params)

    def batch(self, rows: int, seed: int = 1) -> tuple[Any, Tensor]:
        """Draw inputs, of shape [rows, 4] for stages by name, and targets of that shape."""
        target = torch.randn(rows, 4, generator=torch.Generator().manual_seed(seed + 2**20))
        return self.stages[0].input(rows, seed), target.to(getattr(torch, self.dtype))


@lru_cache(maxsize=256)
def _model(net: Net) -> Model:
    return model_of(net, [stage.function for stage in net.stages])


def model_of(net: Net, functions: Sequence[Callable[..., Any]]) -> Model:
    return from_functions(functions, LOSSES[net.reduction], inputs=net.takes, ties=net.ties, reduction=net.reduction)


@st.composite
def models(draw: st.DrawFn, stages: st.SearchStrategy[int] | None = None) -> Net:
    """Draw a model: depth, stage functions, skips, ties, reduction, dtype.

    Args:
        stages: how many stages; 1 to 5 by default.

    Returns:
        A `Net`, which makes the model, its parameters and a batch.

    >>> from hypothesis import find
    >>> find(models(), lambda net: len(net.bodies) == 2)
    Net(bodies=('linear', 'linear'), takes=('batch', 0), reduction='mean', dtype='float32', tie=True)
    """
    takes = draw(graphs(stages))
    bodies = draw(st.lists(st.sampled_from(list(BODIES)), min_size=len(takes), max_size=len(takes)))
    return Net(
        tuple(bodies),
        takes,
        draw(st.sampled_from(["mean", "sum", "count"])),
        draw(st.sampled_from(["float32", "float64"])),
    )
