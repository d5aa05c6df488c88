"""Say what each kind of op does to real values: the rules of a walk down a program, by kind.

A stage's own, those of F, R, B, I and W, are plain autograd's; those here cut the batch, add gradients up, weigh the
losses and join what comes out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import (
    Leaves,
    Rule,
    StepContext,
    backward,
    forward,
    weight_gradient,
)
from fpipe.meaning.devices import moved
from fpipe.meaning.purity.own_memory import is_strided
from fpipe.meaning.single_device.microbatch import cut, cut_sequence, join, join_gradients, join_slices, rows
from fpipe.meaning.single_device.params_and_state import (
    batches_of,
    check_batch,
    refuse_wanted_gradients,
    rows_of_each,
    streams,
)
from fpipe.meaning.updates import norm_of, unscale, update_params, validate
from fpipe.program import Op, Program, kind_of
from fpipe.torch_internals import each_times
from fpipe.transforms.specs import Chunk, spec_of


def split_batch(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """SPLIT: views of the batch's rows, and the share of the microbatch (and slice) in the whole."""
    how = dict(op.how)
    made: dict[str, Any] = {}
    share = 1.0
    for value, arg in zip(op.reads, args, strict=True):
        spec = spec_of(how.get("spec"))
        spec = spec[value.name == "target"] if isinstance(spec, tuple) else spec
        if "presplit" in how:
            part, size = arg[how["index"]], context.sizes[how["index"]]
        else:
            how_many = {"size": how.get("size"), "total": context.rows}
            part, size = cut(arg, how["index"], how["count"], spec, what=value.name, **how_many)
        if "slices" in how:
            along = spec_of(how.get("sequence"))
            along = along[value.name == "target"] if isinstance(along, tuple) else along
            dim, who = how.get("dim", 1), value.name
            part, share = cut_sequence(part, op.slice or 0, how["slices"], dim, along, row_spec=spec, what=who)
        made["x" if value.name == "inputs" else "t"] = part
        made["w"] = size / context.all_rows * share
    return [made[value.name] for value in op.writes]


def batch_of(program: Program, batch: Any) -> tuple[Any, tuple[int, ...]]:
    """A batch, or those of the training steps, and the rows of each microbatch, or of the whole where SPLIT cuts it."""
    how = next((dict(op.how) for op in program.ops if op.kind == "SPLIT"), {})
    spec = spec_of(how.get("spec"))
    if program.steps > 1:
        batches, sizes = batches_of(batch, program.steps), set[int]()
        for one in batches:
            check_batch(one)
            sizes.add(rows(one, spec))
        if len(sizes) > 1:
            raise ValueError(f"the batches of all steps have equally many rows; found {sorted(sizes)}.")
        _refuse_wanted_gradients(program, [one[0] for one in batches])
        return batch, (*sizes,)
    if "presplit" in how:
        taken = streams(batch, how["count"])
        _refuse_wanted_gradients(program, taken[0])
        return taken, rows_of_each(taken, spec)
    check_batch(batch)
    _refuse_wanted_gradients(program, batch[0])
    return batch, (rows(batch, spec),)


def _refuse_wanted_gradients(program: Program, inputs: Any) -> None:
    ends = {end.name.name for end in program.outputs}
    if not ends.isdisjoint(("grads", "params")) and "input_grads" not in ends:
        refuse_wanted_gradients(inputs, "fpipe.program(model, input_grads=True)")


def add(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """ADD: leaf by leaf, from left to right."""
    if isinstance(args[0], Tensor):  # losses
        return [functools.reduce(torch.add, args)]
    return [summed(args)]


def summed(parts: Sequence[Leaves]) -> Leaves:
    """Sum of gradients over the same leaves, None where all have none."""
    total = [*parts[0]]
    for more in parts[1:]:
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, more, strict=True)]
    return total


