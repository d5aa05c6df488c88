"""Walk down the program of several replicas at once in one process: what one of them says of all, in their order.

    replica 0: all[0] = REDUCE sum[0,1]        -->        both: all[0] = sum[0,1] of replica 0 + sum[0,1] of replica 1
    replica 1: all[0] = REDUCE sum[0,1]

Parameters are handed in whole, and cut into shards where the program takes shards; gradients come out whole. With
replicas along two axes, those along the second are neighbours: 0 and 1 share parameters out, and so do 2 and 3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import StepContext
from fpipe.meaning.inputs_and_results import bind_inputs, check_inputs, collect_results, context_of
from fpipe.meaning.meaning import RULES, batch_of, cast_of
from fpipe.meaning.single_device.batches import refuse_unloaded
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import StepInputs
from fpipe.meaning.walk import place_of
from fpipe.model import Model
from fpipe.program import Program, is_exchange
from fpipe.transforms.data_parallel import axes_of


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
    named = collect_results(program, model, replace(inputs, batch=batches[0]), found, _detached)
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


def _detached(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, Tensor) else leaf


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
