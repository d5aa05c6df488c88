"""Prepare a program for one signature of a step's arguments, and run its steps.

params, batch, state        --> slots --> instructions --> slots -->        Result
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.graphs.compiling.inductor import compile_all
from fpipe.meaning.devices import find_moves, input_homes
from fpipe.meaning.inputs_and_results import check_inputs, make_context
from fpipe.meaning.meaning import check_and_measure_batch
from fpipe.meaning.purity.ambient import raw_ops
from fpipe.meaning.purity.sharded import local_shard
from fpipe.meaning.recorder import Notes, RecordedRow, Recorder
from fpipe.meaning.single_device.label_means import MEAN, weighs_unequally
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs, StepOptions, warn_of_padding
from fpipe.model import MeanLabels, Model
from fpipe.program import Program, Value
from fpipe.runtimes.lowering.host_lanes import lanes_of, made_async
from fpipe.runtimes.lowering.lane import See, Watch
from fpipe.runtimes.lowering.lower import lower
from fpipe.runtimes.lowering.lowered import AbstractTree, Lowered, unflatten_value
from fpipe.runtimes.lowering.rank_part import RankPart, Slots, Tap
from fpipe.runtimes.lowering.signature import refuse_overriding_tensors
from fpipe.runtimes.lowering.slots import (
    ProcessContext,
    build_entrance,
    build_exit,
    fact_of_input,
    input_leaves_of,
    nets_of,
)
from fpipe.runtimes.lowering.stage_calls import UntracedStages
from fpipe.torch_internals import storage_of

_MEANS_OVER_LABELS: Any = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
_DIVIDE, _DIFFER = torch.ops.aten.div.Tensor, torch.ops.aten.ne.Scalar
_TARGETS = ("t", "target")
DONATED_PARAMS_OVERWRITTEN = (
    "params and opt were donated to this step, and are overwritten in part: load them from a checkpoint."
)


class PreparedStep:
    """A program lowered for one signature, which runs steps from their arguments to their results.

    Attributes:
        audits_by_number: whether audits take no regard of time, so that all ranks audit in the same steps.
        replay_seconds: how long the last audited replay of a graph took; None if steps are no replays.
    """

    audits_by_number = False
    replay_seconds: float | None = None

    def __init__(
        self,
        program: Program,
        model: Model,
        inputs: StepInputs,
        untraced: UntracedStages,
        options: StepOptions,
        process: ProcessContext,
    ) -> None:
        # 1. What the step is handed: its leaves, bound to the inputs of the program.
        check_inputs(program, model, inputs)
        refuse_overriding_tensors(model, inputs.params, inputs.batch, untraced.stages)
        whole_batch, sizes = check_and_measure_batch(program, inputs.batch)
        homes, storages = input_homes(program, process.devices), dict[int, int]()
        input_leaves = input_leaves_of(program, model, inputs, process, homes, storages)
        # 2. The instructions.
        context = replace(
            make_context(program, model, inputs.params, sizes, process.replica),
            watch_saved=options.record,
            loss_scale=options.loss_scale,
            moves=find_moves(program, process.devices),
            shared=input_leaves.shared,
            capturable=options.graph,
        )
        if process.first_microbatch is not None:
            context = replace(context, first_microbatch=process.first_microbatch)
        input_trees = {**input_leaves.trees, **_constants_of(model, storages)}
        batch_leaves = [leaf for leaf in tree.leaves(inputs.batch) if isinstance(leaf, Tensor) and not leaf.is_meta]
        batch_leaves = [leaf for leaf in batch_leaves if not (leaf.is_floating_point() or leaf.is_complex())]
        integers = {storages[storage_of(leaf)]: leaf for leaf in batch_leaves if storage_of(leaf) in storages}
        lowered = lower(program, context, input_trees, untraced, options, integers)
        self.program, self.model, self.options = program, model, options
        self.context, self.untraced, self.lowered = context, untraced, lowered
        self.leaf_devices, self.shared = input_leaves.leaf_devices, input_leaves.shared
        self.instructions, self.trees = lowered.instructions, lowered.trees
        self.weighed_rows = sum(sizes) if model.reduction == "mean" else 0
        # 3. The ways into the slots and out of them, and the lanes of copies next to the computation.
        self.entrance = build_entrance(lowered, model, input_leaves, homes)
        merged = replace(inputs, batch=whole_batch)
        # Memory of a graph is written again by its next replay.
        owns_memory = not (untraced.stages or options.graph)
        self.exit = build_exit(self._program_with_outputs(program), model, lowered, merged, owns_memory)
        self.lanes = lanes_of(self.instructions, lowered.trees, process.devices)
        self.part = RankPart(made_async(self.instructions, self.lanes), model, lanes=[*self.lanes.values()])
        self.recorder: Recorder | None = None
        self.steps = self.audits = 0
        self._is_compiled = False
        self.net_outline: Any = None  # what the Python of the net called in the first audit
        self.next_audit = 0  # the number of the step that is audited next
        # 4. Graphs hold on to tensors of the model. A step refuses to run when a module has other ones since.
        graph_tensors = _graph_tensors(lowered, model)
        # Kernels read a number on the host when they are queued: it may have changed since a step was captured.
        self.host_tensors = [leaf for leaf in graph_tensors if isinstance(leaf, Tensor) and leaf.device.type == "cpu"]
        self.homes = [] if model.fingerprint is None else model.fingerprint.slots_of(graph_tensors)
        synchronize((*graph_tensors, *_constant_leaves(lowered)))

    @property
    def is_compile_due(self) -> bool:
        """Whether a new length has come a second time: only then is it worth the minutes of a compiler."""
        return self.options.compile and not self._is_compiled and self.steps == 1

    def continue_audits(self, previous: Sequence[PreparedStep]) -> None:
        """Count audits on from the step of other sizes before it, whose traces this one fills."""
        for step in previous:
            self.steps, self.audits, self.next_audit = step.steps, step.audits, step.next_audit

    def compile(self) -> None:
        """Compile the kernels of the instructions that this process runs, unless they are compiled."""
        self._is_compiled = True
        compile_all(
            self.lowered.kernels[instruction.ops[0]]
            for instruction in self.part.instructions
            if instruction.ops[0] in self.lowered.kernels
        )

    def run(
        self,
        leaves: Sequence[Any],
        inputs: StepInputs,
        *,
        recorded: Program | None,
        see: See | None = None,
        tap: Tap | None = None,
    ) -> Result:
        """Run one step on the leaves of its arguments.

        Args:
            leaves: the leaves of all arguments.
            inputs: the arguments.
            recorded: the program that the timeline shows, if the step is recorded.
            see: a function to call with each value and its leaves.
            tap: a function that replaces those of the instructions, for this step.
        """
        check_finite = self.options.check_finite
        self.check_call(inputs)
        leaves = [*map(local_shard, leaves)]
        with raw_ops():
            slots = self.entrance.fill(leaves, inputs.key)
            notes = self._notes(recorded, leaves, slots) if recorded else None
            device = next(iter(notes.devices), None) if notes else None
            watch = Watch(notes, check_finite, see, device)
            self.context.overwrites = False
            try:
                self.execute(slots, watch if notes or check_finite or see else None, tap)
            except BaseException as error:
                if self.context.overwrites and self.lowered.donated_storages:
                    error.add_note(DONATED_PARAMS_OVERWRITTEN)
                raise
            try:
                results = self.exit.results(slots, inputs.state)
            except BaseException as error:
                error.add_note("in the results of the step")
                raise
        return Result(**results, timeline=self.recorder.timeline(notes) if self.recorder and notes else None)

    def check_call(self, inputs: StepInputs) -> None:
        """Raise an error if a tensor of a module that graphs hold has been replaced; warn of padding, once."""
        if self.model.fingerprint is not None:
            self.model.fingerprint.refuse_rebound(self.homes)
        known_labels = self.model.labels
        for labels in ([known_labels] if known_labels else self._labels_of_loss()) if inputs.warns else ():
            warn_of_padding(self.program, self.model, inputs.batch, labels)

    def _notes(self, recorded: Program, leaves: Sequence[Any], slots: Slots) -> Notes:
        """Begin the notes of a step; memory of its arguments and of constants does not count as the step's."""
        if self.recorder is None:
            self.recorder = Recorder(
                recorded, [RecordedRow(i.ops, i.written_values, i.dead) for i in self.instructions]
            )
        constants = [leaf for slot, _ in self.entrance.constants for leaf in slots[slot]]
        return self.recorder.begin([*leaves, *constants, *_constant_leaves(self.lowered)])

    def _labels_of_loss(self) -> list[MeanLabels]:
        """Return which leaves of the target are labels of a mean in the trace of the loss."""
        labels: list[MeanLabels] = []
        ops = (instruction.ops[0] for instruction in self.instructions)
        # A microbatch's target, since a batch may be split already, or be one of several.
        target = next((value for op in ops if op.kind == "F" for value in op.reads if value.name in _TARGETS), None)
        paths = [] if target is None else tree.paths(_indices_like(self.trees[target]))
        for graph, _ in self.lowered.graphs.get(None, ()):
            nodes = {node.name: node for node in graph.nodes}
            index_by_name = {name: index for index, name in enumerate(graph.reads.get("target", ()))}
            # A mean of the user's divides by the number of labels that are not of a class.
            divisors = graph.ops_needed_by(node.args[1] for node in graph.nodes if node.op is _DIVIDE)
            for node in graph.nodes:
                if node.op in _MEANS_OVER_LABELS and node.args[3] == MEAN:
                    name, weight, _, ignored = node.args[1:5]
                    weighs_classes = weighs_unequally(graph.constants.get(weight, weight))
                elif node.op is _DIFFER and node.name in divisors:
                    name, ignored, weighs_classes = *node.args, False
                else:
                    continue
                # Labels are flattened and cast on their way, by ops whose first argument they are.
                while name in nodes and nodes[name].args:
                    name = nodes[name].args[0]
                if name in index_by_name:
                    path, _ = paths[index_by_name[name]]
                    labels.append(MeanLabels("target", path, ignored, weighs_classes))
        return labels

    @property
    def rank_parts(self) -> Sequence[RankPart]:
        """Return the parts of ranks that run in this process."""
        return [self.part]

    def execute(self, slots: Slots, watch: Watch | None = None, tap: Tap | None = None) -> None:
        """Run the instructions on filled slots."""
        (self.part if tap is None else self.part.with_tap(tap)).run(slots, watch)

    def _program_with_outputs(self, program: Program) -> Program:
        return program


def _indices_like(abstract: AbstractTree) -> Any:
    return unflatten_value(abstract, range(len(abstract.leaves)))


def _constants_of(model: Model, storages: dict[int, int]) -> dict[Value, AbstractTree]:
    constants_by_value = {Value("const", number): net.constants() for number, net in nets_of(model).items()}
    return {
        value: AbstractTree(tuple(fact_of_input(leaf, storages) for leaf in leaves))
        for value, leaves in constants_by_value.items()
        if leaves
    }


def _constant_leaves(lowered: Lowered) -> list[Any]:
    return [leaf for leaves in lowered.constants.values() for leaf in leaves]


def _graph_tensors(lowered: Lowered, model: Model) -> list[Any]:
    constants = (leaf for graphs in lowered.graphs.values() for graph, _ in graphs for leaf in graph.constants.values())
    return [*constants, *(leaf for net in nets_of(model).values() for leaf in net.literal_constants())]


def synchronize(leaves: Iterable[Any]) -> None:
    """Wait until tensors are computed, since steps read them on any stream."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    for device in devices - {torch.device("cpu"), torch.device("meta")}:
        torch.accelerator.synchronize(device)
