"""Make a flat list of calls of a program, once for each signature of what a step is handed.

    1F0 1B0 ADD(sum[1,0])        --> lower -->        y, res = forward(x); dx, sum = backward_adding(res, dy, sum)

Values live in numbered slots, as lists of their leaves. A call that reads a value last is given the list itself, which
it empties, so that each tensor is gone after its last read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from fpipe import tree
from fpipe.graphs.add import adding, owned
from fpipe.graphs.code import compiled
from fpipe.graphs.cut import Cut, prepared
from fpipe.graphs.graph import Fact, Graph, Name
from fpipe.models import Model
from fpipe.program import Op, Program, Value
from fpipe.runtimes.meaning import RULES, Run
from fpipe.runtimes.shapes import Shapes, Thing, dense, label_of, whole

Leaves = list[Any]


class Call(NamedTuple):
    """One call: the slots it reads, which of these are read again later, the slots it writes, the ops it stands for."""

    run: Callable[..., Sequence[Leaves]]
    reads: tuple[int, ...]
    shared: tuple[int, ...]
    writes: tuple[int, ...]
    ops: tuple[Op, ...]


@dataclass(frozen=True)
class Lowered:
    """A program as calls, for one signature.

    Attributes:
        slots: where each value lives.
        constants: what some slots hold from the start.
        prepare: calls that a step makes first, once for all microbatches: views of parameters.
        calls: the calls, in the order of the program.
        things: what is known of every value.
    """

    slots: Mapping[Value, int]
    constants: Mapping[int, Leaves]
    prepare: Sequence[tuple[Callable[..., Any], tuple[int, ...], int]]
    calls: Sequence[Call]
    things: Mapping[Value, Thing]


def lower(program: Program, model: Model, given: Mapping[Value, Thing], rows: int) -> Lowered:
    """Calls for a program whose inputs are as `given`.

    Raises:
        Untraceable: something in it cannot be known before it runs.
    """
    ops = [part for op in program.ops for part in op.parts or (op,) if part.kind != "FREE"]
    shapes = Shapes(model, dict(given), rows)
    for op in ops:
        shapes.follow(op)
    return _Writer(program, ops, shapes).write()


class _Writer:
    """Writes the calls of a program down, now that all shapes are known."""

    def __init__(self, program: Program, ops: list[Op], shapes: Shapes) -> None:
        self.program, self.ops, self.shapes, self.things = program, ops, shapes, shapes.things
        self.slots: dict[Any, int] = {}
        self.constants: dict[int, Leaves] = {}
        self.prepare: list[tuple[Callable[..., Any], tuple[int, ...], int]] = []
        self.kept = {end.value for end in program.outputs}
        self.written = {value: at for at, op in enumerate(ops) for value in op.writes}
        self.readers = Counter(value for op in ops for value in op.reads)
        self.sums = self.foldable()
        folded = {add for adds in self.sums.values() for add in adds.values()}
        self.folded = folded
        self.last = {value: at for at, op in enumerate(ops) for value in (*op.writes, *self.reads_of(at))}

    def write(self) -> Lowered:
        calls = [self.called(at, op) for at, op in enumerate(self.ops) if at not in self.folded]
        for value in (end.value for end in self.program.inputs):
            self.slot(value)
        return Lowered(self.slots, self.constants, self.prepare, calls, self.things)

    def slot(self, value: Any) -> int:
        return self.slots.setdefault(value, len(self.slots))

    # Additions that a backward makes itself.

    def foldable(self) -> dict[int, dict[Value, int]]:
        """For each backward the gradients it can add to a sum itself, and the ADDs that would have done it."""
        found: dict[int, dict[Value, int]] = {}
        owned_sums: set[Value] = set()
        for at, op in enumerate(self.ops):
            if op.kind != "ADD" or len(op.reads) != 2:
                continue
            total, gradient = op.reads
            maker = self.written.get(gradient, -1)
            alone = self.readers[total] == self.readers[gradient] == 1 and not {total, gradient} & self.kept
            if not alone or maker < 0 or self.ops[maker].kind not in "BW" or gradient.name != "g":
                continue
            start = self.written.get(total, len(self.ops))
            mine = total in owned_sums or (total.name == "g" and start < len(self.ops) and self.ops[start].kind in "BW")
            here = {self.ops[k].rank for k in (at, maker, start) if k < len(self.ops)}
            same = [
                (one is None) == (other is None)
                for one, other in zip(self.things[total].leaves, self.things[gradient].leaves, strict=True)
            ]
            if mine and start < maker and len(here) == 1 and all(same):
                found.setdefault(maker, {})[gradient] = at
                owned_sums.add(op.writes[0])
        return found

    def reads_of(self, at: int) -> list[Value]:
        """What is read at a position, the sums that a backward takes in there included."""
        if at in self.folded:
            return []
        return [*self.ops[at].reads, *(self.ops[add].reads[0] for add in self.sums.get(at, {}).values())]

    # Calls.

    def called(self, at: int, op: Op) -> Call:
        return self.traced(at, op) if op.kind in ("F", "R", "B", "I", "W") else self.ruled(at, op)

    def call(
        self, at: int, run: Callable[..., Any], reads: Sequence[Any], writes: Sequence[Value], extra: Sequence[Op] = ()
    ) -> Call:
        ops = (self.ops[at], *extra)
        mine = {value for value in reads if self.last.get(value) == at and value not in self.kept}
        shared = tuple(k for k, value in enumerate(reads) if value not in mine and value[0] != "ready")
        return Call(run, tuple(map(self.slot, reads)), shared, tuple(map(self.slot, writes)), ops)

    def traced(self, at: int, op: Op) -> Call:
        """A part of a stage's graph."""
        cut = self.shapes.cut_of(op)
        adds = self.sums.get(at, {})
        copied = tuple(self.shared_gradients(op, [value for value in op.writes if value not in adds]))
        labels = tuple(label_of(value) for value in op.writes)
        key = ("code", id(cut), op.kind if op.kind in "BIW" else "F", labels, tuple(map(label_of, adds)), copied)
        first, run, graph = self.shapes.traces.once(key, lambda: _code(cut, op.kind, labels, key[4], copied))
        named = self.shapes.labels(op) | {
            "total" + label_of(gradient).removeprefix("g"): self.ops[add].reads[0] for gradient, add in adds.items()
        }
        named |= {"dloss": self.weight(op)} if "dloss" in graph.reads else {}
        values = {label_of(value): value for value in op.writes if value not in adds}
        values |= {"total" + label_of(g).removeprefix("g"): self.ops[add].writes[0] for g, add in adds.items()}
        reads = [self.ready(cut, key, op, first) if label == "ready" else named[label] for label in graph.reads]
        extra = [self.ops[add] for add in adds.values()]
        return self.call(at, run, reads, [values[label] for label in graph.writes], extra)

    def shared_gradients(self, op: Op, values: Sequence[Value]) -> list[Name]:
        """Gradients that will be added to in place, but lie in memory that something else lies in too."""
        if op.kind not in "BW":
            return []
        graph = self.shapes.cut_of(op).graph
        taken = Counter(
            leaf.storage
            for value in (*op.reads, *op.writes)
            for leaf in self.things[value].leaves
            if isinstance(leaf, Fact)
        )
        started = {self.ops[add].reads[0] for adds in self.sums.values() for add in adds.values()}
        return [
            name
            for value in values
            if value in started
            for name, leaf in zip(graph.writes[label_of(value)], self.things[value].leaves, strict=True)
            if isinstance(leaf, Fact) and (taken[leaf.storage] > 1 or not dense(leaf) or name in graph.constants)
        ]

    def ready(self, cut: Cut, key: Any, op: Op, first: tuple[Callable[..., Any], Graph]) -> Any:
        """The slot of the views of parameters that a call reads, and the call that makes them, once a step."""
        run, graph = first
        _, _, forward = self.shapes.calls[op[1:4]]
        named = self.shapes.labels(forward) | {"const": Value("const", op.stage)}
        values = [self.shapes.origin.get(named[label], named[label]) for label in graph.reads]
        slot = ("ready", key, *values)
        if slot not in self.slots:
            self.prepare.append((run, tuple(map(self.slot, values)), self.slot(slot)))
        return slot

    def weight(self, op: Op) -> Any:
        """The slot of the loss's cotangent: the microbatch's weight in the mean."""
        weight = 1.0
        if self.shapes.model.reduction == "mean":
            weight = next((self.things[value].leaves[0] for value in op.reads if value.name == "w"), 1.0)
        known = self.shapes.loss_of(op)
        slot = ("weight", weight, known)
        if slot not in self.slots:
            self.constants[self.slot(slot)] = [torch.full(known.shape, weight, dtype=known.dtype, device=known.device)]
        return slot

    def ruled(self, at: int, op: Op) -> Call:
        """What the walk would do, on values in their containers."""
        if op.kind in ("SEND", "RECV", "OFFLOAD", "LOAD"):
            return self.call(at, _pass_on, op.reads, op.writes)
        if op.kind == "ADD":
            return self.call(at, _add, op.reads, op.writes)
        things = [self.things[value] for value in op.reads]
        return self.call(at, partial(_by_rule, op, things, self.shapes.run), op.reads, op.writes)


