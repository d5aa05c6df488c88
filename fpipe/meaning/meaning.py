"""Define what each kind of op does to real values: the rules of a walk down a program, by kind.

F, R, B, I and W run a stage under plain autograd (`by_autograd.py`). The rules here cut the batch, add gradients,
weight losses and join outputs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.by_autograd import Leaves, Rule, StepContext, backward, forward, weight_gradient
from fpipe.meaning.devices import move_tensor
from fpipe.meaning.purity.ambient import outside_autocast
from fpipe.meaning.purity.write_guard import is_strided
from fpipe.meaning.single_device.microbatch import (
    count_batch_rows,
    cut,
    cut_sequence,
    join,
    join_gradients,
    join_slices,
)
from fpipe.meaning.single_device.params_and_state import (
    as_streams,
    check_batch,
    check_batches,
    refuse_lost_gradients,
    rows_per_microbatch,
)
from fpipe.meaning.updates import take_norms, unscale, update_params, validate
from fpipe.program import Op, Program, kind_of
from fpipe.torch_internals import scale_each
from fpipe.transforms.specs import Chunk, spec_of


def split_batch(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define SPLIT: return a microbatch, or a slice of it, as views, and its share of the batch's rows."""
    settings = dict(op.options)
    value_by_name: dict[str, Any] = {}
    share = 1.0
    for value, batch_side in zip(op.reads, args, strict=True):
        # A pair of specs is for inputs and target; a single one is for both.
        spec = spec_of(settings.get("spec"))
        spec = spec[value.name == "target"] if isinstance(spec, tuple) else spec
        if "presplit" in settings:
            part, size = batch_side[settings["index"]], context.sizes[settings["index"]]
        else:
            row_options = {"size": settings.get("size"), "total": context.rows}
            part, size = cut(batch_side, settings["index"], settings["count"], spec, label=value.name, **row_options)
        if "slices" in settings:
            sequence_spec = spec_of(settings.get("sequence"))
            sequence_spec = sequence_spec[value.name == "target"] if isinstance(sequence_spec, tuple) else sequence_spec
            dim, label = settings.get("dim", 1), value.name
            options: dict[str, Any] = {"sizes": settings.get("sizes"), "row_spec": spec, "label": label}
            part, share = cut_sequence(part, op.slice or 0, settings["slices"], dim, sequence_spec, **options)
        value_by_name["x" if value.name == "inputs" else "t"] = part
        # The weight is a share of the rows of all replicas, so that gradients only have to be added.
        value_by_name["w"] = size / context.all_rows * share
    return [value_by_name[value.name] for value in op.writes]


def check_and_measure_batch(program: Program, batch: Any) -> tuple[Any, tuple[int, ...]]:
    """Check the batch (or the batches of all training steps), and return it with its numbers of rows.

    A batch that is cut already is returned as two streams with the rows of each microbatch; else the whole batch's
    number of rows is the only one.
    """
    settings = next((dict(op.options) for op in program.ops if op.kind == "SPLIT"), {})
    spec = spec_of(settings.get("spec"))
    if program.steps > 1:
        batches, sizes = check_batches(batch, program.steps), set[int]()
        for pair in batches:
            check_batch(pair)
            sizes.add(count_batch_rows(pair, spec))
        if len(sizes) > 1:
            raise ValueError(f"batches of all steps have equally many rows; found {sorted(sizes)}.")
        _refuse_lost_gradients(program, tuple(zip(*batches, strict=True)))
        return batch, (*sizes,)
    if "presplit" in settings:
        streams = as_streams(batch, settings["count"])
        _refuse_lost_gradients(program, streams)
        return streams, rows_per_microbatch(streams, spec)
    check_batch(batch)
    _refuse_lost_gradients(program, batch)
    return batch, (count_batch_rows(batch, spec),)


def _refuse_lost_gradients(program: Program, batch: Any) -> None:
    ends = {end.name.name for end in program.outputs}
    if not ends.isdisjoint(("grads", "params")):
        inputs, target = batch
        refuse_lost_gradients(
            None if "input_grads" in ends else inputs, target, "fpipe.program(model, input_grads=True)"
        )


