"""Run a program by walking down its list of ops, each stage under plain autograd: this defines its meaning.

A program of several replicas is walked on all of them at once, op by op (`lockstep`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import Residuals, StageInputs, StepContext
from fpipe.meaning.devices import BATCH, bring_batch_leaf, check_at_home, find_moves, input_homes
from fpipe.meaning.inputs_and_results import bind_inputs, check_inputs, collect_results, make_context
from fpipe.meaning.meaning import RULES, check_and_measure_batch, make_cast
from fpipe.meaning.purity.keys import KeyWatch, collect_drawing
from fpipe.meaning.recorder import RecordedRow, Recorder, in_range, storages_of
from fpipe.meaning.single_device.params_and_state import refuse_unloaded
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Step, StepInputs, StepOptions
from fpipe.model import Model
from fpipe.ops import is_exchange
from fpipe.program import Op, Program, Value
from fpipe.torch_internals import is_profiled
from fpipe.transforms.communicate import last_uses
from fpipe.transforms.data_parallel import replica_axes


def walk(
    program: Program,
    model: Model,
    options: StepOptions,
    *,
    recorded: Program | None = None,
    see: Callable[[Value, Any], None] | None = None,
    devices: Sequence[torch.device] = (),
) -> Step:
    """Return a pure step that walks the program in this process, op by op.

    Args:
        program, model, options: what to run, and how.
        recorded: the program whose ops the timeline shows, if one is recorded.
        see: called with name and content of each value that an op writes.
        devices: the device of each rank; () runs where the arguments are.
    """
    for op in program.ops:
        for part in op.parts or (op,):
            if part.kind not in RULES:
                raise ValueError(f"{part.cell}: kind {part.kind} has no meaning; add it by fpipe.register_meaning.")
    # 1. Once: find the values that are dead after each op, so that a step holds no more than the program says.
    outputs = {end.value for end in program.outputs}
    values_freed_by_op: list[list[Value]] = [[] for _ in program.ops]
    for value, position in last_uses(program).items():
        if value not in outputs:
            values_freed_by_op[position].append(value)
    rows = [RecordedRow((op,), op.writes, freed) for op, freed in zip(program.ops, values_freed_by_op, strict=True)]
    moves, homes = find_moves(program, devices), input_homes(program, devices)
    key_watch = KeyWatch()

    def run(inputs: StepInputs) -> Result:
        if key_watch.is_complete or inputs.key is None:
            return walk_once(inputs)
        with collect_drawing() as drawing:
            result = walk_once(inputs)
        if drawing:
            key_watch.note(inputs.key, tree.leaves(inputs.params))
        return result

    def walk_once(inputs: StepInputs) -> Result:
        # 2. Check the arguments, bind them to the program's inputs, and bring them to their devices.
        check_inputs(program, model, inputs)
        if not devices:
            refuse_unloaded(inputs.batch, inputs.params, inputs.state)
        batch, sizes = check_and_measure_batch(program, inputs.batch)
        inputs = replace(inputs, batch=batch)
        context = make_context(program, model, inputs.params, sizes)
        watch_saved, loss_scale = recorded is not None, options.loss_scale
        context = replace(context, watch_saved=watch_saved, loss_scale=loss_scale, key=inputs.key, moves=moves)
        context.capturable = options.graph
        values = bind_inputs(program, model, inputs)
        for value, home in homes.items():
            check_at_home(value, tree.leaves(values[value]), home)
            if value.name in BATCH:
                values[value] = tree.tree_map(partial(bring_batch_leaf, home=home), values[value])
        recorder = Recorder(recorded, rows) if recorded else None
        notes = recorder.begin(tree.leaves([*values.values()])) if recorder else None
        # 3. Walk: each op reads values that are written already, since the list is in such an order.
        has_ranges = is_profiled()
        for position, (op, freed) in enumerate(zip(program.ops, values_freed_by_op, strict=True)):
            try:
                started = time.perf_counter()
                rule = in_range([op], RULES[op.kind]) if has_ranges else RULES[op.kind]
                results = rule(op, [values[value] for value in op.reads], context)
                if options.check_finite:
                    refuse_infinite(op, zip(op.writes, results, strict=True))
            except Exception as error:
                error.add_note(f"in {op.cell}: {describe_op(op, model)}")
                raise
            values.update(zip(op.writes, results, strict=True))
            if see:
                for value in op.writes:
                    see(value, values[value])
            if notes:
                notes.note_row(position, [leaves_with_saved(values[value]) for value in op.writes], started)
            for value in freed:
                del values[value]
        # 4. Name the outputs. None shares memory with an argument: a caller may change either in place.
        caller_storages = {*storages_of(tree.leaves(inputs.trees))}
        results = collect_results(program, model, inputs, values, partial(unshare_leaf, caller_storages))
        return Result(**results, timeline=recorder.timeline(notes) if recorder and notes else None)

    return Step(program, model, run)


def describe_op(op: Op, model: Model) -> str:
    """Return an op's stage, microbatch and rank in words."""
    parts = [] if op.stage is None else [model.label_of(op.stage)]
    parts += [] if op.microbatch is None else [f"microbatch {op.microbatch}"]
    return ", ".join([*parts, f"rank {op.rank}"])


