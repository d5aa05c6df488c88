"""Run a program by walking down its list, each stage under plain autograd: the definition of what a program means.

The program of several replicas is walked down on all of them at once, op by op (`lockstep`).
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
from fpipe.meaning.by_autograd import Inputs, Residuals, StepContext
from fpipe.meaning.devices import BATCH, brought, check_at_home, homes_of, moves_of
from fpipe.meaning.inputs_and_results import bind_inputs, check_inputs, collect_results, context_of
from fpipe.meaning.meaning import RULES, batch_of, cast_of
from fpipe.meaning.recorder import RecordedRow, Recorder, storages
from fpipe.meaning.single_device.params_and_state import refuse_unloaded
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Step, StepInputs, StepOptions
from fpipe.model import Model
from fpipe.ops import is_exchange
from fpipe.program import Op, Program, Value
from fpipe.transforms.communicate import last_uses
from fpipe.transforms.data_parallel import axes_of


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
        results = collect_results(program, model, inputs, values, partial(own_leaf, taken))
        return Result(**results, timeline=recorder.timeline(notes) if recorder and notes else None)

    return Step(program, model, run)


def place_of(op: Op, model: Model) -> str:
    """Where an op stands, in words: stage, microbatch, rank."""
    words = [] if op.stage is None else [model.who(op.stage)]
    words += [] if op.microbatch is None else [f"microbatch {op.microbatch}"]
    return ", ".join([*words, f"rank {op.rank}"])


def refuse_infinite(op: Op, written: Iterable[tuple[Value, Any]]) -> None:
    """An error at the first value with NaN or an infinite number in it, residuals aside."""
    for value, content in written:
        for leaf in () if value.name in ("res", "wres") else tree.leaves(content):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and not bool(torch.isfinite(leaf).all()):
                raise FloatingPointError(f"{op.cell} wrote {value} with NaN or infinite numbers.")


def own_leaf(taken: set[Hashable], leaf: Any) -> Any:
    """A result that shares memory with nothing the caller has: an in-place change of one would change the other."""
    if not isinstance(leaf, Tensor) or leaf.layout is not torch.strided:
        return leaf
    leaf = leaf.detach()
    dense = torch.ops.aten.is_non_overlapping_and_dense(leaf)
    if not dense or not taken.isdisjoint(storages([leaf])):
        leaf = leaf.clone()
    taken.update(storages([leaf]))
    return leaf


def leaves_of(value: Any) -> list[Any]:
    """The leaves of a value, those that autograd keeps for it among them."""
    leaves: list[Any] = []
    for leaf in tree.leaves(value):
        if isinstance(leaf, Inputs):
            leaves += tree.leaves([*leaf.args])
        else:
            leaves += [*leaf.saved, *leaf.outputs, leaf.loss] if isinstance(leaf, Residuals) else [leaf]
    return leaves


# Walk down the program of several replicas at once in one process: what one of them says of all, in their order.
#
# Parameters are handed in whole, and cut into shards where the program takes shards; gradients come out whole. With
# replicas along two axes, those along the second are neighbours: 0 and 1 share parameters out, and so do 2 and 3.


def lockstep(program: Program, model: Model, inputs: StepInputs, batches: Sequence[Any], *, within: int) -> Result:
    """Run a step of several replicas in one process, op by op on all of them.

    Args:
        inputs: of every replica, but for the batch.
        batches: one of each replica.
        within: how many neighbouring replicas share the parameters out.

    Returns:
        Loss and gradients of all replicas, and the state of the first one.
    """
    check_inputs(program, model, inputs)
    refuse_unloaded(batches, inputs.params, inputs.state)
    outer = axes_of(program)[:-1]
    contexts, values = list[StepContext](), list[dict[Any, Any]]()
    for number, batch in enumerate(batches):
        whole, sizes = batch_of(program, batch)
        context = context_of(program, model, inputs.params, sizes, (number, len(batches)))
        contexts.append(replace(context, key=inputs.key))
        own = bind_inputs(program, model, replace(inputs, batch=whole))
        cut = ("shard", "opt") if any(value.name == "shard" for value in own) else ()
        shards = {value: _shard(one, number % within, within) for value, one in own.items() if value.name in cut}
        values.append(own | shards)
    for op in program.ops:
        read = [[own[value] for value in op.reads] for own in values]
        try:
            if op.kind in _EXCHANGES:
                taken = [tree.tree_map(cast_of(op), one) for (one,) in read]
                across = dict(op.how)["axis"] in outer
                made = [[one] for one in _among(taken, within, across, _EXCHANGES[op.kind])]
            else:
                made = [RULES[op.kind](op, args, context) for args, context in zip(read, contexts, strict=True)]
        except Exception as error:
            error.add_note(f"in {op.cell}: {place_of(op, model)}")
            raise
        for own, one in zip(values, made, strict=True):
            own.update(zip(op.writes, one, strict=True))
    found = {end.value: values[0][end.value] for end in program.outputs}
    if any(value.name == "shard" for value, _ in program.inputs):
        parts = [end.value for end in program.outputs if end.name.name in ("grads", "params", "opt")]
        found |= {value: _gather([own[value] for own in values[:within]])[0] for value in parts}
    taken = {*storages(tree.leaves((inputs.trees, batches)))}
    named = collect_results(program, model, replace(inputs, batch=batches[0]), found, partial(own_leaf, taken))
    return Result(**{name: one for name, one in named.items() if name in _OF_ALL})


_OF_ALL = frozenset(("loss", "grads", "state", "params", "opt", "norm", "valid", "scale"))


def _among(each: list[Any], within: int, across: bool, exchange: Callable[[Sequence[Any]], list[Any]]) -> list[Any]:
    """An exchange among those `within` a group of neighbours, or `across` groups."""
    made = [*each]
    for at in range(within) if across else range(0, len(each), within):
        group = slice(at, None, within) if across else slice(at, at + within)
        made[group] = exchange(each[group])
    return made


def _shard(whole: Any, number: int, count: int) -> Any:
    """A replica's rows of parameters, as DTensor's Shard(0) has them; what has no rows stays whole."""

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            return leaf
        most = -(-len(leaf) // count)
        return leaf.detach()[most * number : most * (number + 1)].requires_grad_(leaf.requires_grad)

    return tree.tree_map(own, whole)


def _gather(each: Sequence[Any]) -> list[Any]:
    """GATHER: the rows of all, one behind the other."""
    return [tree.tree_map(_joined, *each)] * len(each)


def _joined(*rows: Any) -> Any:
    if not isinstance(rows[0], Tensor) or not rows[0].ndim:
        return rows[0]
    return torch.cat([one.detach() for one in rows]).requires_grad_(rows[0].requires_grad)


def _reduce(each: Sequence[Any]) -> list[Any]:
    """REDUCE: the sum, in the order of the replicas."""
    return [reduce(lambda a, b: tree.tree_map(_sum, a, b), each)] * len(each)


def _sum(one: Any, other: Any) -> Any:
    return None if one is None else one + other


def _scatter(each: Sequence[Any]) -> list[Any]:
    """SCATTER: of the sum, its rows."""
    return [_shard(whole, number, len(each)) for number, whole in enumerate(_reduce(each))]


_EXCHANGES = {"GATHER": _gather, "REDUCE": _reduce, "SCATTER": _scatter}


def refuse_without(program: Program, replicas: int | tuple[int, int]) -> None:
    """A ValueError for replicas of a program that exchanges nothing with them, or that are along other axes."""
    axes = axes_of(program)
    if replicas != 1 and len(axes) > 0 and isinstance(replicas, tuple) != (len(axes) == 2):
        along, say = " and ".join(map(repr, axes)), "a pair such as (2, 2)" if len(axes) == 2 else "a number such as 2"
        raise ValueError(f"the program has replicas along {along}: replicas is {say}; found {replicas!r}.")
    among = next((op for op in program.ops if is_exchange(op) and dict(op.how)["axis"] in axes), None)
    if replicas != 1 and among is not None:
        raise ValueError(
            f"{among.cell} exchanges along {dict(among.how)['axis']!r}, an axis of replicas, which is not walked in "
            "lockstep: compare with replicas=1, where the axis has one process."
        )
    if replicas != 1 and not any(op.kind in _EXCHANGES for op in program.ops):
        raise ValueError(
            f"replicas={replicas} is of a program with replicas: put fpipe.data_parallel() or fpipe.shard() behind "
            "fpipe.merge()."
        )


def scatters_microbatches(program: Program) -> bool:
    """Whether gradients are added up over replicas before they are over microbatches."""
    return any(op.kind == "SCATTER" and op.microbatch is not None for op in program.ops)
