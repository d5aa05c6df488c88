"""Run higher-order ops of a trace as nodes: their functions are graphs, which are arguments like numbers.

score_mod, mask_mod     --> trace -->     o = flex_attention(q, k, v, <graph>, (.., <graph>), 0.5, {}, (bias,), ())
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

_FLEX_BACKWARD: Any = torch.ops.higher_order.flex_attention_backward


class FlexAttentionBackward:
    """The backward of FlexAttention, which asks its arguments for which captured tensors a gradient is wanted."""

    # The indices of the graph of gradients, and of the tensors that `score_mod` captures, among the arguments (2.13).
    # The graph returns the gradients of a score and its four indices first.
    _JOINT_GRAPH, _CAPTURED, _SCORE_GRADIENTS = 8, 12, 5

    def __init__(self, node: fx.Node) -> None:
        joint_node: Any = node.args[self._JOINT_GRAPH]
        joint_graph: fx.Graph = getattr(node.graph.owning_module, joint_node.target).graph
        gradients: Any = joint_graph.output_node().args[0]
        self.wants_grad = [gradient is not None for gradient in gradients[self._SCORE_GRADIENTS :]]
        self.op, self.__name__ = _FLEX_BACKWARD, "flex_attention_backward"

    def __call__(self, *args: Any) -> Any:
        """Call the op with captured tensors that require a gradient where the trace had one."""
        captured: Sequence[Tensor] = args[self._CAPTURED]
        leaves = (x.detach().requires_grad_(wants) for x, wants in zip(captured, self.wants_grad, strict=True))
        return self.op(*args[: self._CAPTURED], tuple(leaves), *args[self._CAPTURED + 1 :])


def runnable_op(node: fx.Node) -> Any:
    """Return the op of a traced node, or a function that runs it outside of autograd."""
    return FlexAttentionBackward(node) if node.target is _FLEX_BACKWARD else node.target