def scale(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """SCALE: a total, or its gradients, divided by what it counts (by 1 if it counts nothing)."""
    total, count = args
    divisor = _or_one(count)
    if isinstance(total, Tensor):  # the loss itself
        return [total / divisor]
    return [[leaf if leaf is None else leaf / divisor for leaf in total]]


def _or_one(count: Any) -> Any:
    """Divisor of a total, without looking at the data of a tensor."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def reduce_one(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """REDUCE and SCATTER of one replica: itself, in its own memory; a count as a tensor, to be added to."""
    made = [[*map(_summand, arg)] if isinstance(arg, list) else _summand(arg) for arg in args]
    return [tree.tree_map(cast_of(op), one) for one in made]


def _summand(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone() if is_strided(leaf) else leaf
    return None if leaf is None else torch.tensor(leaf)


def gather_one(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """GATHER in one process: the parameters themselves, after a cast."""
    return [tree.tree_map(cast_of(op), arg) for arg in args]


def cast_of(op: Op) -> Callable[[Any], Any]:
    """The cast of a GATHER or SCATTER, of floating tensors."""
    dtype: torch.dtype | None = getattr(torch, dict(op.how).get("cast", ""), None)

    def cast(leaf: Any) -> Any:
        if dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return cast


def merge_results(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """MERGE: the loss over all, what it counts, joined outputs; or the gradients of the inputs, or of single rows."""
    how, wanted = dict(op.how), {value.name for value in op.writes}
    if "rows" in wanted:
        return [[None if leaves[0] is None else torch.cat(leaves) for leaves in zip(*args, strict=True)]]
    if op.reads[0].name == "inputs":
        return [_of_inputs(args[0], args[1:], how)]
    named: dict[str, list[Any]] = {}
    for value, arg in zip(op.reads, args, strict=True):
        named.setdefault(value.name, []).append(arg)
    made: dict[str, Any] = {}
    if "count" in named:
        made["count"] = sum(named["count"][1:], named["count"][0])
    if not wanted.isdisjoint({"loss", "total"}):
        losses = named["loss" if "loss" in named else "total"]
        losses = each_times(losses, named["w"]) if context.model.reduction == "mean" else losses
        made["total"] = sum(losses[1:], losses[0])  # replicas add it up, and divide by the count of all
        made["loss"] = made["total"] / _or_one(made["count"]) if "count" in made else made["total"]
    for name, parts, spec in (("outputs", named.get("y"), "spec"), ("aux", named.get("aux"), "aux")):
        if parts is not None:
            weights = named["w"]
            if "slices" in how and name == "outputs":
                parts, weights = _whole_sequences(parts, weights, how["slices"], how.get("dim", 1))
            sizes = [weight * context.all_rows for weight in weights]
            sizes = sizes if name == "aux" else [*map(round, sizes)]
            made[name] = join(parts, sizes, spec=spec_of(how.get(spec)), what=name)
    return [made[value.name] for value in op.writes]


def _of_inputs(inputs: Any, parts: Sequence[Any], how: Mapping[str, Any]) -> Leaves:
    """The gradients of the inputs from those of the microbatches (and slices), put together as these were cut."""
    spec, along = (
        said[0] if isinstance(said, tuple) else said for said in map(spec_of, map(how.get, ("spec", "sequence")))
    )
    slices = how.get("slices", 1)
    if slices > 1:
        each: Sequence[Any] = inputs if "presplit" in how else [inputs] * (len(parts) // slices)
        parts = [
            join_slices(one, parts[at * slices : (at + 1) * slices], how.get("dim", 1), along, row_spec=spec)
            for at, one in enumerate(each)
        ]
    return [leaf for part in parts for leaf in part] if "presplit" in how else join_gradients(inputs, parts, spec)


def _whole_sequences(
    parts: Sequence[Any], weights: Sequence[float], slices: int, dim: int
) -> tuple[list[Any], list[float]]:
    """Join the slices of each microbatch, and add up their weights."""
    starts = range(0, len(parts), slices)
    wholes = [join(parts[at : at + slices], weights[at : at + slices], Chunk(dim)) for at in starts]
    return wholes, [sum(weights[at : at + slices]) for at in starts]


def both(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """PAIR: its parts, which do not read each other, one after the other."""
    values = dict(zip(op.reads, args, strict=True))
    return [
        made for part in op.parts for made in RULES[part.kind](part, [values[value] for value in part.reads], context)
    ]


def pass_on(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """SEND, RECV, OFFLOAD and LOAD within one process: the value itself, after a cast, or on another device."""
    if op.how:
        return [tree.tree_map(rounding(op), arg) for arg in args]
    moves = [context.moves.get(value) if op.kind == "RECV" else None for value in op.reads]
    return [
        arg if move is None else tree.tree_map(partial(moved, home=move[0], there=move[1]), arg)
        for arg, move in zip(args, moves, strict=True)
    ]


def rounding(op: Op) -> Callable[[Any], Any]:
    """How the leaves of what a SEND casts arrive: rounded to its dtype, in their own."""
    dtype: torch.dtype = getattr(torch, dict(op.how)["cast"])

    def arrive(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype.itemsize <= dtype.itemsize:
            return leaf
        return leaf.detach().to(dtype).to(leaf.dtype).requires_grad_(leaf.requires_grad)

    return arrive


RULES: dict[str, Rule] = {
    "F": forward,
    "R": forward,
    "B": backward,
    "I": backward,
    "W": weight_gradient,
    "SPLIT": split_batch,
    "ADD": add,
    "SCALE": scale,
    "MERGE": merge_results,
    "REDUCE": reduce_one,
    "SCATTER": reduce_one,
    "PAIR": both,
    "GATHER": gather_one,
    "NORM": norm_of,
    "UPDATE": update_params,
    "VALIDATE": validate,
    "UNSCALE": unscale,
    **dict.fromkeys(("SEND", "RECV", "OFFLOAD", "LOAD"), pass_on),
    "FREE": lambda op, args, context: (),  # being the last reader is all it does
}


_OURS = frozenset(RULES)


def register_meaning(kind: str, rule: Rule) -> None:
    """Say what an op of a kind of your own does: `rule(op, args, context)` gives what the op writes, in order.

    >>> from fpipe.program import KINDS, Kind, register_kind
    >>> register_kind("HALVE", Kind("after"))
    >>> register_meaning("HALVE", lambda op, args, context: [[leaf / 2 for leaf in arg] for arg in args])
    >>> _ = KINDS.pop("HALVE"), RULES.pop("HALVE")
    """
    kind_of(kind)
    if not callable(rule):
        raise ValueError(f"a rule is a function, found {rule!r}.")
    if kind in _OURS:
        raise ValueError(f"{kind} has its meaning already.")
    RULES[kind] = rule