def refuse_infinite(op: Op, values_written: Iterable[tuple[Value, Any]]) -> None:
    """Raise FloatingPointError for the first value with NaN or an infinite number.

    Residuals and hoisted values do not count: a mask may be infinite.
    """
    for value, pytree in values_written:
        for leaf in () if value.name in ("res", "wres", "hoisted") else tree.leaves(pytree):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                raise FloatingPointError(f"{op.cell} wrote {value} with NaN or infinite numbers.")


def unshare_leaf(storages_in_use: set[Hashable], leaf: Any) -> Any:
    """Return a result that shares no memory with the caller's tensors or an earlier result.

    Otherwise an in-place change of one by the caller would change the other.
    """
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    leaf = leaf.detach()
    # A leaf with gaps or overlaps, such as an expanded gradient, is a view of other memory too.
    dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
    if not dense or not storages_in_use.isdisjoint(storages_of([leaf])):
        leaf = leaf.clone()
    storages_in_use.update(storages_of([leaf]))
    return leaf


def leaves_with_saved(pytree: Any) -> list[Any]:
    """Return the leaves of a value, and for residuals the tensors that autograd has saved."""
    leaves: list[Any] = []
    for leaf in tree.leaves(pytree):
        if isinstance(leaf, StageInputs):
            leaves += tree.leaves([*leaf.args])
        else:
            leaves += [*leaf.saved, *leaf.outputs, leaf.loss] if isinstance(leaf, Residuals) else [leaf]
    return leaves


# Walk a program on several replicas at once, in one process: the definition of what replicas exchange.
#
# Parameters come whole, and are cut into shards if the program reads shards; gradients are returned whole. If replicas
# are along two axes, those along the second are neighbours: with 2 x 2, ranks 0 and 1 share parameters, and 2 and 3 do.


def lockstep(
    program: Program, model: Model, inputs: StepInputs, batches: Sequence[Any], *, inner_replicas: int
) -> Result:
    """Run one step of several replicas in this process, each op on all replicas before the next op.

    Args:
        program, model: what to run.
        inputs: the arguments that all replicas share; its batch is not read.
        batches: a batch for each replica.
        inner_replicas: how many neighbouring replicas share one copy of the parameters.

    Returns:
        Loss and gradients over all replicas, and the state of the first.
    """
    # 1. Bind the arguments of each replica, and cut parameters and optimizer state into its shards.
    check_inputs(program, model, inputs)
    refuse_unloaded(batches, inputs.params, inputs.state)
    outer_axes = replica_axes(program)[:-1]
    contexts, values = list[StepContext](), list[dict[Any, Any]]()
    for number, batch in enumerate(batches):
        checked_batch, sizes = check_and_measure_batch(program, batch)
        context = make_context(program, model, inputs.params, sizes, (number, len(batches)))
        contexts.append(replace(context, key=inputs.key))
        values_of_replica = bind_inputs(program, model, replace(inputs, batch=checked_batch))
        cut = ("shard", "opt") if any(value.name == "shard" for value in values_of_replica) else ()
        shards = {
            value: _shard_rows(pytree, number % inner_replicas, inner_replicas)
            for value, pytree in values_of_replica.items()
            if value.name in cut
        }
        values.append(values_of_replica | shards)
    # 2. Walk. An exchange reads the operands of all replicas; any other op is local.
    for op in program.ops:
        args_by_replica = [[values_of_replica[value] for value in op.reads] for values_of_replica in values]
        try:
            if op.kind in _EXCHANGES:
                operands = [tree.tree_map(make_cast(op), operand) for (operand,) in args_by_replica]
                is_across = dict(op.options)["axis"] in outer_axes
                exchanged = _exchange_in_groups(operands, inner_replicas, is_across, _EXCHANGES[op.kind])
                results = [[result] for result in exchanged]
            else:
                results = [
                    RULES[op.kind](op, args, context) for args, context in zip(args_by_replica, contexts, strict=True)
                ]
        except Exception as error:
            error.add_note(f"in {op.cell}: {describe_op(op, model)}")
            raise
        for values_of_replica, result in zip(values, results, strict=True):
            values_of_replica.update(zip(op.writes, result, strict=True))
    # 3. Collect: outputs of the first replica, and shards joined over the neighbours.
    output_values = {end.value: values[0][end.value] for end in program.outputs}
    if any(value.name == "shard" for value, _ in program.inputs):
        parts = [end.value for end in program.outputs if end.name.name in ("grads", "params", "opt")]
        neighbours = values[:inner_replicas]
        output_values |= {value: _gather([replica[value] for replica in neighbours])[0] for value in parts}
    caller_storages = {*storages_of(tree.leaves((inputs.trees, batches)))}
    inputs = replace(inputs, batch=batches[0])
    result_by_name = collect_results(program, model, inputs, output_values, partial(unshare_leaf, caller_storages))
    return Result(**{name: result for name, result in result_by_name.items() if name in _FIELDS_OF_ALL})


