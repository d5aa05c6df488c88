"""Describe how each microbatch calls its stage, and trace and cut the stage once for all equal calls.

1F0 params[1] y[0,0]        -->        StageCall(1, params, x)        -->        Graph        -->        Cut
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Aval, Fact, Outline, fact_in_own_storage
from fpipe.graphs.language.labels import cotangent_of, differentiated_label, is_output, label_of, port_of
from fpipe.graphs.tracing.collective_stage import CollectiveStage
from fpipe.graphs.tracing.open_sizes import SizedGraph, SizeNumbers
from fpipe.graphs.tracing.stage_call import StageCall, aval_wants_grad
from fpipe.graphs.tracing.trace_cache import Traces
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.devices import Moves
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.step import StepOptions
from fpipe.model import Model
from fpipe.program import Op, Program, Value, parts_of
from fpipe.runtimes.lowering.lowered import (
    OPAQUE,
    AbstractTree,
    StorageMap,
    aval_of_leaf,
    avals_and_specs,
    fact_wanting_grad,
)


class StageRun(NamedTuple):
    """How a stage runs on one microbatch (and slice).

    Attributes:
        call: the call of the stage.
        loss: the call of the loss, if that follows.
        residual_op: the op whose residuals the backward reads: the F, or the R where there is one.
        forward_op: the F.
    """

    call: StageCall
    loss: StageCall | None
    residual_op: Op
    forward_op: Op


class SizedCut(NamedTuple):
    """A cut, which calls of different sizes share if its graph is open, and the numbers of one call."""

    cut: Cut
    numbers: SizeNumbers


class StageCalls:
    """The calls of a model's stages, with their outlines, graphs and cuts."""

    def __init__(self, context: StepContext, existing_traces_only: bool, options: StepOptions) -> None:
        self.context, self.model, self.hoists = context, context.model, options.hoist
        self.traces = Traces(self.model, existing_traces_only, fills=options.compile)
        self._canonical_call: dict[StageCall, StageCall] = {}

    def call(self, op: Op, labels: Mapping[str, Value], inputs: Mapping[str, AbstractTree]) -> StageCall:
        """Return the call of an F or R, whose avals say which leaves of the batch want a gradient."""
        assert op.stage is not None
        stage_by_label = {label: value.stage for label, value in labels.items() if value.name in ("x", "inputs")}
        input_grads = self.context.input_grads
        grad_labels = tuple(label for label, stage in stage_by_label.items() if (stage, port_of(label)) in input_grads)
        groups = {label: abstract for label, abstract in inputs.items() if label not in ("target", "key")}
        for label in grad_labels:
            groups[label] = groups[label]._replace(leaves=tuple(map(fact_wanting_grad, groups[label].leaves)))
        reads, specs = avals_and_specs(groups)
        keywords = self.model.stages[op.stage].keywords
        microbatch = self.context.number(op) if "microbatch" in keywords else None
        turn = self.context.turn(op) if "turn" in keywords else None
        return self.canonical(StageCall(op.stage, reads, specs, microbatch, grad_labels, turn))

    def canonical(self, call: StageCall) -> StageCall:
        """Return the first of equal calls, so that later look-ups compare by identity."""
        try:
            return self._canonical_call.setdefault(call, call)
        except TypeError as error:
            raise Untraceable(f"it is handed something that cannot be compared ({error})") from error

    def outline_results(self, call: StageCall, inputs: Mapping[str, AbstractTree]) -> dict[str, AbstractTree]:
        """Return the abstract results of a call, whose tensors lie in new memory or in memory of its inputs."""
        outline = self.traces.outline(call)
        storages = StorageMap(
            (traced_fact.storage, leaf.storage)
            for label, leaves in outline.reads.items()
            for traced_fact, leaf in zip(leaves, inputs[label].leaves, strict=True)
            if isinstance(leaf, Fact)
        )

        def in_step_memory(leaf: Any) -> Any:
            return storages.translate(leaf) if isinstance(leaf, Fact) else leaf

        return {
            label: AbstractTree(tuple(map(in_step_memory, leaves)), outline.specs[label])
            for label, leaves in outline.writes.items()
        }

    def loss_aval(self, run: StageRun) -> Aval:
        """Return the aval of the loss that a stage writes."""
        return self.traces.outline(run.loss or run.call).avals("loss")[0]._replace(wants_grad=False)

    def cut(self, op: Op, run: StageRun, labels: Mapping[str, Value], trees: Mapping[Value, AbstractTree]) -> SizedCut:
        """Cut a stage for a backward, which reads the values that `labels` name, cotangents among them."""

        def avals(value: Value, leaves: Sequence[Any]) -> tuple[Any, ...]:
            pairs = zip(leaves, trees[value].leaves, strict=True)
            return tuple(aval_of_leaf(cotangent) if aval_wants_grad(leaf) else None for leaf, cotangent in pairs)

        # 1. The cotangents that arrive, None for leaves without one: they decide what the trace computes. An output
        #    behind which the loss stands, or which is returned next to it, has none of its own.
        outline = self.traces.outline(run.call)
        cotangents = {
            cotangent_of(label): avals(labels[cotangent_of(label)], outline.avals(label))
            for label in _output_labels(outline)
            if cotangent_of(label) in labels
        }
        if "dcarry" in labels:
            cotangents["dcarry"] = avals(labels["dcarry"], outline.avals("carry"))
        # A stage may compute the loss itself.
        if "loss" in outline.writes:
            cotangents["dloss"] = (self.loss_aval(run),)
        # 2. The cotangents that the backward writes, for the inputs that want a gradient: they decide the cut.
        reads = dict(run.call.reads)
        cotangent_labels = [label_of(value) for value in op.writes if value.name in ("dx", "dcarry")]
        wanted_cotangents = tuple(
            (label, tuple(i for i, leaf in enumerate(reads[differentiated_label(label)]) if aval_wants_grad(leaf)))
            for label in cotangent_labels
        )
        saved = dict(run.residual_op.options).get("saved")
        return self._cut(self._graph(run, cotangents), wanted_cotangents, saved)

    def forward_cut(self, run: StageRun) -> SizedCut:
        """Cut a stage that no backward follows: its outputs have no cotangents."""
        outline = self.traces.outline(run.call)
        cotangents = {cotangent_of(label): (None,) * len(outline.writes[label]) for label in _output_labels(outline)}
        return self._cut(self._graph(run, cotangents), (), None)

    def _graph(self, run: StageRun, cotangents: Mapping[str, tuple[Any, ...]]) -> SizedGraph:
        call = self.traces.shared(run.call)
        if run.loss is None:
            return self.traces.graph(call, cotangents)
        return self.traces.graph_with_loss(call, {**cotangents}, run.loss, self.loss_aval(run))

    def _cut(self, sized_graph: SizedGraph, wanted_cotangents: Any, saved: Any) -> SizedCut:
        graph, numbers = sized_graph
        key = wanted_cotangents, saved, self.hoists
        return SizedCut(graph.compute_once(("cut", *key), lambda: Cut(graph, *key)), numbers)


