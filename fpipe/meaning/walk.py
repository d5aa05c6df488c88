"""Run a program by walking down its list, each stage under plain autograd: the definition of what a program means."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import Inputs, Residuals
from fpipe.meaning.devices import BATCH, brought, check_at_home, homes_of, moves_of
from fpipe.meaning.inputs_and_results import bind_inputs, check_inputs, collect_results, context_of
from fpipe.meaning.meaning import RULES, batch_of
from fpipe.meaning.recorder import RecordedRow, Recorder, storages
from fpipe.meaning.single_device.batches import refuse_unloaded
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Step, StepInputs, StepOptions
from fpipe.model import Model
from fpipe.program import Op, Program, Value
from fpipe.transforms.free import last_uses


def walk(
    program: Program,
    model: Model,
    options: StepOptions,
    *,
    recorded: Program | None = None,
    see: Callable[[Value, Any], None] | None = None,
    devices: Sequence[torch.device] = (),
) -> Step:
    """Make a pure step that walks the program in this process, op by op; `recorded` is what its timeline is about."""
    for op in program.ops:
        for part in op.parts or (op,):
            if part.kind not in RULES:
                raise ValueError(
                    f"{part.cell}: kind {part.kind} has no meaning here; add it by fpipe.register_meaning."
                )
    kept = {end.value for end in program.outputs}
    drops: list[list[Value]] = [[] for _ in program.ops]  # by op, the values that nobody reads after it
    for value, position in last_uses(program).items():
        if value not in kept:
            drops[position].append(value)
    rows = [RecordedRow((op,), op.writes, dead) for op, dead in zip(program.ops, drops, strict=True)]
    moves, homes = moves_of(program, devices), homes_of(program, devices)

    def run(inputs: StepInputs) -> Result:
        check_inputs(program, model, inputs)
        if not devices:
            refuse_unloaded(inputs.batch, inputs.params, inputs.state)
        batch, sizes = batch_of(program, inputs.batch)
        inputs = replace(inputs, batch=batch)
        context = context_of(program, model, inputs.params, sizes)
        context = replace(
            context,
            watch_saved=recorded is not None,
            loss_scale=options.loss_scale,
            key=inputs.key,
            moves=moves,
        )
        values = bind_inputs(program, model, inputs)
        for value, home in homes.items():
            check_at_home(value, tree.leaves(values[value]), home)
            if value.name in BATCH:
                values[value] = tree.tree_map(partial(brought, home=home), values[value])
        recorder = Recorder(recorded, rows) if recorded else None
        notes = recorder.begin(tree.leaves([*values.values()])) if recorder else None
        for number, (op, dead) in enumerate(zip(program.ops, drops, strict=True)):
            try:
                started = time.perf_counter()
                results = RULES[op.kind](op, [values[value] for value in op.reads], context)
                if options.check_finite:
                    refuse_infinite(op, zip(op.writes, results, strict=True))
            except Exception as error:
                error.add_note(f"in {op.cell}: {place_of(op, model)}")
                raise
            values.update(zip(op.writes, results, strict=True))
            if see:
                for value in op.writes:
                    see(value, values[value])
            if notes:
                notes.note(number, [leaves_of(values[value]) for value in op.writes], started)
            for value in dead:
                del values[value]
        taken = {*storages(tree.leaves(inputs.trees))}
        whole = collect_results(program, model, inputs, values, partial(own_leaf, taken))
        return Result(**whole, timeline=recorder.timeline(notes) if recorder and notes else None)

    return Step(program, run)


def place_of(op: Op, model: Model) -> str:
    """Where an op stands, in words: stage, microbatch, rank."""
    words = [] if op.stage is None else [model.who(op.stage)]
    words += [] if op.microbatch is None else [f"microbatch {op.microbatch}"]
    return ", ".join([*words, f"rank {op.rank}"])


def refuse_infinite(op: Op, written: Iterable[tuple[Value, Any]]) -> None:
    """An error at the first value with NaN or an infinite number in it, residuals aside."""
    for value, found in written:
        for leaf in (
            () if isinstance(found, Residuals | Inputs) or value.name in ("res", "wres") else tree.leaves(found)
        ):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                raise FloatingPointError(f"{op.cell} wrote {value} with NaN or infinite numbers.")


def own_leaf(taken: set[Hashable], leaf: Any) -> Any:
    """A result that shares memory with nothing the caller has: an in-place change of one would change the other."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    leaf = leaf.detach()
    dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
    if not dense or not taken.isdisjoint(storages([leaf])):
        leaf = leaf.clone(memory_format=torch.contiguous_format)
    taken.update(storages([leaf]))
    return leaf


def leaves_of(found: Any) -> list[Any]:
    """The leaves of a value, those that autograd keeps for it among them."""
    return [leaf for one in tree.leaves(found) for leaf in _kept(one)]


def _kept(one: Any) -> list[Any]:
    if isinstance(one, Inputs):
        return tree.leaves([*one.args])
    return [*one.saved, *one.outputs, one.loss] if isinstance(one, Residuals) else [one]
