"""Call each stage as its microbatch does, trace it with its gradient, and cut it: once for all that do so alike.

1F0 params[1] y[0,0]        -->        StageCall(1, params, x)        -->        Graph        -->        Cut
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from fpipe.graphs.compiling.cut import Cut
from fpipe.graphs.language.graph import Aval, Fact, Graph, Outline, in_own_storage
from fpipe.graphs.language.labels import cotangent_of, differentiated, is_output, label_of, port_of
from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.graphs.tracing.stage_call import StageCall, wants
from fpipe.graphs.tracing.trace_cache import Traces
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.devices import Moves
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.model import Model
from fpipe.program import Op, Program, Value, parts_of
from fpipe.runtimes.lowering.lowered import OPAQUE, AbstractTree, StorageMap, aval_of, described, wanting_fact


class StageRun(NamedTuple):
    """A stage on one microbatch (and slice).

    Attributes:
        call, loss: of the stage, and of the loss if that follows.
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
        """Cut a stage for the microbatch of a backward, which reads cotangents under these labels."""

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
        """Cut a stage that no backward follows: nothing reads its outputs."""
        outline = self.traces.outline(run.call)
        cotangents = {cotangent_of(label): (None,) * len(outline.writes[label]) for label in _outputs(outline)}
        return self._cut(stage, self._graph(run, cotangents), (), None)

    def _graph(self, run: StageRun, cotangents: Mapping[str, tuple[Any, ...]]) -> Graph:
        call = self.traces.shared(run.call)
        if run.loss is None:
            return self.traces.graph(call, cotangents)
        return self.traces.with_loss(call, {**cotangents}, run.loss, self.loss_aval(run))

    def _cut(self, stage: int, graph: Graph, wanted: Any, saved: Any) -> Cut:
        return graph.once(("cut", wanted, saved), lambda: Cut(graph, wanted, saved))


def _outputs(outline: Outline) -> list[str]:
    return [label for label in outline.writes if is_output(label)]


@dataclass
class Untraced:
    """The stages that run under autograd, each with the reason; `known_only` uses only traces that exist."""

    stages: dict[int, str] = field(default_factory=dict[int, str])
    known_only: bool = False

    def has(self, op: Op) -> bool:
        """Whether an op is of one of them."""
        return op.stage in self.stages and op.kind in "FRBIW"

    def surprises(self) -> list[tuple[int, str]]:
        """Return the stages whose user does not know yet that they cannot be traced."""
        return [(stage, why) for stage, why in self.stages.items() if why != BY_SIZES]

    def with_words(self, error: Exception) -> str:
        """Put the reasons why stages run without a trace before an error, each once."""
        return "; ".join(dict.fromkeys([*(why for _, why in self.surprises()), str(error).rstrip(".")]))


def is_sized(model: Model, stage: int | None) -> bool:
    """Whether a stage is an exchange whose sizes are data."""
    function = model.stages[stage or 0].forward
    return isinstance(function, Exchanged) and function.sizes


def by_sizes(model: Model) -> dict[int, str]:
    """Return the stages whose shapes depend on data: exchanges whose sizes are data, and readers of what they bring."""
    every = range(len(model.stages))
    sized = {stage for stage in every if is_sized(model, stage)}
    return dict.fromkeys((stage for stage in every if stage in sized or sized & _sources(model, stage)), BY_SIZES)


def refuse_unknown_rows(program: Program, model: Model) -> None:
    """Raise ValueError if rows that an exchange with sizes brings go to another rank, or are a result."""
    every = range(len(model.stages))
    functions: list[Any] = [stage.forward for stage in model.stages]
    sized = [stage for stage in every if is_sized(model, stage) and functions[stage].size > 1]
    ops = [op for op in parts_of(program.ops) if op.kind == "F" and op.stage in sized] if sized else []
    brought = {value: op for op in ops for value in op.writes if value.name == "y"}
    away = {value for op in program.ops if op.kind == "SEND" for value in op.reads if value in brought}
    for value, op in brought.items():
        who = f"{model.who(op.stage or 0)} brings as many rows as the data say"
        if value in away:
            readers = [at for at in every if op.stage in _sources(model, at)]
            where = dict(enumerate(program.placement))
            others = " and ".join(f"{model.who(at)} on rank {where[at]}" for at in readers if where[at] != op.rank)
            raise ValueError(
                f"{who} on rank {op.rank}, and {others} would read them; a message has a shape that is known before. "
                f"{WHOLE_BLOCKS}"
            )
        if any(end.value == value for end in program.outputs):
            raise ValueError(f"{who}, and {value} is a result, which has a shape that is known before: leave it out.")


