"""Make a model of stages that run modules: tie the parameters that several read, find their state, hand both out.

leaves [{0: ("0.weight",)}, {0: ("1.w",), 2: ("5.w",)}]    -->    params[0]["0.weight"], params[0]["1.w"], and a tie
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from fpipe.meaning.from_functions import from_functions
from fpipe.meaning.purity.fingerprint import Fingerprint
from fpipe.model import Model, Reduction, Source
from fpipe.models.modules.stage_module import StageModule
from fpipe.models.modules.written_buffers import written_buffers
from fpipe.models.parameters.load import HandedOut
from fpipe.positional_stage import Names

Params = tuple[dict[str, Tensor], ...]
Leaf = dict[int, tuple[str, ...]]
"""The names of one parameter in each stage that reads it; it lives in the first."""


def names_of(leaves: Sequence[Leaf], stages: int) -> list[Names]:
    """The names of the parameters that each stage is handed."""
    return [tuple(leaf[number] for leaf in leaves if number in leaf) for number in range(stages)]


def of_modules(
    runs: Sequence[StageModule],
    called: Sequence[str],
    leaves: Sequence[tuple[Leaf, Tensor]],
    *,
    loss: Callable[[Any, Any], Any] | None,
    inputs: Sequence[Source | tuple[Source, ...]],
    reduction: Reduction,
    aux: bool,
    example: Any,
    net: nn.Module,
) -> tuple[Model, Params, Params]:
    """The model, and per stage its parameters, as detached aliases, and its module state.

    Args:
        runs: the stages; what they say of their state goes before what an example shows.
        called: how errors call each.
        leaves: the parameters that train, in the order of the net's `named_parameters()`.
        example: the inputs of a batch by which written buffers are found, or None.
        net: what has all of the modules.
    """
    ties = tuple(tuple((number, own[0]) for number, own in leaf.items()) for leaf, _ in leaves if len(leaf) > 1)
    model = from_functions(runs, loss, inputs=inputs, ties=ties, reduction=reduction, aux=aux)
    if example is not None:
        for run, found in zip(runs, written_buffers(runs, model, example), strict=True):
            run.remember([*run.state_of, *found])
    _share_locks(runs)
    params: list[dict[str, Tensor]] = []
    for run in runs:
        own = {leaf[run.number][0]: one for leaf, one in leaves if min(leaf) == run.number}
        run.handed_out = HandedOut(own, [module for _, module in run.modules])
        params.append({name: one.detach() for name, one in own.items()})
    stages = tuple(
        replace(stage, forward=run, name=name, names=run.names, within=run.within, **run.remembering())
        for stage, run, name in zip(model.stages, runs, called, strict=True)
    )
    order = tuple(leaf[min(leaf)][0] for leaf, _ in leaves)
    model = replace(model, stages=stages, leaf_order=order, held=Fingerprint([loss], [*net.named_modules()]))
    return model, tuple(params), tuple(run.state() for run in runs)


def _share_locks(runs: Sequence[StageModule]) -> None:
    """Let stages with a module in common take turns, unless it has state, which would be in two stages."""
    homes: dict[int, StageModule] = {}
    written = {id(getattr(owner, name)): (path, owner, name) for run in runs for path, owner, name in run.held}
    for path, owner, name in (place for run in runs for place in (*run.held, *run.read)):
        first, *place = written.get(id(getattr(owner, name)), (path, owner, name))
        if place != [owner, name]:
            raise ValueError(
                f"buffers {first!r} and {path!r} are one tensor, which the first's module writes; give each its own."
            )
    for run in runs:
        for path, module in run.modules:
            first = homes.setdefault(id(module), run)
            if first is not run and any(module is owner for _, owner, _ in run.held):
                raise ValueError(
                    f"module {path!r} ({type(module).__name__}) stands in stages {first.number} and {run.number}, and "
                    "what it remembers would be in both; choose sizes= that keep it in one."
                )
            if first is not run and any(True for _ in module.parameters()):
                run.lock = first.lock