def _output_labels(outline: Outline) -> list[str]:
    return [label for label in outline.writes if is_output(label)]


@dataclass
class UntracedStages:
    """The stages that run under autograd, each with the reason; `existing_traces_only` uses no new traces."""

    stages: dict[int, str] = field(default_factory=dict[int, str])
    existing_traces_only: bool = False

    def runs(self, op: Op) -> bool:
        """Whether an op runs under autograd, since its stage does."""
        return op.stage in self.stages and op.kind in "FRBIW"

    def unexpected_reasons(self) -> list[tuple[int, str]]:
        """Return the stages, with reasons, whose user has not asked for a run without a trace."""
        return [(stage, reason) for stage, reason in self.stages.items() if reason != SIZES_ARE_DATA]

    def with_reasons(self, error: Exception) -> str:
        """Return the text of an error behind the reasons why stages run without a trace, each once."""
        return "; ".join(dict.fromkeys([*(reason for _, reason in self.unexpected_reasons()), str(error).rstrip(".")]))


def has_data_sizes(model: Model, stage: int | None) -> bool:
    """Whether a stage is an exchange whose sizes are data."""
    function = model.stages[stage or 0].forward
    return isinstance(function, CollectiveStage) and function.has_sizes


def stages_with_data_sizes(model: Model) -> dict[int, str]:
    """Return the stages whose shapes depend on data: exchanges whose sizes are data, and the readers of their rows."""
    stages = range(len(model.stages))
    sized_stages = {stage for stage in stages if has_data_sizes(model, stage)}
    return dict.fromkeys(
        (stage for stage in stages if stage in sized_stages or sized_stages & _sources(model, stage)), SIZES_ARE_DATA
    )


def refuse_unknown_rows(program: Program, model: Model) -> None:
    """Raise ValueError if the rows of an exchange whose sizes are data go to another rank, or are a result."""
    stages = range(len(model.stages))
    functions: list[Any] = [stage.forward for stage in model.stages]
    exchanges = [stage for stage in stages if has_data_sizes(model, stage) and functions[stage].size > 1]
    ops = [op for op in parts_of(program.ops) if op.kind == "F" and op.stage in exchanges] if exchanges else []
    exchange_by_output = {value: op for op in ops for value in op.writes if value.name == "y"}
    sends = [op for op in program.ops if op.kind == "SEND"] if exchange_by_output else []
    sent_values = {value for op in sends for value in op.reads if value in exchange_by_output}
    for value, op in exchange_by_output.items():
        subject = f"{model.label_of(op.stage or 0)} brings as many rows as the data say"
        if value in sent_values:
            readers = [stage for stage in stages if op.stage in _sources(model, stage)]
            rank_by_stage = dict(enumerate(program.placement))
            remote_readers = " and ".join(
                f"{model.label_of(stage)} on rank {rank_by_stage[stage]}"
                for stage in readers
                if rank_by_stage[stage] != op.rank
            )
            raise ValueError(
                f"{subject} on rank {op.rank}, and {remote_readers} would read them; a message has a fixed shape. "
                f"{WHOLE_BLOCKS}"
            )
        if any(end.value == value for end in program.outputs):
            raise ValueError(f"{subject}, and {value} is a result, which has a fixed shape: leave it out.")


