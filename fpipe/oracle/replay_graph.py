"""Follow the graph of a replayed call: from its outputs and its children's inputs back to its children's outputs.

x --glue--> A --glue--> B, y        the stubs of A and B cut the graph, so one reaches another through glue alone
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor


def find_readers(
    outputs: Sequence[Tensor],
    child_inputs: Mapping[int, Sequence[Tensor]],
    child_outputs: Mapping[int, Sequence[Tensor]],
) -> dict[int, list[int]]:
    """Return for each child the children that read its outputs, and -1 if the call's own outputs do."""
    readers = dict[int, list[int]]()
    for reader, tensors in {-1: outputs, **child_inputs}.items():
        sums = [tensor.sum() for tensor in tensors if tensor.requires_grad]
        for child, sources in child_outputs.items() if sums else ():
            differentiable = [source for source in sources if source.requires_grad]
            grads = torch.autograd.grad(sums, differentiable, retain_graph=True, allow_unused=True)
            if any(grad is not None for grad in grads):
                readers.setdefault(child, []).append(reader)
    return readers


def subtract_flows(outputs: Sequence[Tensor], pairs: list[tuple[Tensor, Tensor]]) -> dict[int, Tensor]:
    """Subtract from the gradient of each output what reaches it inside of the call, and return that by its index.

    A router returns its logits, and weights that it makes of them. The recorded gradient of the logits has two terms:
    of the net's readers, and of the weights. The second one flows from the weights again in the replay.

    Args:
        outputs: the outputs of the call.
        pairs: outputs and inputs of children with their gradients, which are changed in place.
    """
    nodes_behind = [_nodes_behind(root) for root, _ in pairs]
    flows = dict[int, Tensor]()
    # Readers before what they read, so that their own gradients are right already.
    for k in sorted(range(len(pairs)), key=lambda k: -len(nodes_behind[k])):
        root, grad = pairs[k]
        index = next((i for i, output in enumerate(outputs) if output is root), None)
        readers = [
            i for i in range(len(pairs)) if root.grad_fn in nodes_behind[i] and pairs[i][0].grad_fn != root.grad_fn
        ]
        if index is not None and readers:
            reading_roots, reading_grads = zip(*(pairs[i] for i in readers), strict=True)
            (flow,) = torch.autograd.grad(reading_roots, root, reading_grads, retain_graph=True)
            flows[index], pairs[k] = flow, (root, grad - flow)
    return flows


def _nodes_behind(tensor: Tensor) -> set[Any]:
    """Return the nodes of the graph from which a tensor is computed, and its own."""
    nodes, frontier = set[Any](), [tensor.grad_fn]
    while frontier:
        node = frontier.pop()
        if node is not None and node not in nodes:
            nodes.add(node)
            frontier += [parent for parent, _ in node.next_functions]
    return nodes