def _code(
    cut: Cut, kind: str, labels: tuple[str, ...], adds: tuple[str, ...], copied: tuple[Name, ...]
) -> tuple[tuple[Callable[..., Any], Graph], Callable[..., Any], Graph]:
    """The function of one kind of op: what it prepares of parameters, and the rest."""
    if kind in ("F", "R"):
        graph = cut.forward(labels)
    else:
        graph = {"B": cut.backward, "I": cut.backward_input, "W": cut.backward_weight}[kind]()
    graph = owned(graph, copied) if copied else graph
    graph = adding(graph, adds) if adds else graph
    first, rest = prepared(graph)
    return (compiled(first, "prepare"), first), compiled(rest, kind), rest


def _pass_on(*lists: Leaves) -> Sequence[Leaves]:
    made = [[*leaves] for leaves in lists]
    _empty(lists)
    return made


def _add(*lists: Leaves) -> Sequence[Leaves]:
    total = lists[0]
    for more in lists[1:]:
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, more, strict=True)]
    total = [*total]
    _empty(lists)
    return [total]


def _by_rule(op: Op, reads: Sequence[Thing], run: Run, *lists: Leaves) -> Sequence[Leaves]:
    made = RULES[op.kind](op, [whole(thing, leaves) for thing, leaves in zip(reads, lists, strict=True)], run)
    _empty(lists)
    return [list(value) if isinstance(value, list) else tree.leaves(value) for value in made]


def _empty(lists: Sequence[Leaves]) -> None:
    for leaves in lists:
        leaves.clear()
