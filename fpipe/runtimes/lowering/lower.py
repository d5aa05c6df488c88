"""Lower a program to a flat list of instructions, once for each signature of the arguments of a step.

    1F0 1B0 ADD(sum[1,0])        --> lower -->        y, res = forward(x); dx, sum = backward_adding(res, dy, sum)

Values live in numbered slots, as lists of their leaves: first what is there when the first instruction starts, then
what these write, in their order, so that each only adds to the end. An instruction that reads a value last is given the
list itself, which it empties, so that each tensor is gone after its last read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fpipe.graphs.compiling.inductor import Kernel
from fpipe.graphs.language.graph import Aval, Fact, Graph
from fpipe.graphs.language.labels import GENERATORS, label_of, reads_of, total_of
from fpipe.graphs.tracing.exchanged import Exchanged
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.meaning import cast_of, rounding
from fpipe.meaning.purity.ambient import casts, kernels
from fpipe.meaning.stages.outputs import scaled
from fpipe.meaning.step import StepOptions
from fpipe.program import Op, Program, Value, building
from fpipe.runtimes.lowering.abstract_walk import shapes_of
from fpipe.runtimes.lowering.folds import Folds, folds_of
from fpipe.runtimes.lowering.in_place import Overwritten, overwritten_by, updating
from fpipe.runtimes.lowering.instructions import (
    Code,
    Recipe,
    add,
    add_to,
    arrive,
    by_rule,
    code_of,
    container,
    distinct,
    dropping,
    pass_on,
    rounded,
    slicing,
    with_generators,
    with_scale,
)
from fpipe.runtimes.lowering.lowered import KEY, AbstractTree, Instruction, Leaves, Lowered
from fpipe.runtimes.lowering.stage_calls import TRANSFERS, Shapes, Untraced, by_sizes, ops_of, refuse_unknown_rows
from fpipe.runtimes.lowering.untraced import under_autograd

_STEADY = ("ready", "weight")  # no instruction empties these


def lower(
    program: Program,
    context: StepContext,
    given: Mapping[Value, AbstractTree],
    untraced: Untraced,
    options: StepOptions,
) -> Lowered:
    """Lower a program, whose inputs are as `given`, to instructions; some of its stages run under plain autograd.

    Raises:
        Untraceable: something in it cannot be known before it runs.
    """
    untraced.stages |= {**by_sizes(context.model), **untraced.stages}
    ops = ops_of(program, context)
    refuse_unknown_rows(program, context.model)
    with building():
        shapes = shapes_of(ops, context, given, untraced)
        mine = {leaf.storage for abstract in given.values() for leaf in abstract.leaves if isinstance(leaf, Fact)}
        held = {cut.graph.facts[name].storage for cut in shapes.cuts.values() for name in cut.graph.constants}
        mine |= held | {shapes.loss_storage}
        kept = {end.value for end in program.outputs}
        folds = folds_of(ops, kept, shapes, mine, options.compile)
        overwritten = overwritten_by(ops, kept, folds.trees, mine, options.donate)
        return _Lowering(ops, shapes, folds, mine, overwritten, options).lowered(program, given)


class _Unnumbered(NamedTuple):
    """An instruction whose slots still have names: values, and what a step makes before its first instruction."""

    run: Callable[..., Any]
    reads: Sequence[Any]
    shared: tuple[int, ...]
    ops: tuple[Op, ...]
    written: tuple[Value, ...]
    dead: tuple[Value, ...]


class _Lowering:
    """The instructions of a program whose shapes are known, and then the numbers of their slots."""

    def __init__(
        self,
        ops: Sequence[Op],
        shapes: Shapes,
        folds: Folds,
        given: Collection[int],
        overwritten: Overwritten,
        options: StepOptions,
    ) -> None:
        self.ops, self.shapes, self.folds, self.given, self.compile = ops, shapes, folds, given, options.compile
        self.trees, self.overwritten = overwritten.trees, overwritten
        self.written_params = {value for op in ops for value in op.writes if value.name == "params"}
        self.moved = {*self.written_params, *shapes.copies.origin}
        self.kernels, self.casts = kernels() if options.runs else None, casts()
        self.constants: dict[Any, Leaves] = {}
        self.prepare: dict[Any, tuple[Callable[..., Any], Sequence[Any]]] = {}
        self.drawing: int | None = None
        self.to_compile: dict[Op, Kernel] = {}
        self.parts: dict[Op, Graph] = {}
        whole = {value for op in ops if op.kind in TRANSFERS or shapes.is_untraced(op) for value in op.reads}
        traced = {value for op in ops if not shapes.is_untraced(op) for value in op.reads}
        free = {value for op in ops if shapes.is_untraced(op) for value in op.writes}
        self.free = frozenset(free - traced).difference(folds.kept)  # nobody relies on the shapes of these
        self.read_leaves: dict[Value, set[int]] = {value: set() for value in self.written_params - whole}

    def lowered(self, program: Program, given: Mapping[Value, AbstractTree]) -> Lowered:
        """Return the instructions, with their slots in the order in which they are filled."""
        unnumbered = [self.instruction_of(at, op) for at, op in enumerate(self.ops) if at not in self.folds.folded]
        written = dict.fromkeys(chain.from_iterable(instruction.written for instruction in unnumbered))
        prepared = chain.from_iterable(reads for _, reads in self.prepare.values())
        read = chain.from_iterable(instruction.reads for instruction in unnumbered)
        inputs = (end.value for end in program.inputs)
        names = dict.fromkeys(chain(inputs, self.constants, self.prepare, prepared, read))
        slots = {name: slot for slot, name in enumerate((*(name for name in names if name not in written), *written))}

        def slots_of(names: Iterable[Any]) -> tuple[int, ...]:
            return tuple(map(slots.__getitem__, names))

        return Lowered(
            slots=slots,
            constants={slots[name]: leaves for name, leaves in self.constants.items()},
            prepare=[(run, slots_of(reads), slots[name]) for name, (run, reads) in self.prepare.items()],
            instructions=[
                Instruction(run, slots_of(reads), shared, slots_of(written), ops, written, dead)
                for run, reads, shared, ops, written, dead in unnumbered
            ],
            trees=self.trees,
            given=frozenset(self.given),
            given_up=self.overwritten.given_up,
            drawing=self.drawing,
            kernels=self.to_compile,
            collective=self.is_collective(given),
            graphs=self.shapes.calls.traces.graphs(),
            parts=self.parts,
            gathered=self.read_leaves,
        )

    def is_collective(self, given: Mapping[Value, AbstractTree]) -> bool:
        """Whether stages talk to other processes: in a trace, by DTensors, or as an exchange without a trace."""
        functions = [self.shapes.context.model.stages[n].forward for n in self.shapes.untraced.stages]
        leaves = chain.from_iterable(abstract.leaves for abstract in given.values())
        return (
            any(graph.collective for graphs in self.shapes.calls.traces.graphs().values() for graph in graphs)
            or any(isinstance(leaf, Fact) and leaf.aval.sharding for leaf in leaves)
            or any(isinstance(function, Exchanged) and function.size > 1 for function in functions)
        )

    def instruction_of(self, at: int, op: Op) -> _Unnumbered:
        """Return the instruction of an op, and of those that are folded into it."""
        if self.shapes.is_untraced(op):
            trees = [[self.trees[value] for value in values] for values in (op.reads, op.writes)]
            keyed = (KEY,) if op.kind in "FRBI" else ()  # a backward may run the forward once more
            run = partial(under_autograd, op, *trees, self.free, self.shapes.context, self.casts)
            return self.instruction(at, run, (*op.reads, *keyed), op.writes)
        if op.kind in ("F", "R", "B", "I", "W"):
            return self.traced(at, op)
        return self.instruction(at, self.rule_of(at, op), op.reads, op.writes)

    def instruction(
        self, at: int, run: Callable[..., Any], reads: Sequence[Any], writes: Sequence[Value], extra: Sequence[Op] = ()
    ) -> _Unnumbered:
        dead = self.folds.dead.get(at, ())
        shared = tuple(k for k, name in enumerate(reads) if name not in dead and name[0] not in _STEADY)
        return _Unnumbered(run, reads, shared, (self.ops[at], *extra), tuple(writes), dead)

    def traced(self, at: int, op: Op) -> _Unnumbered:
        """Return the instruction that runs a part of a stage's graph."""
        sums = self.folds.sums
        cut, adds = self.shapes.cuts[op[1:4]], sums.adds.get(at, {})
        recipe = Recipe(
            kind=op.kind if op.kind in "BIW" else "F",
            labels=tuple(map(label_of, op.writes)),
            adds=tuple(map(label_of, adds)),
            copied=tuple(
                (label_of(value), place) for value in op.writes for place in self.folds.sums.copied.get(value, ())
            ),
            overwrites=self.folds.overwrites.get(at, ()),
            params_are_received=any(value in self.written_params for value in op.reads),
            kernels=self.kernels,
            compile=self.compile,
        )
        code = cut.graph.once((cut, recipe), lambda: code_of(cut, recipe, f"{op.kind} of stage {op.stage}"))
        graph, run = code.graph, code.run
        self.parts[op] = graph
        if isinstance(run, Kernel):
            self.to_compile[op] = run
        totals = {total_of(label_of(gradient)): self.ops[add] for gradient, add in adds.items()}
        named: dict[str, Any] = {**reads_of(op)} | {label: add.reads[0] for label, add in totals.items()}
        if "dloss" in graph.reads:
            scale = next((value for value in op.reads if value.name == "scale"), None)
            named |= {"dloss": self.weight(op) if scale is None else scale}
            run = run if scale is None else with_scale(run, [*graph.reads].index("dloss"), _filled(*self.cotangent(op)))
        named |= {"const": Value("const", op.stage)} if recipe.params_are_received else {}
        values = {label_of(value): value for value in self.folds.own_writes(at)}
        values |= {label: add.writes[0] for label, add in totals.items()}
        if GENERATORS in graph.reads:
            named |= {GENERATORS: KEY}
            context, stage = self.shapes.context, op.stage or 0
            self.drawing = stage if self.drawing is None else self.drawing
            place = (stage, context.number(op), op.slice)
            run = with_generators(run, [*graph.reads].index(GENERATORS), graph.drawn_on, place, context.step_of(op))
        if "ready" in graph.reads:
            named |= {"ready": self.ready(op, code)}
        reads = [named[label] for label in graph.reads]
        for value, names in zip(reads, graph.reads.values(), strict=True):
            if value in self.read_leaves:
                self.read_leaves[value].update(k for k, name in enumerate(names) if name is not None)
        if recipe.params_are_received:  # what came from another rank, or a version, is gone after its last read
            count, last = len(reads), {*self.folds.dead.get(at, ())}
            reads += [value for value in op.reads if value in last & self.written_params and value not in reads]
            dropped = [k for k, value in enumerate(reads) if value in last & self.moved]
            run = dropping(run, count, dropped) if dropped else run
        extra = [self.ops[add] for add in self.folds.adds_of(at)]
        return self.instruction(at, run, reads, [values[label] for label in graph.writes], extra)

    def ready(self, op: Op, code: Code) -> Any:
        """Return the name of the views of parameters that code reads; they are made once a step."""
        origin, forward = self.shapes.copies.origin, self.shapes.runs[op[1:4]].first
        named = {**reads_of(forward)} | {"const": Value("const", op.stage)}
        values = [origin.get(named[label], named[label]) for label in code.prepares.reads]
        name = ("ready", code.prepare, *values)
        self.prepare.setdefault(name, (code.prepare, values))
        return name

    def weight(self, op: Op) -> Any:
        """Return the name of the loss's cotangent."""
        name = ("weight", *self.cotangent(op))
        if name not in self.constants:
            self.constants[name] = [_filled(*name[1:])]
        return name

    def cotangent(self, op: Op) -> tuple[float, Aval]:
        """Return the loss's cotangent: the microbatch's weight in the mean, and the aval of the loss."""
        weight = 1.0
        if self.shapes.context.model.reduction == "mean":
            weight = next((self.trees[value].leaves[0] for value in op.reads if value.name == "w"), 1.0)
        known = self.shapes.calls.loss_aval(self.shapes.runs[op[1:4]])
        return scaled(weight, self.shapes.context.loss_scale, known.dtype), known

    def rule_of(self, at: int, op: Op) -> Callable[..., Sequence[Leaves]]:
        """Return the function that does what the walk would, on values in their containers."""
        context, trees = self.shapes.context, [self.trees[value] for value in op.reads]
        if op.kind == "GATHER":
            return partial(rounded, cast_of(op))
        if op.kind in TRANSFERS:
            return partial(rounded, rounding(op)) if op.how else arrive if op.kind == "RECV" else pass_on
        if op.kind == "UPDATE":
            return updating(op, context, self.trees, self.overwritten.places[at])
        if op.kind == "ADD":
            return add_to if at in self.folds.sums.in_place else add
        if op.kind == "SPLIT" and "presplit" not in dict(op.how):
            slices = slicing(op, self.trees)
            if slices is not None:
                return slices
        containers = [*map(container, trees)]
        run = partial(by_rule, op, containers, context, self.casts)
        if op.kind == "MERGE":
            facts = (leaf for known in trees for leaf in known.leaves if isinstance(leaf, Fact))
            if any(leaf.storage in self.given for leaf in facts if not leaf.aval.shape):
                return lambda *lists: run(*map(distinct, lists))
        return run


def _filled(weight: float, known: Aval) -> Tensor:
    return torch.full(known.shape, weight, dtype=known.dtype, device=known.device)
