"""Split the norms that track statistics: normalising by the batch's own is one operation, updating them another.

y = norm(x, w, b, mean, var)        -->        y = norm(x, w, b);  norm(x, mean, var)
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_BATCH_NORM: Any = torch.ops.aten.batch_norm.default
_INSTANCE_NORM: Any = torch.ops.aten.instance_norm.default


def split_norms(graph: fx.Graph) -> None:
    """Give each norm in training an operation of its own that writes its statistics, bit for bit as the norm does."""
    for norm in (n for op in (_BATCH_NORM, _INSTANCE_NORM) for n in graph.find_nodes(op="call_function", target=op)):
        x, weight, bias, mean, var, training, *rest = norm.args
        if training and mean is not None:
            with graph.inserting_after(norm):
                update = graph.call_function(norm.target, (x, None, None, mean, var, training, *rest))
            update.meta = dict(norm.meta)
            norm.args = (x, weight, bias, None, None, training, *rest)


def without_normalising(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of updates, whose batch norms write their statistics and normalise nothing from here on."""
    for update in module.graph.find_nodes(op="call_function", target=_BATCH_NORM):
        x, _, _, mean, var, _, momentum, *_ = update.args
        update.target, update.args = torch.batch_norm_update_stats, (x, mean, var, momentum)
    module.recompile()
    return module