def add_leaves(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define ADD: add leaf by leaf, from left to right."""
    if isinstance(args[0], Tensor):  # losses
        return [functools.reduce(torch.add, args)]
    return [sum_gradients(args)]


def sum_gradients(parts: Sequence[Leaves]) -> Leaves:
    """Return the sum of gradients by leaf; None where all are None."""
    # From left to right, because addition of floats is not associative: the order is part of the result.
    total = [*parts[0]]
    for terms in parts[1:]:
        total = [b if a is None else a if b is None else a + b for a, b in zip(total, terms, strict=True)]
    return total


def divide_by_count(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define SCALE: divide a total, or its gradients, by its count, or by 1 if the count is 0."""
    total, count = args
    divisor = _nonzero_divisor(count)
    if isinstance(total, Tensor):  # the loss itself
        return [total / divisor]
    return [[leaf if leaf is None else leaf / divisor for leaf in total]]


def _nonzero_divisor(count: Any) -> Any:
    """Return the count, or 1 for a count of 0, without reading a tensor's data on the host."""
    return torch.where(count == 0, 1, count) if isinstance(count, Tensor) else count or 1


def reduce_alone(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define REDUCE and SCATTER of a single replica: a copy of the operand; a number becomes a tensor."""
    operands = [[*map(_copy_operand, arg)] if isinstance(arg, list) else _copy_operand(arg) for arg in args]
    return [tree.tree_map(make_cast(op), pytree) for pytree in operands]


def _copy_operand(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.clone() if is_strided(leaf) else leaf
    return None if leaf is None else torch.tensor(leaf)


def gather_alone(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define GATHER of a single replica: the parameters, after a cast."""
    return [tree.tree_map(make_cast(op), operand) for operand in args]


def make_cast(op: Op) -> Callable[[Any], Any]:
    """Return the function that casts floating leaves as a GATHER, REDUCE or SCATTER says."""
    dtype: torch.dtype | None = getattr(torch, dict(op.options).get("cast", ""), None)

    def cast(leaf: Any) -> Any:
        if dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
            return leaf
        return leaf.detach().to(dtype).requires_grad_(leaf.requires_grad)

    return cast


@outside_autocast()
def merge_results(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define MERGE: add losses and counts, and join outputs; or join gradients of the inputs or of single rows."""
    settings, written_names = dict(op.options), {value.name for value in op.writes}
    if "rows" in written_names:
        return [[None if leaves[0] is None else torch.cat(leaves) for leaves in zip(*args, strict=True)]]
    if op.reads[0].name == "inputs":
        return [_join_input_grads(args[0], args[1:], settings)]
    args_by_name: dict[str, list[Any]] = {}
    for value, pytree in zip(op.reads, args, strict=True):
        args_by_name.setdefault(value.name, []).append(pytree)
    value_by_name: dict[str, Any] = {}
    if "count" in args_by_name:
        value_by_name["count"] = sum(args_by_name["count"][1:], args_by_name["count"][0])
    if not written_names.isdisjoint({"loss", "total"}):
        losses = args_by_name["loss" if "loss" in args_by_name else "total"]
        losses = scale_each(losses, args_by_name["w"]) if context.model.reduction == "mean" else losses
        # Replicas add the total up, and divide the sum by the count over all replicas.
        total = value_by_name["total"] = sum(losses[1:], losses[0])
        has_count = "count" in value_by_name
        value_by_name["loss"] = total / _nonzero_divisor(value_by_name["count"]) if has_count else total
    for name, parts, spec in (("outputs", args_by_name.get("y"), "spec"), ("aux", args_by_name.get("aux"), "aux")):
        if parts is not None:
            weights = args_by_name["w"]
            if "slices" in settings and name == "outputs":
                parts, weights = _join_sequences(parts, weights, settings["slices"], settings.get("dim", 1))
            # Weights are shares of all rows; rounding gives the microbatches' whole numbers of rows back.
            sizes = [weight * context.all_rows for weight in weights]
            sizes = sizes if name == "aux" else [*map(round, sizes)]
            value_by_name[name] = join(parts, sizes, spec=spec_of(settings.get(spec)), label=name)
    return [value_by_name[value.name] for value in op.writes]


def _join_input_grads(inputs: Any, parts: Sequence[Any], settings: Mapping[str, Any]) -> Leaves:
    """Join the input gradients of microbatches (and slices) as the inputs were cut."""
    specs = map(spec_of, map(settings.get, ("spec", "sequence")))
    spec, sequence_spec = (pair[0] if isinstance(pair, tuple) else pair for pair in specs)
    slices = settings.get("slices", 1)
    if slices > 1:
        inputs_by_microbatch: Sequence[Any] = inputs if "presplit" in settings else [inputs] * (len(parts) // slices)
        slice_groups = [parts[start : start + slices] for start in range(0, len(parts), slices)]
        dim = settings.get("dim", 1)
        parts = [
            join_slices(microbatch_inputs, group, dim, sequence_spec, row_spec=spec)
            for microbatch_inputs, group in zip(inputs_by_microbatch, slice_groups, strict=True)
        ]
    return [leaf for part in parts for leaf in part] if "presplit" in settings else join_gradients(inputs, parts, spec)


def _join_sequences(
    parts: Sequence[Any], weights: Sequence[float], slices: int, dim: int
) -> tuple[list[Any], list[float]]:
    starts = range(0, len(parts), slices)
    wholes = [join(parts[start : start + slices], weights[start : start + slices], Chunk(dim)) for start in starts]
    return wholes, [sum(weights[start : start + slices]) for start in starts]


def run_pair(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define PAIR: run its parts, which do not read each other, in turn."""
    values = dict(zip(op.reads, args, strict=True))
    return [
        result
        for part in op.parts
        for result in RULES[part.kind](part, [values[value] for value in part.reads], context)
    ]


def pass_on(op: Op, args: Sequence[Any], context: StepContext) -> Sequence[Any]:
    """Define SEND, RECV, OFFLOAD and LOAD within one process: the value, after a cast or a copy to another device."""
    if op.options:
        return [tree.tree_map(make_rounding(op), pytree) for pytree in args]
    moves = [context.moves.get(value) if op.kind == "RECV" else None for value in op.reads]
    return [
        pytree if move is None else tree.tree_map(partial(move_tensor, source=move[0], target=move[1]), pytree)
        for pytree, move in zip(args, moves, strict=True)
    ]


def make_rounding(op: Op) -> Callable[[Any], Any]:
    """Return the function that rounds leaves to the dtype that a SEND casts to; they keep their own dtype."""
    # On processes the message has the smaller dtype, and the receiver casts it back.
    dtype: torch.dtype = getattr(torch, dict(op.options)["cast"])

    def round_leaf(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.is_floating_point() or leaf.dtype.itemsize <= dtype.itemsize:
            return leaf
        return leaf.detach().to(dtype).to(leaf.dtype).requires_grad_(leaf.requires_grad)

    return round_leaf


RULES: dict[str, Rule] = {
    "F": forward,
    "R": forward,
    "B": backward,
    "I": backward,
    "W": weight_gradient,
    "SPLIT": split_batch,
    "ADD": add_leaves,
    "SCALE": divide_by_count,
    "MERGE": merge_results,
    "REDUCE": reduce_alone,
    "SCATTER": reduce_alone,
    "PAIR": run_pair,
    "GATHER": gather_alone,
    "NORM": take_norms,
    "UPDATE": update_params,
    "VALIDATE": validate,
    "UNSCALE": unscale,
    **dict.fromkeys(("SEND", "RECV", "OFFLOAD", "LOAD"), pass_on),
    "FREE": lambda op, args, context: (),  # nothing: a value is freed after its last reader, and this is it
}


_BUILT_IN_KINDS = frozenset(RULES)


def register_meaning(kind: str, rule: Rule) -> None:
    """Define the meaning of a new kind of op: `rule(op, args, context)` returns the values that the op writes.

    >>> from fpipe.program import KINDS, Kind, register_kind
    >>> register_kind("HALVE", Kind("after"))
    >>> register_meaning("HALVE", lambda op, args, context: [[leaf / 2 for leaf in arg] for arg in args])
    >>> _ = KINDS.pop("HALVE"), RULES.pop("HALVE")
    """
    kind_of(kind)
    if not callable(rule):
        raise ValueError(f"a rule is a function, found {rule!r}.")
    if kind in _BUILT_IN_KINDS:
        raise ValueError(f"{kind} has its meaning already.")
    RULES[kind] = rule
