"""Write the buffers that no output of a stage reads, behind its forward: a graph of its own, run once a microbatch.

mean, seen        -->        update(mean, seen) = mean'
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, fx

from fpipe.models.cutting.graph_copy import HoldsGraph
from fpipe.models.tracing.net_graph import NetTensors


class BufferUpdate(HoldsGraph):
    """The update of a stage: it writes the buffers that no output reads.

    Args:
        graph: of buffers and constants, and then of what the forward has seen; it writes the buffers and returns them.
        takes: the names of the first.
        shapes: those of the buffers that it writes, by name, in the order in which it returns them.
        tensors: of the net, whose constants it reads as they are then.
        count: how many values it needs that the forward has seen.
    """

    def __init__(
        self,
        graph: fx.GraphModule,
        takes: Sequence[str],
        shapes: Mapping[str, tuple[int, ...]],
        tensors: NetTensors,
        count: int,
    ) -> None:
        self.graph, self.takes, self.shapes, self.tensors, self.count = graph, list(takes), shapes, tensors, count

    def __call__(self, state: Mapping[str, Tensor], seen: Sequence[Tensor]) -> dict[str, Tensor]:
        """The new buffers; the old ones stay as they are."""
        for name, shape in self.shapes.items():
            if tuple(state[name].shape) != shape:
                raise ValueError(
                    f"state {name!r} has shape {shape} in the net, found {tuple(state[name].shape)}. Hand in the state "
                    "that from_module gave, or Result.state."
                )
        copies = {name: state[name].clone() for name in self.shapes}
        own = [copies[name] if name in copies else self.tensors.now(name) for name in self.takes]
        new = dict(zip(self.shapes, self.graph.forward(*own, *seen), strict=True))
        return {name: new.get(name, held) for name, held in state.items()}
