"""What property tests draw, and what they compare with: autograd as anyone would write it."""

from __future__ import annotations

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
    "few",
    "legal_tables",
    "nets",
    "outputs",
    "placements",
    "plain_autograd",
    "plans",
    "shared",
    "tiny",
]


def few(examples: int) -> settings:
    """So many examples in profile `ci`, where each takes long or more are worth while; all of them in `deep`."""
    return settings(max_examples=examples) if settings.get_current_profile_name() == "ci" else settings()


def tiny(takes: Takes) -> Net:
    """The smallest model of a graph: where the program is the matter, not the model."""
    return Net(("linear",) * len(takes), takes)


def shared(net: Net, params: Sequence[dict[str, Tensor]]) -> list[dict[str, Tensor]]:
    """All parameters of each stage, a tied leaf in each that reads it."""
    full = [dict(stage) for stage in params]
    for (owner, name), *readers in net.ties:
        for reader, leaf in readers:
            full[reader][leaf] = params[owner][name]
    return full


def outputs(
    net: Net, full: Sequence[dict[str, Tensor]], x: Any, read: Callable[[Any], Any] = lambda value: value
) -> Any:
    """Of the last stage, which are called one after the other, as anyone would write the model."""
    values: list[Any] = []
    for stage, own, takes in zip(net.stages, full, net.takes, strict=True):
        sources = takes if isinstance(takes, tuple) else (takes,)
        values.append(stage(own, tuple(x if source == "batch" else read(values[source]) for source in sources)))
    return values[-1]


def plain_autograd(
    net: Net, params: Sequence[dict[str, Tensor]], batch: tuple[Tensor, Tensor], microbatches: int = 1
) -> tuple[Tensor, list[dict[str, Tensor]]]:
    """Loss and gradients as anyone would write them: one graph over the whole model for each microbatch, `.backward()`.

    Where bits are the matter, floating point sums have an order: a stage reads an alias of what another wrote, and the
    uses of a tied leaf are leaves of their own, added by stage at the end.
    """
    own = [{name: leaf.clone().requires_grad_() for name, leaf in stage.items()} for stage in shared(net, params)]
    rows, loss, count = len(batch[0]), None, torch.tensor(0)
    for x, target in zip(*(leaf.tensor_split(microbatches) for leaf in batch), strict=True):
        each = LOSSES[net.reduction](outputs(net, own, x, aliased), target)
        if net.reduction == "count":
            each, counted = each
            count = count + counted
        share = each * (len(x) / rows) if net.reduction == "mean" else each
        if share.requires_grad:
            share.backward()
        loss = share.detach() if loss is None else loss + share.detach()
    assert loss is not None
    by = (count if count != 0 else 1) if net.reduction == "count" else None
    grads: list[dict[str, Any]] = [{name: leaf.grad for name, leaf in stage.items()} for stage in own]
    for group in net.ties:
        owner, name = group[0]
        uses = [grads[reader].pop(leaf) for reader, leaf in sorted(group)]
        grads[owner][name] = sum_of_uses(uses)
    if by is not None:
        loss, grads = loss / by, tree.tree_map(lambda grad: None if grad is None else grad / by, grads)
    return loss, grads


def aliased(value: Any) -> Any:
    return tree.tree_map(lambda leaf: torch.ops.aten.alias(leaf) if isinstance(leaf, Tensor) else leaf, value)
