"""Call each stage as its microbatch does, trace it with its gradient, and cut it: once for all that do so alike.

1F0 params[1] y[0,0]        -->        StageCall(1, params, x)        -->        Graph        -->        Cut
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Aval, Fact, Graph, Outline
from fpipe.graphs.language.labels import cotangent_of, differentiated, is_output, label_of, port_of
from fpipe.graphs.tracing.stage_call import StageCall, wants
from fpipe.graphs.tracing.trace_cache import Traces
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.program import Op, Value
from fpipe.runtimes.lowering.abstract_tree import AbstractTree, StorageMap, aval_of, described, wanting_fact


class StageRun(NamedTuple):
    """A stage on one microbatch (and slice).

    Attributes:
        call: how it is called.
        loss: how the loss behind it is, if one is.
        first: the forward whose residuals its backward reads: its F, or its R.
        forward: its F.
    """

    call: StageCall
    loss: StageCall | None
    first: Op
    forward: Op


class StageCalls:
    """The calls of a model's stages, and the graphs behind them."""

    def __init__(self, context: StepContext, known_only: bool) -> None:
        self.context, self.model = context, context.model
        self.traces = Traces(self.model, known_only)
        self._first: dict[StageCall, StageCall] = {}

    def call(self, op: Op, labels: Mapping[str, Value], given: Mapping[str, AbstractTree]) -> StageCall:
        """The call of an F or R; a gradient that is wanted of the batch is wanted in its avals too."""
        assert op.stage is not None
        of_batch = {label: value.stage for label, value in labels.items() if value.name in ("x", "inputs")}
        wanted = self.context.input_grads
        starts = tuple(label for label, stage in of_batch.items() if (stage, port_of(label)) in wanted)
        groups = {label: known for label, known in given.items() if label not in ("target", "key")}
        for label in starts:
            groups[label] = groups[label]._replace(leaves=tuple(map(wanting_fact, groups[label].leaves)))
        reads, specs = described(groups)
        asks = self.model.stages[op.stage].asks
        microbatch = self.context.number(op) if "microbatch" in asks else None
        turn = self.context.turn(op) if "turn" in asks else None
        return self.known(StageCall(op.stage, reads, specs, microbatch, starts, turn))

    def known(self, call: StageCall) -> StageCall:
        """The first of calls that are equal: what is found by it is found without comparing much."""
        try:
            return self._first.setdefault(call, call)
        except TypeError as error:
            raise Untraceable(f"it is handed something that cannot be compared ({error})") from error

    def outlined(self, call: StageCall, given: Mapping[str, AbstractTree]) -> dict[str, AbstractTree]:
        """The results of a call, each tensor in memory of its own or in that of what is given."""
        outline = self.traces.outline(call)
        storages = StorageMap(
            (known.storage, leaf.storage)
            for label, leaves in outline.reads.items()
            for known, leaf in zip(leaves, given[label].leaves, strict=True)
            if isinstance(leaf, Fact)
        )

        def moved(leaf: Any) -> Any:
            return storages.moved(leaf) if isinstance(leaf, Fact) else leaf

        written = outline.writes.items()
        return {label: AbstractTree(tuple(map(moved, leaves)), outline.specs[label]) for label, leaves in written}

    def loss_aval(self, run: StageRun) -> Aval:
        """The aval of the loss that a stage writes."""
        return self.traces.outline(run.loss or run.call).avals("loss")[0]._replace(wants=False)

    def cut(self, op: Op, run: StageRun, labels: Mapping[str, Value], trees: Mapping[Value, AbstractTree]) -> Cut:
        """A stage as it is cut for the microbatch of a backward, which reads cotangents under these labels."""

        def avals(value: Value, leaves: Sequence[Any]) -> tuple[Any, ...]:
            pairs = zip(leaves, trees[value].leaves, strict=True)
            return tuple(aval_of(known) if wants(leaf) else None for leaf, known in pairs)

        outline, cotangents = self.traces.outline(run.call), dict[str, tuple[Any, ...]]()
        for label in _outputs(outline) if run.loss is None else ():
            value, leaves = labels.get(cotangent_of(label)), outline.avals(label)
            cotangents[cotangent_of(label)] = (None,) * len(leaves) if value is None else avals(value, leaves)
        if "dcarry" in labels:
            cotangents["dcarry"] = avals(labels["dcarry"], outline.avals("carry"))
        if "loss" in outline.writes:  # a loss of the stage's own
            cotangents["dloss"] = (self.loss_aval(run),)
        reads = dict(run.call.reads)
        written = [label_of(value) for value in op.writes if value.name in ("dx", "dcarry")]
        wanted = tuple(
            (label, tuple(place for place, leaf in enumerate(reads[differentiated(label)]) if wants(leaf)))
            for label in written
        )
        return self._cut(op.stage or 0, self._graph(run, cotangents), wanted, dict(run.first.how).get("saved"))

    def forward_cut(self, stage: int, run: StageRun) -> Cut:
        """A stage as it is cut where no backward follows: nothing is behind its outputs."""
        outline = self.traces.outline(run.call)
        cotangents = {cotangent_of(label): (None,) * len(outline.writes[label]) for label in _outputs(outline)}
        return self._cut(stage, self._graph(run, cotangents), (), None)

    def _graph(self, run: StageRun, cotangents: Mapping[str, tuple[Any, ...]]) -> Graph:
        """A stage and its gradient, with the loss if it reads the target."""
        call = self.traces.shared(run.call)
        if run.loss is None:
            return self.traces.graph(call, cotangents)
        return self.traces.with_loss(call, {**cotangents}, run.loss, self.loss_aval(run))

    def _cut(self, stage: int, graph: Graph, wanted: Any, saved: Any) -> Cut:
        """A graph as it is cut, once for all who ask."""
        return graph.once(("cut", wanted, saved), lambda: Cut(graph, wanted, saved))


def _outputs(outline: Outline) -> list[str]:
    """The labels of a stage's outputs."""
    return [label for label in outline.writes if is_output(label)]
