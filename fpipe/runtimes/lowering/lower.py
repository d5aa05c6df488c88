"""Lower a program to a flat list of instructions, once for each signature of the arguments of a step.

    1F0 1B0 ADD(sum[1,0])        --> lower -->        y, res = forward(x); dx, sum = backward_adding(res, dy, sum)

Values live in numbered slots, as lists of their leaves. The slots that are full before the first instruction come
first, then those that instructions write, in their order: so an instruction appends its results to the list of slots
and needs no indices for them. The last reader of a value gets the list itself and empties it, so that each tensor is
gone after its last read; earlier readers get copies of the list.
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
from fpipe.graphs.language.labels import GENERATORS, hoisted_label, label_of, reads_by_label, total_of
from fpipe.graphs.tracing.collective_stage import CollectiveStage
from fpipe.graphs.tracing.open_sizes import SizedGraph, SizeNumbers
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.meaning import make_cast, make_rounding
from fpipe.meaning.purity.ambient import autocast_settings, kernel_settings
from fpipe.meaning.purity.outputs import scaled_weight
from fpipe.meaning.step import StepOptions
from fpipe.program import Op, Program, Value, building
from fpipe.runtimes.lowering.abstract_walk import infer_shapes
from fpipe.runtimes.lowering.folds import Folds, find_folds
from fpipe.runtimes.lowering.hoists import Hoist, find_hoists
from fpipe.runtimes.lowering.in_place import Overwritten, find_overwritten, make_update
from fpipe.runtimes.lowering.instructions import (
    Code,
    Recipe,
    add,
    add_in_place,
    as_distinct,
    cast_transfer,
    generate_code,
    make_split,
    make_unflatten,
    part_of_cut,
    receive_locally,
    run_rule,
    send_locally,
    with_drops,
    with_generators,
    with_scale,
)
from fpipe.runtimes.lowering.lowered import KEY, AbstractTree, Instruction, Leaves, Lowered
from fpipe.runtimes.lowering.stage_calls import (
    TRANSFERS,
    Shapes,
    UntracedStages,
    ops_to_lower,
    refuse_unknown_rows,
    stages_with_data_sizes,
)
from fpipe.runtimes.lowering.untraced_stages import (
    norm_of_partial,
    partial_gradients,
    sparse_gradients,
    under_autograd,
)

# These serve many microbatches, so that code does not empty their lists; the last reader of hoisted values does.
_KEPT_ALL_STEP = ("hoisted", KEY[0], "weight")


def lower(
    program: Program,
    context: StepContext,
    inputs: Mapping[Value, AbstractTree],
    untraced: UntracedStages,
    options: StepOptions,
    integers: Mapping[int, Tensor],
) -> Lowered:
    """Lower a program to instructions.

    Args:
        program: the program.
        context: the facts of a step that rules need.
        inputs: the abstract trees of its inputs.
        untraced: the stages to run under plain autograd; those whose shapes depend on data are added.
        options: how the step was built.
        integers: the integer tensors of the batch, by storage number.

    Raises:
        Untraceable: something in it cannot be known before it runs.
    """
    untraced.stages |= {**stages_with_data_sizes(context.model), **untraced.stages}
    ops = ops_to_lower(program, context)
    refuse_unknown_rows(program, context.model)
    with building():
        # 1. Shapes and memory of every value; stages are traced and cut on the way.
        shapes = infer_shapes(ops, context, inputs, untraced, options, integers)
        # 2. Memory that no instruction may write: arguments (unless donated), constants of stages, and the loss's
        #    cotangent, which all microbatches of one weight share.
        leaves = chain.from_iterable(abstract.leaves for abstract in inputs.values())
        external_storages = {leaf.storage for leaf in leaves if isinstance(leaf, Fact)}
        external_storages |= {
            cut.graph.facts[name].storage for cut in shapes.cuts.values() for name in cut.graph.constants
        }
        external_storages.add(shapes.loss_storage)
        # 3. What may happen in place. Updates come last: they look at sums in the memory that folds give them.
        outputs = {end.value for end in program.outputs}
        folds = find_folds(ops, outputs, shapes, external_storages, options.compile)
        overwritten = find_overwritten(ops, outputs, folds.trees, external_storages, options.donate)
        # 4. The instructions, and then the numbers of their slots.
        return _Lowering(ops, shapes, folds, external_storages, overwritten, options).assemble(program, inputs)


class _NamedInstruction(NamedTuple):
    """An instruction that still names its slots: by values and constants."""

    run: Callable[..., Any]
    reads: Sequence[Any]
    shared: tuple[int, ...]
    ops: tuple[Op, ...]
    written_values: tuple[Value, ...]
    dead: tuple[Value, ...]


class _Lowering:
    """Makes the instructions of a program whose shapes are known, and then numbers their slots."""

    def __init__(
        self,
        ops: Sequence[Op],
        shapes: Shapes,
        folds: Folds,
        external_storages: Collection[int],
        overwritten: Overwritten,
        options: StepOptions,
    ) -> None:
        self.ops, self.shapes, self.folds = ops, shapes, folds
        self.external_storages, self.compile = external_storages, options.compile
        self.trees, self.overwritten = {**overwritten.trees}, overwritten
        self.written_params = {value for op in ops for value in op.writes if value.name == "params"}
        self.transferred = {*self.written_params, *shapes.copies.source_by_copy}
        self.kernels, self.casts = kernel_settings() if options.runs else None, autocast_settings()
        self.constants: dict[Any, Leaves] = {}
        self.first_drawing_stage: int | None = None
        self.to_compile: dict[Op, Kernel] = {}
        self.parts: dict[Op, SizedGraph] = {}
        self.runs: dict[tuple[Code, SizeNumbers], Callable[..., Any]] = {}
        fully_read = {value for op in ops if op.kind in TRANSFERS or shapes.is_untraced(op) for value in op.reads}
        traced_reads = {value for op in ops if not shapes.is_untraced(op) for value in op.reads}
        untraced_writes = {value for op in ops if shapes.is_untraced(op) for value in op.writes}
        # A value that only stages without a trace read may have another shape in each step: no code relies on it.
        self.unconstrained = frozenset(untraced_writes - traced_reads).difference(folds.outputs)
        self.partial_gradients = partial_gradients(ops, shapes.untraced.stages)
        self.sparse_gradients = sparse_gradients(ops, shapes.untraced.stages)
        # Of parameters that a GATHER or RECV writes, graphs may read a few leaves only, and the others need not travel.
        # Whoever reads a value whole (a transfer, a stage without a trace) needs all of them.
        self.read_leaves: dict[Value, set[int]] = {value: set() for value in self.written_params - fully_read}

    def assemble(self, program: Program, inputs: Mapping[Value, AbstractTree]) -> Lowered:
        # 1. The part of its stage's graph that each op runs, and what the parts compute from parameters alone.
        recipes = {
            position: self.recipe_of(position, op)
            for position, op in enumerate(self.ops)
            if op.kind in "FRBIW" and not self.shapes.is_untraced(op)
        }
        parts = {position: self.part_of(position, recipe) for position, recipe in recipes.items()}
        hoists, hoists_by_first_reader = find_hoists(self.ops, self.shapes.cuts, self.shapes.numbers, parts)
        # 2. The instructions, a HOIST before its first reader.
        unnumbered = list[_NamedInstruction]()
        for position, op in enumerate(self.ops):
            if position in hoists_by_first_reader:
                unnumbered.append(self.hoist_instruction(hoists_by_first_reader[position]))
            if position in parts:
                hoist = hoists.get(position)
                unnumbered.append(self.graph_instruction(position, recipes[position], parts[position], hoist))
            elif position not in self.folds.folded:
                unnumbered.append(self.instruction_of(position, op))
        # 3. The numbers of slots.
        written_names = dict.fromkeys(chain.from_iterable(instruction.written_values for instruction in unnumbered))
        instruction_reads = chain.from_iterable(instruction.reads for instruction in unnumbered)
        input_values = (program_input.value for program_input in program.inputs)
        # Names that no instruction writes come first: they are full when the first one starts. Then what instructions
        # write, in their order, so that appending to the slots puts each result where its readers look.
        names = dict.fromkeys(chain(input_values, self.constants, instruction_reads))
        slots = {
            name: slot
            for slot, name in enumerate((*(name for name in names if name not in written_names), *written_names))
        }

        def slots_of(names: Iterable[Any]) -> tuple[int, ...]:
            return tuple(map(slots.__getitem__, names))

        traces = self.shapes.calls.traces
        return Lowered(
            slots=slots,
            constants={slots[name]: leaves for name, leaves in self.constants.items()},
            instructions=[
                Instruction(run, slots_of(reads), shared, slots_of(written_names), ops, written_names, dead)
                for run, reads, shared, ops, written_names, dead in unnumbered
            ],
            trees=self.trees,
            external_storages=frozenset(self.external_storages),
            donated_storages=self.overwritten.donated_storages,
            first_drawing_stage=self.first_drawing_stage,
            kernels=self.to_compile,
            is_collective=self.is_collective(inputs),
            graphs=traces.graphs(),
            parts=self.parts,
            read_leaves=self.read_leaves,
            is_filled=traces.fill_count > 0 and traces.trace_count == 0,
            is_closed=traces.is_closed,
        )

    def is_collective(self, inputs: Mapping[Value, AbstractTree]) -> bool:
        """Whether stages talk to other processes: in a trace, by DTensors, or as an exchange without a trace."""
        functions = [self.shapes.context.model.stages[n].forward for n in self.shapes.untraced.stages]
        leaves = chain.from_iterable(abstract.leaves for abstract in inputs.values())
        return (
            any(graph.is_collective for graphs in self.shapes.calls.traces.graphs().values() for graph, _ in graphs)
            or any(isinstance(leaf, Fact) and leaf.aval.sharding for leaf in leaves)
            or any(isinstance(function, CollectiveStage) and function.size > 1 for function in functions)
        )

    def instruction_of(self, position: int, op: Op) -> _NamedInstruction:
        if self.shapes.is_untraced(op):
            trees = [[self.trees[value] for value in values] for values in (op.reads, op.writes)]
            keyed = (KEY,) if op.kind in "FRBI" else ()  # a backward may run the forward once more
            allowed = self.unconstrained, self.partial_gradients, self.sparse_gradients
            run = partial(under_autograd, op, *trees, *allowed, self.shapes.context, self.casts)
            return self.named_instruction(position, run, (*op.reads, *keyed), op.writes)
        run = self.rule_of(position, op)
        if op.kind == "NORM" and not self.partial_gradients.isdisjoint(op.reads):
            run = norm_of_partial(run, op.reads, self.trees, self.partial_gradients)
        return self.named_instruction(position, run, op.reads, op.writes)

    def named_instruction(
        self,
        position: int,
        run: Callable[..., Any],
        reads: Sequence[Any],
        writes: Sequence[Value],
        extra: Sequence[Op] = (),
        dead_hoisted: Sequence[Value] = (),
    ) -> _NamedInstruction:
        dead = (*self.folds.dead.get(position, ()), *dead_hoisted)
        # The last reader of a list empties it. Earlier readers empty a copy of the list, not of its tensors.
        shared = tuple(k for k, name in enumerate(reads) if name not in dead and name[0] not in _KEPT_ALL_STEP)
        return _NamedInstruction(run, reads, shared, (self.ops[position], *extra), tuple(writes), dead)

    def part_of(self, position: int, recipe: Recipe) -> Graph:
        """Return the part of its stage's graph that an op runs; ops with one cut and recipe share it."""
        cut = self.shapes.cuts[self.ops[position][1:4]]
        return cut.graph.compute_once((cut, recipe), lambda: part_of_cut(cut, recipe))

    def hoist_instruction(self, hoist: Hoist) -> _NamedInstruction:
        """Return the instruction that computes the hoisted values of a version of parameters."""
        op = hoist.op
        self.trees |= dict(hoist.trees(self.trees))
        for value, leaf_names in zip(op.reads, hoist.graph.reads.values(), strict=True):
            if value in self.read_leaves:
                self.read_leaves[value].update(k for k, name in enumerate(leaf_names) if name is not None)
        return _NamedInstruction(hoist.run, op.reads, (), (op,), op.writes, ())

    def graph_instruction(self, position: int, recipe: Recipe, part: Graph, hoist: Hoist | None) -> _NamedInstruction:
        """Return the instruction that runs a part of a stage's graph.

        The graph reads and writes labels, such as "x" and "y". Here each label gets its value of this microbatch.
        """
        op = self.ops[position]
        cut, numbers, groups = self.shapes.cuts[op[1:4]], self.shapes.numbers[op[1:4]], hoist and hoist.groups
        # 1. The code. Ops with one part and equal groups of hoisted values, such as most microbatches, share it, and
        #    those of equal sizes share a function.
        example, name = SizedGraph(part, numbers), f"{op.kind} of stage {op.stage}"
        code = part.compute_once(
            (cut, groups), lambda: generate_code(example, cut.values_of_params, hoist, self.compile, name)
        )
        if (code, numbers) not in self.runs:
            self.runs[code, numbers] = code.with_numbers(numbers)
        run, graph = self.runs[code, numbers], code.graph
        self.parts[op] = SizedGraph(graph, numbers)
        if isinstance(run, Kernel):
            self.to_compile[op] = run
        # 2. What it reads and writes. A folded ADD reads and writes the label of its sum.
        adds = self.folds.sums.adds.get(position, {})
        add_by_label = {total_of(label_of(gradient)): self.ops[add] for gradient, add in adds.items()}
        read_by_label = self.names_of_reads(op, graph, hoist)
        read_by_label |= {label: add.reads[0] for label, add in add_by_label.items()}
        written_by_label = {label_of(value): value for value in self.folds.direct_writes(position)}
        written_by_label |= {label: add.writes[0] for label, add in add_by_label.items()}
        reads = [read_by_label[label] for label in graph.reads]
        # 3. What goes around the code: inputs that it computes from what it reads, and the lists that it drops.
        dead_hoisted = [*hoist.values_read_last(position)] if hoist else []
        run = self.code_with_computed_inputs(op, run, graph)
        run, reads = self.code_with_drops(position, run, reads, dead_hoisted)
        writes = [written_by_label[label] for label in graph.writes]
        return self.named_instruction(position, run, reads, writes, [*add_by_label.values()], dead_hoisted)

    def names_of_reads(self, op: Op, graph: Graph, hoist: Hoist | None) -> dict[str, Any]:
        """Return the name of a slot for each label that the graph of an op reads, except its sums."""
        name_by_label: dict[str, Any] = {**reads_by_label(op)}
        if "dloss" in graph.reads:
            scale = _loss_scale_of(op)
            name_by_label["dloss"] = self.weight_constant(op) if scale is None else scale
        if GENERATORS in graph.reads:
            name_by_label[GENERATORS] = KEY
        if hoist:
            name_by_label |= {hoisted_label(value.port): value for value in hoist.op.writes}
        return name_by_label

    def code_with_computed_inputs(self, op: Op, run: Callable[..., Any], graph: Graph) -> Callable[..., Any]:
        """Return an op's code, with the loss's cotangent in place of a loss scale, and generators in place of a key."""
        labels = [*graph.reads]
        if "dloss" in labels and _loss_scale_of(op) is not None:
            run = with_scale(run, labels.index("dloss"), _full_tensor(*self.loss_cotangent(op)))
        if GENERATORS in labels:
            context, stage = self.shapes.context, op.stage or 0
            self.first_drawing_stage = stage if self.first_drawing_stage is None else self.first_drawing_stage
            coordinates = (stage, context.number(op), op.slice)
            devices, step = graph.generator_devices, context.step_of(op)
            run = with_generators(run, labels.index(GENERATORS), devices, coordinates, step)
        return run

    def code_with_drops(
        self, position: int, run: Callable[..., Any], reads: Sequence[Any], dead_hoisted: Sequence[Value]
    ) -> tuple[Callable[..., Any], Sequence[Any]]:
        """Return an op's code that empties the lists that code keeps and that it is the last to read, and its reads."""
        # Code does not empty lists that serve many calls. Those of a step's arguments are read all step long; those of
        # hoisted values, and of parameters that a RECV, a GATHER or an UPDATE writes, are dropped by their last reader.
        # Code reads hoisted values in place of parameters: it reads these only to drop them.
        dead = {*self.folds.dead.get(position, ())}
        dead_params = [value for value in self.ops[position].reads if value in dead & self.written_params]
        all_reads, dropped_values = [*reads, *dead_params], dead & self.transferred | {*dead_hoisted}
        dropped = [k for k, value in enumerate(all_reads) if value in dropped_values]
        return (with_drops(run, len(reads), dropped), all_reads) if dropped else (run, reads)

    def recipe_of(self, position: int, op: Op) -> Recipe:
        copied_leaves = self.folds.sums.copied
        return Recipe(
            kind=op.kind if op.kind in "BIW" else "F",
            labels=tuple(map(label_of, op.writes)),
            adds=tuple(map(label_of, self.folds.sums.adds.get(position, {}))),
            copied=tuple((label_of(value), index) for value in op.writes for index in copied_leaves.get(value, ())),
            overwrites=self.folds.overwrites.get(position, ()),
            kernels=self.kernels,
            compile=self.compile,
        )

    def weight_constant(self, op: Op) -> Any:
        """Return the slot name of the loss's cotangent, a constant for each weight of a microbatch."""
        name = ("weight", *self.loss_cotangent(op))
        if name not in self.constants:
            self.constants[name] = [_full_tensor(*name[1:])]
        return name

    def loss_cotangent(self, op: Op) -> tuple[float, Aval]:
        """Return the number that fills the loss's cotangent, and the aval of the loss.

        The number is the microbatch's weight in the mean, times a static loss scale.
        """
        weight = 1.0
        if self.shapes.context.model.reduction == "mean":
            weight = next((self.trees[value].leaves[0] for value in op.reads if value.name == "w"), 1.0)
        loss_aval = self.shapes.calls.loss_aval(self.shapes.runs[op[1:4]])
        return scaled_weight(weight, self.shapes.context.loss_scale, loss_aval.dtype), loss_aval

    def rule_of(self, position: int, op: Op) -> Callable[..., Sequence[Leaves]]:
        """Return the function of an op that runs no graph: a fast form where there is one, else the walk's rule."""
        context, trees = self.shapes.context, [self.trees[value] for value in op.reads]
        if op.kind == "GATHER":
            return partial(cast_transfer, make_cast(op))
        if op.kind in TRANSFERS:
            if op.options:
                return partial(cast_transfer, make_rounding(op))
            return receive_locally if op.kind == "RECV" else send_locally
        if op.kind == "UPDATE":
            return make_update(op, context, self.trees, self.overwritten.leaf_indices[position])
        if op.kind == "ADD":
            return add_in_place if position in self.folds.sums.in_place else add
        if op.kind == "SPLIT" and "presplit" not in dict(op.options):
            slices = make_split(op, self.trees)
            if slices is not None:
                return slices
        containers = [*map(make_unflatten, trees)]
        run = partial(run_rule, op, containers, context, self.casts)
        # MERGE takes a leaf that is one object in all microbatches for a constant. A number of the caller that a stage
        # hands on would be one, so hand in distinct objects.
        if op.kind == "MERGE":
            facts = (leaf for abstract in trees for leaf in abstract.leaves if isinstance(leaf, Fact))
            if any(leaf.storage in self.external_storages for leaf in facts if not leaf.aval.shape):
                return lambda *lists: run(*map(as_distinct, lists))
        return run


def _loss_scale_of(op: Op) -> Value | None:
    return next((value for value in op.reads if value.name == "scale"), None)


def _full_tensor(weight: float, aval: Aval) -> Tensor:
    return torch.full(aval.shape, weight, dtype=aval.dtype, device=aval.device)