_FIELDS_OF_ALL = frozenset(("loss", "grads", "state", "params", "opt", "norm", "valid", "scale"))


def _exchange_in_groups(
    operands: list[Any], inner_replicas: int, is_across: bool, exchange: Callable[[Sequence[Any]], list[Any]]
) -> list[Any]:
    """Exchange operands within each group of neighbours, or across groups among replicas of the same index."""
    # Replica r is number r % inner in group r // inner: a group is a contiguous slice, its transversal a strided one.
    results = [*operands]
    for start in range(inner_replicas) if is_across else range(0, len(operands), inner_replicas):
        group = slice(start, None, inner_replicas) if is_across else slice(start, start + inner_replicas)
        results[group] = exchange(operands[group])
    return results


def _shard_rows(pytree: Any, index: int, count: int) -> Any:
    """Return a replica's rows of parameters, cut as DTensor's Shard(0) cuts them; 0-d tensors stay whole."""
    # Shard(0) follows torch.chunk: ceil(n / count) rows each, so the last shards may be shorter, or empty.

    def take_rows(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        rows_per_shard = -(-len(leaf) // count)
        return leaf.detach()[rows_per_shard * index : rows_per_shard * (index + 1)].requires_grad_(leaf.requires_grad)

    return tree.tree_map(take_rows, pytree)


def _gather(operands: Sequence[Any]) -> list[Any]:
    """Define GATHER: concatenate the rows of all replicas, in their order."""
    return [tree.tree_map(_join_rows, *operands)] * len(operands)


def _join_rows(*rows: Any) -> Any:
    if not isinstance(rows[0], Tensor) or not rows[0].ndim:
        return rows[0]
    return torch.cat([shard.detach() for shard in rows]).requires_grad_(rows[0].requires_grad)


def _reduce(operands: Sequence[Any]) -> list[Any]:
    """Define REDUCE: add the operands in the order of the replicas."""
    return [reduce(lambda a, b: tree.tree_map(_add_optional, a, b), operands)] * len(operands)


def _add_optional(total: Any, term: Any) -> Any:
    return None if total is None else total + term


def _scatter(operands: Sequence[Any]) -> list[Any]:
    """Define SCATTER: add the operands, and give each replica its rows of the sum."""
    return [_shard_rows(reduced, index, len(operands)) for index, reduced in enumerate(_reduce(operands))]


_EXCHANGES = {"GATHER": _gather, "REDUCE": _reduce, "SCATTER": _scatter}


def check_replicas(program: Program, replicas: int | tuple[int, int]) -> None:
    """Raise ValueError if a program cannot be walked with this number of replicas."""
    axes = replica_axes(program)
    if replicas != 1 and len(axes) > 0 and isinstance(replicas, tuple) != (len(axes) == 2):
        axis_names = " and ".join(map(repr, axes))
        expected = "a pair such as (2, 2)" if len(axes) == 2 else "a number such as 2"
        raise ValueError(f"the program has replicas along {axis_names}: replicas is {expected}; found {replicas!r}.")
    exchange = next((op for op in program.ops if is_exchange(op) and dict(op.options)["axis"] in axes), None)
    if replicas != 1 and exchange is not None:
        raise ValueError(
            f"{exchange.cell} exchanges along {dict(exchange.options)['axis']!r}, an axis of replicas, which is not "
            "walked in lockstep: compare with replicas=1."
        )
    if replicas != 1 and not any(op.kind in _EXCHANGES for op in program.ops):
        raise ValueError(
            f"replicas={replicas} is of a program with replicas: put fpipe.data_parallel() or fpipe.shard() behind "
            "fpipe.merge()."
        )


def scatters_microbatches(program: Program) -> bool:
    """Whether gradients are added over replicas before they are added over microbatches."""
    return any(op.kind == "SCATTER" and op.microbatch is not None for op in program.ops)