def _sources(model: Model, stage: int) -> set[Any]:
    return {source[0] if isinstance(source, tuple) else source for source in model.sources(stage)}


BY_SIZES = "the data say how many rows its exchange brings"
WHOLE_BLOCKS = (
    "Place dispatch, experts, combine and what reads that on one rank: by a list such as fpipe.place([0, 1, 1, 1, 1]) "
    "in front of a schedule of one chunk a rank, which keeps it, or by chunks that begin with a dispatch."
)
UNDER_AUTOGRAD = "a stage runs under autograd, without a trace, and its I computes what W hands over"


Coordinates = tuple[int | None, int | None, int | None]
"""Stage, microbatch and slice of an op."""
TRANSFERS = ("SEND", "RECV", "OFFLOAD", "LOAD")


class Copies(NamedTuple):
    """The copies of a program's values: `origin` of a copy, copies `of` a value, and `moves` between two devices."""

    origin: Mapping[Value, Value]
    of: Mapping[Value, Sequence[Value]]
    moves: Moves

    def as_received(self, value: Value, known: AbstractTree) -> AbstractTree:
        """Return the abstract tree of a value as it arrives: on another device it is in memory of its own."""
        home, there = self.moves.get(value, (None, None))
        if there is None or known is OPAQUE:
            return known
        leaves = (
            in_own_storage(leaf.aval._replace(device=there))
            if isinstance(leaf, Fact) and leaf.aval.device == home
            else leaf
            for leaf in known.leaves
        )
        return known._replace(leaves=tuple(leaves))

    def each(self, value: Value) -> list[Value]:
        """Return the value that this is a copy of, and all its copies."""
        source = self.origin.get(value, value)
        return [source, *self.of.get(source, ())]


def copies_of(ops: Iterable[Op], moves: Moves) -> Copies:
    """Return the copies that transfers make, where `moves` has those between two devices."""
    origin, of = dict[Value, Value](), dict[Value, list[Value]]()
    landing = dict[Value, tuple[torch.device, torch.device]]()
    for op in ops:
        for read, written in zip(op.reads, op.writes, strict=True) if op.kind in TRANSFERS else ():
            source = origin[written] = origin.get(read, read)
            of.setdefault(source, []).append(written)
            if op.kind == "RECV" and read in moves:
                landing[written] = moves[read]
    return Copies(origin, of, landing)


@dataclass(frozen=True)
class Shapes:
    """A program as it is known before it runs.

    Attributes:
        context, untraced: of the step.
        copies: what travels.
        calls: of its stages.
        trees: the abstract tree of every value.
        runs: each stage on each microbatch, and `cuts` how it is cut for that.
        loss_storage: the storage of the loss's cotangent.
    """

    context: StepContext
    untraced: Untraced
    copies: Copies
    calls: StageCalls
    trees: Mapping[Value, AbstractTree]
    runs: Mapping[Coordinates, StageRun]
    cuts: Mapping[Coordinates, Cut]
    loss_storage: int

    def is_untraced(self, op: Op) -> bool:
        """Whether an op is of a stage that runs under autograd."""
        return self.untraced.has(op)


def ops_of(program: Program, context: StepContext) -> list[Op]:
    """Return the ops to lower: pairs as their parts, without FREEs, and without carries that nobody asks for."""
    ops = [part for op in program.ops for part in op.parts or (op,) if part.kind != "FREE"]
    if program.slices == 1:
        return ops
    return [_without_carry(op) if "carry" not in context.model.stages[op.stage or 0].asks else op for op in ops]


def _without_carry(op: Op) -> Op:
    if op.kind not in ("F", "R", "B", "I"):
        return op
    reads, writes = (tuple(v for v in values if v.name not in ("carry", "dcarry")) for values in (op.reads, op.writes))
    return op._replace(reads=reads, writes=writes)