def _sources(model: Model, stage: int) -> set[Any]:
    return {source[0] if isinstance(source, tuple) else source for source in model.sources(stage)}


SIZES_ARE_DATA = "the data say how many rows its exchange brings"
WHOLE_BLOCKS = (
    "Place dispatch, experts, combine and its reader on one rank, such as by fpipe.place([0, 1, 1, 1, 1]) in front of "
    "the schedule."
)
UNDER_AUTOGRAD = "a stage runs under autograd, without a trace, and its I computes what W hands over"


Coordinates = tuple[int | None, int | None, int | None]
"""Stage, microbatch and slice of an op."""
TRANSFERS = ("SEND", "RECV", "OFFLOAD", "LOAD")


class Copies(NamedTuple):
    """The copies of a program's values that its transfers make.

    Attributes:
        source_by_copy: the value that a copy is of, in the end.
        copies_by_source: all copies of a value.
        moves: for a copy on another device than its value, both devices: from, to.
    """

    source_by_copy: Mapping[Value, Value]
    copies_by_source: Mapping[Value, Sequence[Value]]
    moves: Moves

    def as_received(self, value: Value, abstract: AbstractTree) -> AbstractTree:
        """Return the abstract tree of a received value: on another device it is in memory of its own."""
        home, target = self.moves.get(value, (None, None))
        if target is None or abstract is OPAQUE:
            return abstract
        leaves = (
            fact_in_own_storage(leaf.aval._replace(device=target))
            if isinstance(leaf, Fact) and leaf.aval.device == home
            else leaf
            for leaf in abstract.leaves
        )
        return abstract._replace(leaves=tuple(leaves))

    def all_copies(self, value: Value) -> list[Value]:
        """Return a value and all copies of it, for any member of this family."""
        source = self.source_by_copy.get(value, value)
        return [source, *self.copies_by_source.get(source, ())]


def copies_of(ops: Iterable[Op], moves: Moves) -> Copies:
    """Return the copies that transfers make; `moves` has the values that change their device."""
    source_by_copy, copies_by_source = dict[Value, Value](), dict[Value, list[Value]]()
    moves_by_copy = dict[Value, tuple[torch.device, torch.device]]()
    for op in ops:
        for read_value, copy in zip(op.reads, op.writes, strict=True) if op.kind in TRANSFERS else ():
            # A copy of a copy, as a RECV makes of what a SEND wrote, is a copy of the first value.
            source = source_by_copy[copy] = source_by_copy.get(read_value, read_value)
            copies_by_source.setdefault(source, []).append(copy)
            if op.kind == "RECV" and read_value in moves:
                moves_by_copy[copy] = moves[read_value]
    return Copies(source_by_copy, copies_by_source, moves_by_copy)


@dataclass(frozen=True)
class Shapes:
    """All that is known of a program before it runs.

    Attributes:
        context, untraced: the context of the step, and its stages that run under autograd.
        copies: the copies that transfers make.
        calls: the calls of its stages.
        trees: the abstract tree of every value.
        runs, cuts, numbers: for each stage, microbatch and slice, how the stage runs, how it is cut, and the numbers
            for open sizes of its graph.
        loss_storage: the storage of the loss's cotangent.
    """

    context: StepContext
    untraced: UntracedStages
    copies: Copies
    calls: StageCalls
    trees: Mapping[Value, AbstractTree]
    runs: Mapping[Coordinates, StageRun]
    cuts: Mapping[Coordinates, Cut]
    numbers: Mapping[Coordinates, SizeNumbers]
    loss_storage: int

    def is_untraced(self, op: Op) -> bool:
        """Whether an op's stage runs under autograd."""
        return self.untraced.runs(op)


def ops_to_lower(program: Program, context: StepContext) -> list[Op]:
    """Return the ops to lower: without FREEs, joint ops as their parts, and no carries for stages without them."""
    ops = [part for op in program.ops for part in op.parts or (op,) if part.kind != "FREE"]
    if program.slices == 1:
        return ops
    return [_without_carry(op) if "carry" not in context.model.stages[op.stage or 0].keywords else op for op in ops]


def _without_carry(op: Op) -> Op:
    if op.kind not in ("F", "R", "B", "I"):
        return op
    reads, writes = (tuple(v for v in values if v.name not in ("carry", "dcarry")) for values in (op.reads, op.writes))
    return op._replace(reads=reads, writes=writes)
