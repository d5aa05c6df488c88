"""Prepare a program for one signature of a step's arguments: what runs, and the ways into its slots and out of them.

params, batch, state        --> slots --> instructions --> slots -->        Result
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fpipe.graphs.compiling.inductor import compile_all
from fpipe.meaning.devices import homes_of, moves_of
from fpipe.meaning.inputs_and_results import check_inputs, context_of
from fpipe.meaning.meaning import batch_of
from fpipe.meaning.purity.ambient import raw_ops
from fpipe.meaning.purity.sharded import local_of
from fpipe.meaning.recorder import Notes, RecordedRow, Recorder
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Program, Value
from fpipe.runtimes.lowering.host_lanes import lanes_of, made_async
from fpipe.runtimes.lowering.lane import See, Watch
from fpipe.runtimes.lowering.lower import lower
from fpipe.runtimes.lowering.lowered import AbstractTree, Lowered
from fpipe.runtimes.lowering.rank_part import RankPart, Slots, Tap
from fpipe.runtimes.lowering.slots import ProcessContext, entrance_of, exit_of, fact_of, handed_by, nets_of
from fpipe.runtimes.lowering.stage_calls import Untraced

GONE = "params and opt were donated to this step, and are overwritten in part: take them from where they were saved."


class Prepared:
    """A program lowered for one signature, with the way from a step's arguments into slots and out to its results."""

    def __init__(
        self,
        program: Program,
        model: Model,
        inputs: StepInputs,
        untraced: Untraced,
        options: StepOptions,
        process: ProcessContext,
    ) -> None:
        check_inputs(program, model, inputs)
        whole, sizes = batch_of(program, inputs.batch)
        homes, storages = homes_of(program, process.devices), dict[int, int]()
        handed = handed_by(program, model, inputs, process, homes, storages)
        context = replace(
            context_of(program, model, inputs.params, sizes, process.replica),
            watch_saved=options.record,
            loss_scale=options.loss_scale,
            moves=moves_of(program, process.devices),
            shared=handed.shared,
        )
        known = {**handed.trees, **_constants_of(model, storages)}
        lowered = lower(program, context, known, untraced, options)
        self.program, self.model, self.options = program, model, options
        self.context, self.untraced, self.lowered = context, untraced, lowered
        self.at_home, self.shared = handed.at_home, handed.shared
        self.instructions, self.trees = lowered.instructions, lowered.trees
        self.weighed_rows = sum(sizes) if model.reduction == "mean" else 0
        self.entrance = entrance_of(lowered, model, handed, homes)
        merged = replace(inputs, batch=whole)
        self.exit = exit_of(self._asked(program), model, lowered, merged, not untraced.stages)
        self.lanes = lanes_of(self.instructions, lowered.trees, process.devices)
        self.part = RankPart(made_async(self.instructions, self.lanes), model, lanes=[*self.lanes.values()])
        self.recorder: Recorder | None = None
        self.steps = self.audits = 0  # how many have run
        held = _held_by_graphs(lowered, model)
        self.homes = [] if model.held is None else model.held.homes_of(held)
        _wait_for((*held, *_filled(lowered)))

    def compile(self) -> None:
        """Compile what this process runs of it."""
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
        """Run one step on the leaves of its arguments; `recorded` is the program that its timeline is about."""
        check_finite = self.options.check_finite
        if self.model.held is not None:
            self.model.held.refuse_bound_anew(self.homes)
        leaves = [*map(local_of, leaves)]
        with raw_ops():
            slots = self.entrance.filled(leaves, inputs.key)
            notes = self._notes(recorded, leaves, slots) if recorded else None
            device = next(iter(notes.devices), None) if notes else None
            watch = Watch(notes, check_finite, see, device)
            self.context.overwrites = False
            try:
                self._execute(slots, watch if notes or check_finite or see else None, tap)
            except BaseException as error:
                if self.context.overwrites and self.lowered.given_up:
                    error.add_note(GONE)
                raise
            try:
                whole = self.exit.results(slots, inputs.state)
            except BaseException as error:
                error.add_note("in the results of the step")
                raise
        return Result(**whole, timeline=self.recorder.timeline(notes) if self.recorder and notes else None)

    def _notes(self, recorded: Program, leaves: Sequence[Any], slots: Slots) -> Notes:
        """Begin the notes of a step, in which the leaves that it is handed and those that stages hold do not count."""
        if self.recorder is None:
            self.recorder = Recorder(recorded, [RecordedRow(i.ops, i.written, i.dead) for i in self.instructions])
        held = [leaf for slot, _ in self.entrance.held for leaf in slots[slot]]
        return self.recorder.begin([*leaves, *held, *_filled(self.lowered)])

    @property
    def rank_parts(self) -> Sequence[RankPart]:
        """The parts that run in this process."""
        return [self.part]

    def _execute(self, slots: Slots, watch: Watch | None, tap: Tap | None) -> None:
        """Run all instructions."""
        (self.part if tap is None else self.part.tapped(tap)).run(slots, watch)

    def _asked(self, program: Program) -> Program:
        """Return the program whose outputs this process wants."""
        return program


def _constants_of(model: Model, storages: dict[int, int]) -> dict[Value, AbstractTree]:
    held = {Value("const", number): net.constants() for number, net in nets_of(model).items()}
    return {
        value: AbstractTree(tuple(fact_of(leaf, storages) for leaf in leaves))
        for value, leaves in held.items()
        if leaves
    }


def _filled(lowered: Lowered) -> list[Any]:
    return [leaf for leaves in lowered.constants.values() for leaf in leaves]


def _held_by_graphs(lowered: Lowered, model: Model) -> list[Any]:
    """Return the tensors that the graphs of stages have in them."""
    constants = (leaf for graphs in lowered.graphs.values() for graph in graphs for leaf in graph.constants.values())
    return [*constants, *(leaf for net in nets_of(model).values() for leaf in net.literals_now())]


def _wait_for(leaves: Iterable[Any]) -> None:
    """Wait until tensors are computed: steps read them on any stream."""
    devices = {leaf.device for leaf in leaves if isinstance(leaf, Tensor)}
    for device in devices - {torch.device("cpu"), torch.device("meta")}:
        torch.accelerator.synchronize(device)
