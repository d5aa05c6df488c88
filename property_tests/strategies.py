"""Export the strategies of property tests, and plain autograd, with which they compare."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from hypothesis import settings
from torch import Tensor

from fpipe import tree
from property_tests.bits import sum_of_uses
from property_tests.drawn_models import Net
from property_tests.drawn_models import models as nets
from property_tests.drawn_programs import DrawnProgram, Takes, placements
from property_tests.drawn_programs import graphs as dags
from property_tests.drawn_programs import legal_orders as legal_tables
from property_tests.drawn_programs import programs as plans
from property_tests.stage_functions import LOSSES

__all__ = [
    "DrawnProgram",
    "Net",
    "Takes",
    "dags",
    "legal_tables",
    "max_examples",
    "nets",
    "outputs",
    "placements",
    "plain_autograd",
    "plans",
    "shared",
    "tiny",
]


def max_examples(examples: int) -> settings:
    """Run this many examples in profile `ci`, for slow or very fast tests, and the profile's number in `deep`."""
    return settings(max_examples=examples) if settings.get_current_profile_name() == "ci" else settings()


def tiny(takes: Takes) -> Net:
    """Return the smallest model of a graph, for tests of programs."""
    return Net(("linear",) * len(takes), takes)


def shared(net: Net, params: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """Return all parameters of each stage, a tied leaf in each stage that reads it."""
    full = [dict(stage) for stage in params]
    for (owner, name), *readers in net.ties:
        for reader, leaf in readers:
            full[reader][leaf] = params[owner][name]
    return full


def outputs(
    net: Net, full: Sequence[dict[str, Tensor]], x: Any, read_value: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Call the stages in order, and return the last output."""
    values: list[Any] = []
    for stage, stage_params, takes in zip(net.stages, full, net.takes, strict=True):
        sources = takes if isinstance(takes, tuple) else (takes,)
        inputs = tuple(x if source == "batch" else read_value(values[source]) for source in sources)
        values.append(stage(stage_params, inputs))
    return values[-1]


def plain_autograd(
    net: Net, params: Sequence[dict[str, Tensor]], batch: tuple[Tensor, Tensor], microbatches: int = 1
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Return loss and gradients of plain autograd: a graph over the whole model for each microbatch, and `.backward()`.

    Bits depend on the order of sums. So a stage reads an alias of another's output, and each use of a tied leaf is a
    leaf of its own; their gradients are added by stage at the end.
    """
    stage_leaves = [
        {name: leaf.clone().requires_grad_() for name, leaf in stage.items()} for stage in shared(net, params)
    ]
    rows, loss, count = len(batch[0]), None, torch.tensor(0)
    for x, target in zip(*(leaf.tensor_split(microbatches) for leaf in batch), strict=True):
        part_loss = LOSSES[net.reduction](outputs(net, stage_leaves, x, aliased), target)
        if net.reduction == "count":
            part_loss, counted = part_loss
            count = count + counted
        share = part_loss * (len(x) / rows) if net.reduction == "mean" else part_loss
        if share.requires_grad:
            share.backward()
        loss = share.detach() if loss is None else loss + share.detach()
    assert loss is not None
    divisor = (count if count != 0 else 1) if net.reduction == "count" else None
    grads: list[dict[str, Any]] = [{name: leaf.grad for name, leaf in stage.items()} for stage in stage_leaves]
    for group in net.ties:
        owner, name = group[0]
        uses = [grads[reader].pop(leaf) for reader, leaf in sorted(group)]
        grads[owner][name] = sum_of_uses(uses)
    if divisor is not None:
        loss, grads = loss / divisor, tree.tree_map(lambda grad: None if grad is None else grad / divisor, grads)
    return loss, grads


def aliased(value: Any) -> Any:
    return tree.tree_map(lambda leaf: torch.ops.aten.alias(leaf) if isinstance(leaf, Tensor) else leaf, value)
