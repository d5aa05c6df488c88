"""Prove a program right that updates its parameters: against plain autograd and torch.optim, step after step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.meaning import batch_of
from fpipe.meaning.optimizers.optimizer_state import check_optimizer_state, optimizer_state, update_of, words_of
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.params_and_state import batches_of
from fpipe.meaning.single_device.reference import parts_of_replicas
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import Norm, of_one, scaler_of, total_norm, training_loop
from fpipe.meaning.step import StepInputs, checked_key, checked_optim, post_validated
from fpipe.meaning.walk import lockstep
from fpipe.model import Model
from fpipe.program import PARAMETERS, Op, Program, parts_of
from fpipe.verification.reference_settings import (
    StepArguments,
    added_by,
    computed,
    joined_by,
    like_params,
    microbatches_of,
    settings_of,
    sliced_by,
    spec_of_split,
)
from fpipe.verification.report import GradientMismatch, Report, to_rounding

LR = 0.01
"""The learning rate of a check that is handed none."""

SCALE = 2.0**16
"""The first loss scale of such a check, as torch's scaler begins."""


def check_training(
    program: Program,
    model: Model,
    arguments: StepArguments,
    run: Callable[[StepArguments], Result],
    replicas: tuple[int, int],
    compare: Callable[[Result, Result], Report],
) -> Report:
    """Compare a program that updates parameters with a plain loop over the same training steps.

    Args:
        program, model, arguments: as for `verify`.
        run: the step that is proved.
        replicas: how many there are, and how many of them share parameters out.
        compare: what judges the two results.
    """
    op = update_of(program)
    assert op is not None
    arguments = _completed(program, op, arguments)
    optim = checked_optim(program, arguments.opt, arguments.lr, arguments.scale)
    assert optim is not None
    params, opt, state = arguments.params, optim[0], arguments.state
    check_optimizer_state(words_of(op.how), params, opt)
    scaler = None if optim[2] is None else scaler_of(optim[2], settings_of(program, "VALIDATE"))
    batch_of(program, arguments.batch)
    keys = checked_key(program, (), arguments.key)
    batches = batches_of(arguments.batch, program.steps) if program.steps > 1 else [arguments.batch]
    (count, within), spec = replicas, spec_of_split(program)
    # For each training step, the batch of each replica.
    rows_of_replicas = [parts_of_replicas(batch, count, model, spec) for batch in batches]
    over = partial(over_parts, sliced=sliced_by(program), joined=joined_by(program, batches[0]))
    over = partial(over, added_by=added_by(program, within))
    steps_behind = {place: place[0] - updates for place, updates in _updates_read(program).items()}

    def gradients(read: Sequence[Any], batches: Sequence[Any], state: Any, key: int | None, scale: Any) -> Result:
        parts = microbatches_of(program, batches)
        result = over(model, computed(program, read), parts, count, state=state, key=key, scale=scale)
        return replace(result, grads=like_params(params, result.grads))

    expected = training_loop(
        model,
        params,
        rows_of_replicas,
        gradients,
        words_of(op.how),
        rates=optim[1] or [None] * program.steps,
        keys=[*keys] if isinstance(keys, tuple) else [keys] * program.steps,
        opt=opt,
        state=state,
        behind=lambda step, stage: steps_behind[step, stage],
        norm=_norm(program, within),
        scaler=scaler,
    )
    expected = of_one(expected) if program.steps == 1 else expected
    if count == 1:
        report = compare(run(arguments), expected)
    else:
        rows = [list(steps) for steps in zip(*rows_of_replicas, strict=True)]
        each = rows if program.steps > 1 else [batch for (batch,) in rows]
        walk = post_validated(program, lambda one, _: partial(lockstep, one, model, within=within), donate=False)
        compare = compare if not _splits_fused(program, op) else partial(_compare_to_rounding, compare)
        report = compare(walk(StepInputs(params, None, state, optim, keys), each), expected)
    stages = sorted({stage for _, stage in steps_behind})
    most = {stage: max(steps for (_, at), steps in steps_behind.items() if at == stage) for stage in stages}
    stale = ", ".join(f"stage {stage} by {steps}" for stage, steps in most.items() if steps)
    sentence = "The undivided batch is compared for programs that end at the gradients: leave fpipe.update() out."
    stale = f" Parameters that are read are behind by steps: {stale}." if stale else ""
    return replace(report, undivided=sentence + stale)


def _splits_fused(program: Program, op: Op) -> bool:
    """Whether fused kernels update shards: they round the last numbers of a tensor otherwise than those before."""
    return bool(dict(words_of(op.how).settings).get("fused")) and any(op.kind == "GATHER" for op in program.ops)


def _compare_to_rounding(compare: Callable[[Result, Result], Report], result: Result, expected: Result) -> Report:
    """Compare as asked; what differs by rounding alone is reported, and not raised."""
    try:
        return compare(result, expected)
    except GradientMismatch as error:
        names = [name for name in ("loss", "grads", "params", "opt", "norm") if getattr(result, name) is not None]
        rounded = {name: getattr(expected, name) for name in names}
        compare(replace(result, **rounded), expected)  # all else as asked
        parts = ((getattr(result, name), getattr(expected, name)) for name in names)
        leaves = ((tree.leaves(found), tree.leaves(right)) for found, right in parts)
        pairs = [pair for found, right in leaves for pair in zip(found, right, strict=True)]
        tensors = [
            (a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor) and b.is_floating_point()
        ]
        if error.report is None or not to_rounding(tensors):
            raise
        sentence = "Fused rules round the last numbers of each shard otherwise than in the whole: compared to rounding."
        return replace(error.report, notes=(*error.report.notes, sentence))


def _completed(program: Program, op: Op, arguments: StepArguments) -> StepArguments:
    """The arguments with the defaults of a check, where its update reads something that they lack."""
    reads = {value.name for value in op.reads}
    opt = optimizer_state(program, arguments.params) if arguments.opt is None else arguments.opt
    lr = LR if arguments.lr is None and "lr" in reads else arguments.lr
    scale = SCALE if arguments.scale is None and "valid" in reads else arguments.scale
    return replace(arguments, opt=opt, lr=lr, scale=scale)


def _updates_read(program: Program) -> dict[tuple[int, int], int]:
    """How many updates the parameters have had that forwards read, by training step and stage."""
    size = program.microbatches // program.steps
    gathers = {op.writes[0]: op.reads[0] for op in program.ops if op.kind == "GATHER"}
    updates = dict[tuple[int, int], int]()
    for op in (part for part in parts_of(program.ops) if part.kind == "F"):
        read = next(value for value in op.reads if value.name in PARAMETERS and value.stage == op.stage)
        last = gathers.get(read, read).microbatch
        updates[(op.microbatch or 0) // size, op.stage or 0] = 0 if last is None else (last + 1) // size
    return updates


def _norm(program: Program, within: int) -> Norm:
    """Return the norm of a program: torch's, or of shards the root of all squares, added up over replicas first."""
    if not any(value.name == "squares" for op in program.ops for value in op.writes):
        return total_norm

    def squares(grad: Tensor) -> Tensor:
        shards = [_rows(grad, number, within) for number in range(within)] if grad.ndim else [grad]
        return reduce(torch.add, [shard.square().sum() for shard in shards])

    def of_shards(grads: Sequence[Tensor]) -> Tensor:
        return torch.stack([squares(grad) for grad in grads]).sum().sqrt()

    return of_shards


def _rows(grad: Tensor, number: int, count: int) -> Tensor:
    most = -(-len(grad) // count)
    return grad[most * number : most * (number + 1)]
