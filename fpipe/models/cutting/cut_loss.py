"""Cut a traced loss function into stages and a loss: the loss is what depends on the target.

embed  MARK  block  MARK  head  loss(target)        -->        [embed]  [block]  [head]  loss
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from torch import Tensor, fx

from fpipe import tree
from fpipe.model import Source
from fpipe.models.cutting.cut_at_marks import Part, StageGraphs, one_or_all
from fpipe.models.cutting.graph_stage import BatchGuard, GraphStage
from fpipe.models.cutting.marked_graph import MarkedGraph, draws_random, has_effect
from fpipe.models.tracing.contexts import restored_on_error
from fpipe.models.tracing.open_sizes import open_sizes
from fpipe.models.tracing.places import place_of
from fpipe.models.tracing.trace_loss import TracedLoss
from fpipe.models.tracing.traced_modes import TracedModes


class CutLoss:
    """A loss function as stages and a loss.

    Args:
        traced: the function as a graph.
        names: what its parameters are called, in their order.
        modes: those of the modules that it closes over; the first stage looks whether they are the same.

    Attributes:
        stages: `f(params, x)` of each, and `loss`, `loss(y, target)`.
        inputs: what each stage takes, as `from_functions` has it.
        owned: of each stage the parameters that it is the first to read; those that nobody reads are the first stage's.
        ties: the parameters that several stages read, each as its (stage, name).

    Raises:
        ValueError: it is no loss behind stages: a stage reads the target, say, or the loss a parameter.
    """

    def __init__(self, traced: TracedLoss, names: list[str], modes: TracedModes) -> None:
        self.traced, self.modes = traced, modes
        self.name_of = dict(zip(traced.params, names, strict=True))
        self.batch, self.target = map(_places, traced.batch)
        self.marked = MarkedGraph(traced.module, "loss_fn")
        self.judging = self._judging()
        self._refuse_mutated_constants()
        self._refuse_target_in_stages()
        self._refuse_parameters_in_loss()
        self._refuse_random_numbers_after_loss()
        self.loss_part = self._loss_part()
        self.cut = StageGraphs(self.marked, self.loss_part.received, self.name_of, self.batch, self.judging)
        self.owned, self.ties = self.cut.owned, self.cut.ties
        self.inputs: tuple[Source | tuple[Source, ...], ...] = tuple(one_or_all(one) for one in self.cut.inputs)
        self.stages = [self._stage(number) for number in range(self.marked.stages)]
        self.loss = self._loss()

    def _judging(self) -> set[fx.Node]:
        """The target, and all that is computed from it."""
        found = set(self.target)
        for node in self.marked.stage_of:
            if node not in self.marked.replicated and not found.isdisjoint(self.marked.reads(node)):
                found.add(node)
        return found

    def _is_of_loss(self, node: fx.Node) -> bool:
        """Whether the loss computes it: what is computed from the target, and how many there are of something, which no
        stage hands on, since the counts of two microbatches do not join as outputs do."""
        if node in self.judging:
            return True
        value = node.meta.get("val")
        counts = isinstance(value, Tensor) and not value.ndim and not value.dtype.is_floating_point
        own = node in self.marked.stage_of and node not in self.marked.mutators and not has_effect(node)
        return own and counts and not any(one in self.name_of for one in self.marked.reads(node))

    def _refuse_mutated_constants(self) -> None:
        """The views of a tensor that the function closes over are fake, with a storage of their own: who looks at
        storages while it runs takes them for its own."""
        for constant, node in self.marked.mutators.items():
            if constant.op == "get_attr":
                shape = tuple(getattr(self.marked.module, str(constant.target)).shape)
                raise ValueError(
                    f"loss_fn writes a tensor of shape {shape} in place ({node.target}), which it closes over; a stage "
                    f"and a loss are pure functions. Hand it in, among params, or mutate a clone.{place_of(node)}"
                )

    def _refuse_target_in_stages(self) -> None:
        """Only what comes after the last mark may read the target."""
        for node, stage in self.marked.stage_of.items():
            if node in self.judging and stage < self.marked.stages - 1:
                raise ValueError(
                    f"stage {stage} reads the target ({node.name}); only what comes after the last boundary may. What "
                    f"a stage reads of the batch is one of its inputs.{place_of(node)}"
                )

    def _refuse_parameters_in_loss(self) -> None:
        """What is computed from the target reads no parameter."""
        for node in self.marked.stage_of:
            name = next((self.name_of[one] for one in self.marked.reads(node) if one in self.name_of), None)
            if node in self.judging and name is not None:
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

    def _loss_part(self) -> Part:
        """The operations of the loss; what it receives is what the last stage hands on."""
        results = [self.marked.value(node) for node in self.marked.graph.output_node().all_input_nodes]
        part = Part(self.marked, results, self._is_of_loss, {}, self.target)
        if not part.received:
            raise ValueError("the loss reads nothing that loss_fn computes from params and inputs: it trains nothing.")
        return part

    def _stage(self, number: int) -> GraphStage:
        """A stage as a function `f(params, x)`."""
        part = self.cut.parts[number]
        guard = self._guard(0, "inputs") if part.batch else None
        unread = [name for name in self.owned[number] if name not in part.params]
        many = isinstance(self.inputs[number], tuple)
        reads, places = list(part.params), self.cut.places(number)
        modes = self.modes if self.modes.modules and not number else None
        graph = self.cut.module(number)
        return GraphStage(number, graph, reads, unread, places, many=many, guard=guard, traced_modes=modes)

    def _loss(self) -> Callable[[Any, Any], Any]:
        """The loss as a function `loss(y, target)`."""
        run = self.loss_part.module(self.marked.graph.output_node().args[0]).forward
        (outputs,) = self.cut.outputs[-1]
        of_target = list(self.loss_part.batch.values())
        of_y = [outputs.index(node) for node in self.loss_part.received]
        guard = self._guard(1, "target", self.loss_part.received)

        def loss(y: Any, target: Any) -> Any:
            targets, values = tree.leaves(target), tree.leaves(y)
            received = [values[place] for place in of_y]
            guard.check(targets, received)
            with restored_on_error():
                return run(*[targets[place] for place in of_target], *received)

        return loss

    def _guard(self, half: int, word: str, others: Iterable[fx.Node] = ()) -> BatchGuard:
        """What the inputs, or the target, have to be, and the values that come with them."""
        values = (*tree.leaves(self.traced.batch[half]), *others)
        sizes = [open_sizes(value) if isinstance(value, fx.Node) else {} for value in values]
        return BatchGuard(self.traced.example[half], word, sizes, self.traced.guards)


def _places(half: Any) -> dict[fx.Node, int]:
    """The places of tensors among the leaves of the inputs, or of the target."""
    return {leaf: place for place, leaf in enumerate(tree.leaves(half)) if isinstance(leaf, fx.Node)}
