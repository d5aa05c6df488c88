"""Cut the loss off a traced loss function: what depends on the target comes behind the last stage.

embed  MARK  block  MARK  head  loss(target)        -->        [embed]  [block]  [head]  loss
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.models.cutting.cut_at_marks import Subgraph
from fpipe.models.cutting.cut_net import guard_of
from fpipe.models.cutting.marked_graph import MarkedGraph, draws_random, has_effect
from fpipe.models.tracing.contexts import restored_on_error
from fpipe.models.tracing.places import place_of


class LossPart:
    """The loss behind the stages of a loss function.

    Attributes:
        judging: the target, and all that is computed from it: operations of no stage.
        result: what the last stage hands on to it, a node or a tuple of them.

    Raises:
        ValueError: it is no loss behind stages: a stage reads the target, say, or the loss a parameter.
    """

    def __init__(self, marked: MarkedGraph) -> None:
        self.net, self.marked, self.params = marked.net, marked, marked.net.params
        leaves = enumerate(tree.leaves(self.net.inputs[1]))
        self.target = {leaf: place for place, leaf in leaves if isinstance(leaf, fx.Node)}
        self.judging = {*self.target, *marked.computed_from(self.target, marked.replicated)}
        self._refuse_mutated_constants()
        self._refuse_other_readers()
        self._refuse_random_numbers_after_loss()
        self.part = self._part()
        self.received = [node for node in marked.graph.nodes if node in self.part.received]
        self.result = tuple(self.received) if len(self.received) > 1 else self.received[0]

    def _is_of_loss(self, node: fx.Node) -> bool:
        """Whether the loss computes it: from the target, or as a count, which does not join as outputs do."""
        if node in self.judging:
            return True
        value = node.meta.get("val")
        counts = isinstance(value, Tensor) and not value.ndim and not value.dtype.is_floating_point
        own = node in self.marked.stage_of and node not in self.marked.mutators and not has_effect(node)
        return own and counts and not any(one in self.params for one in self.marked.reads(node))

    def _refuse_mutated_constants(self) -> None:
        """Refuse writes to what the function closes over: its views are fake, with a storage that nobody knows."""
        for constant, node in self.marked.mutators.items():
            if constant.op == "get_attr":
                shape = tuple(getattr(self.marked.module, str(constant.target)).shape)
                raise ValueError(
                    f"loss_fn writes a tensor of shape {shape} in place ({node.target}), which it closes over; a stage "
                    f"and a loss are pure functions. Hand it in, among params, or mutate a clone.{place_of(node)}"
                )

    def _refuse_other_readers(self) -> None:
        """Only what comes after the last mark may read the target, and with it no parameter."""
        for node, stage in self.marked.stage_of.items():
            if node not in self.judging:
                continue
            if stage < self.marked.stages - 1:
                raise ValueError(
                    f"stage {stage} reads the target ({node.name}); only what comes after the last boundary may. What "
                    f"a stage reads of the batch is one of its inputs.{place_of(node)}"
                )
            for name in (self.params[one] for one in self.marked.reads(node) if one in self.params):
                raise ValueError(
                    f"{node.name} reads the target and the parameter {name!r}: a loss(y, target) has no parameters. "
                    f"Compute what needs them before the target comes in.{place_of(node)}"
                )

    def _refuse_random_numbers_after_loss(self) -> None:
        """The last stage draws its random numbers before the loss draws any, since it runs before the loss."""
        for before, node in pairwise(node for node in self.marked.stage_of if draws_random(node)):
            if before in self.judging and node not in self.judging:
                raise ValueError(
                    f"{before.name} draws random numbers for the loss, and {node.name} after it for what comes before "
                    f"the loss; draw them in the other order.{place_of(before)}{place_of(node)}"
                )

    def _part(self) -> Subgraph:
        """The operations of the loss; what it receives is what the last stage hands on."""
        results = [self.marked.value(node) for node in self.marked.graph.output_node().all_input_nodes]
        own = {node for node in self.marked.graph.nodes if self._is_of_loss(node)}
        part = Subgraph(self.marked, results, own, {}, self.target)
        if not part.received:
            raise ValueError("the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.")
        return part

    def function(self, example: Any) -> Callable[[Any, Any], Any]:
        """The loss as a function `loss(y, target)`; `example` is one of the target."""
        run = self.part.module(self.net.output).forward
        of_target = list(self.part.batch.values())
        of_y = [self.received.index(node) for node in self.part.received]
        guard = guard_of(self.net, (*tree.leaves(self.net.inputs[1]), *self.part.received), example, "target")

        def loss(y: Any, target: Any) -> Any:
            targets, values = tree.leaves(target), tree.leaves(y)
            received = [values[place] for place in of_y]
            guard.check(targets, received)
            with restored_on_error():
                return run(*[targets[place] for place in of_target], *received)

        return loss
