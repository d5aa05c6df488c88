"""Prove a program that updates its parameters right: against plain autograd and torch.optim, step after step.

program      F B .. UPDATE[0,1]   F B .. UPDATE[0,3]        -->        each parameter, state and norm, bit by bit
plain loop   loss.backward(); optimizer.step(), twice
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.meaning.meaning import check_and_measure_batch
from fpipe.meaning.optimizers.optimizer_state import (
    check_optimizer_state,
    find_update,
    optimizer_state,
    update_settings,
)
from fpipe.meaning.single_device.microbatch_sums import sum_over_microbatches
from fpipe.meaning.single_device.params_and_state import check_batches
from fpipe.meaning.single_device.reference import split_over_replicas
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import (
    TakeNorm,
    make_scaler,
    total_norm,
    training_loop,
    unwrap_single_step,
)
from fpipe.meaning.step import StepInputs, check_key, check_optim, repeat_if_invalid
from fpipe.meaning.walk import lockstep
from fpipe.model import Model
from fpipe.program import PARAMETERS, Op, Program, parts_of
from fpipe.verification.reference_settings import (
    StepArguments,
    cast_like_params,
    cast_params_of,
    join_specs_of,
    microbatches_of,
    replica_order_of,
    settings_of_kind,
    slicing_of,
    spec_of_split,
)
from fpipe.verification.report import GradientMismatch, Report, agree_to_rounding

# The learning rate of a check that is handed none, and its first loss scale, with which torch's scaler begins too.
DEFAULT_LR, DEFAULT_SCALE = 0.01, 2.0**16


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
        replicas: the number of replicas, and of those that shard parameters among themselves.
        compare: compares the result with the expected one.
    """
    # 1. Complete and check the arguments.
    op = find_update(program)
    assert op is not None
    arguments = _with_defaults(program, op, arguments)
    optim = check_optim(program, arguments.opt, arguments.lr, arguments.scale)
    assert optim is not None
    params, opt, state = arguments.params, optim[0], arguments.state
    check_optimizer_state(update_settings(op.options), params, opt)
    scaler = None if optim[2] is None else make_scaler(optim[2], settings_of_kind(program, "VALIDATE"))
    check_and_measure_batch(program, arguments.batch)
    keys = check_key(program, (), arguments.key)
    batches = check_batches(arguments.batch, program.steps) if program.steps > 1 else [arguments.batch]
    (count, inner_replicas), spec = replicas, spec_of_split(program)
    # 2. Run the plain loop, each step on the batches of all replicas and on parameters as stale as the program's.
    batches_by_step = [split_over_replicas(batch, count, model, spec) for batch in batches]
    reference = partial(
        sum_over_microbatches,
        slicing=slicing_of(program),
        join_specs=join_specs_of(program, batches[0]),
        replica_order=replica_order_of(program, inner_replicas),
    )
    updates_read = _count_updates_read(program)
    steps_behind = {(step, stage): step - updates for (step, stage), updates in updates_read.items()}

    def run_reference(
        read_params: Sequence[Any], batches: Sequence[Any], state: Any, key: int | None, scale: Any
    ) -> Result:
        microbatches = microbatches_of(program, batches)
        cast_params = cast_params_of(program, read_params)
        result = reference(model, cast_params, microbatches, count, state=state, key=key, scale=scale)
        return replace(result, grads=cast_like_params(params, result.grads))

    expected = training_loop(
        model,
        params,
        batches_by_step,
        run_reference,
        update_settings(op.options),
        rates=optim[1] or [None] * program.steps,
        keys=[*keys] if isinstance(keys, tuple) else [keys] * program.steps,
        opt=opt,
        state=state,
        delay=lambda step, stage: steps_behind[step, stage],
        norm=_norm_function(program, inner_replicas),
        scaler=scaler,
    )
    expected = unwrap_single_step(expected) if program.steps == 1 else expected
    # 3. Run the program, of several replicas in lockstep, and compare.
    if count == 1:
        report = compare(run(arguments), expected)
    else:
        steps_by_replica = [list(steps) for steps in zip(*batches_by_step, strict=True)]
        batches_by_replica = steps_by_replica if program.steps > 1 else [batch for (batch,) in steps_by_replica]

        def walk_in_lockstep(program: Program, _: bool) -> Any:
            return partial(lockstep, program, model, inner_replicas=inner_replicas)

        walk = repeat_if_invalid(program, walk_in_lockstep, donate=False)
        compare = compare if not _updates_shards_by_fused_rule(program, op) else partial(_compare_to_rounding, compare)
        report = compare(walk(StepInputs(params, None, state, optim, keys), batches_by_replica), expected)
    # 4. Say by how many steps each stage's parameters are behind at most.
    largest_delay = dict[int, int]()
    for (_, stage), delay in sorted(steps_behind.items(), key=lambda pair: pair[0][1]):
        largest_delay[stage] = max(largest_delay.get(stage, delay), delay)
    stale = ", ".join(f"stage {stage} by {steps}" for stage, steps in largest_delay.items() if steps)
    sentence = "The undivided batch is compared for programs that end at the gradients: leave fpipe.update() out."
    stale = f" Parameters that are read are behind by steps: {stale}." if stale else ""
    return replace(report, undivided=sentence + stale)


def _updates_shards_by_fused_rule(program: Program, op: Op) -> bool:
    # Such kernels are vectorized, and round the last numbers of a tensor otherwise than the ones before.
    return bool(dict(update_settings(op.options).settings).get("fused")) and any(
        op.kind == "GATHER" for op in program.ops
    )


def _compare_to_rounding(compare: Callable[[Result, Result], Report], result: Result, expected: Result) -> Report:
    """Compare results, and report differences by rounding alone in a note instead of raising."""
    try:
        return compare(result, expected)
    except GradientMismatch as error:
        names = [name for name in ("loss", "grads", "params", "opt", "norm") if getattr(result, name) is not None]
        expected_parts = {name: getattr(expected, name) for name in names}
        # All other parts, such as outputs and state, must pass the comparison itself.
        compare(replace(result, **expected_parts), expected)
        parts = ((getattr(result, name), getattr(expected, name)) for name in names)
        leaves = ((tree.leaves(actual), tree.leaves(expected_part)) for actual, expected_part in parts)
        pairs = [pair for actual, expected_part in leaves for pair in zip(actual, expected_part, strict=True)]
        tensors = [pair for pair in pairs if all(isinstance(leaf, Tensor) for leaf in pair)]
        tensors = [pair for pair in tensors if pair[1].is_floating_point()]
        if error.report is None or not agree_to_rounding(tensors):
            raise
        sentence = "Fused rules round the last numbers of each shard otherwise than in the whole: compared to rounding."
        return replace(error.report, notes=(*error.report.notes, sentence))


def _with_defaults(program: Program, op: Op, arguments: StepArguments) -> StepArguments:
    """Fill in defaults for the arguments that the update reads and the caller left out."""
    reads = {value.name for value in op.reads}
    opt = optimizer_state(program, arguments.params) if arguments.opt is None else arguments.opt
    lr = DEFAULT_LR if arguments.lr is None and "lr" in reads else arguments.lr
    scale = DEFAULT_SCALE if arguments.scale is None and "valid" in reads else arguments.scale
    return replace(arguments, opt=opt, lr=lr, scale=scale)


def _count_updates_read(program: Program) -> dict[tuple[int, int], int]:
    """Count the updates behind the parameters that forwards read, by training step and stage."""
    # A version of parameters is named by the last microbatch of the step whose UPDATE wrote it; the first has no name.
    microbatches_per_step = program.microbatches // program.steps
    gathers = {op.writes[0]: op.reads[0] for op in program.ops if op.kind == "GATHER"}
    updates = dict[tuple[int, int], int]()
    for op in (part for part in parts_of(program.ops) if part.kind == "F"):
        read_value = next(value for value in op.reads if value.name in PARAMETERS and value.stage == op.stage)
        last_microbatch = gathers.get(read_value, read_value).microbatch
        step = (op.microbatch or 0) // microbatches_per_step
        update_count = 0 if last_microbatch is None else (last_microbatch + 1) // microbatches_per_step
        updates[step, op.stage or 0] = update_count
    return updates


def _norm_function(program: Program, inner_replicas: int) -> TakeNorm:
    """Return the function that computes a program's norm: torch's, or the root of the sum of all shards' squares."""
    if not any(value.name == "squares" for op in program.ops for value in op.writes):
        return total_norm

    # The order of additions of the program: the squares of a gradient over its shards first, then over gradients.
    def sum_squares(grad: Tensor) -> Tensor:
        # As many rows a shard, rounded up, as there are: `torch.chunk` cuts like this, and leaves out empty shards.
        shards = grad.chunk(inner_replicas) if grad.ndim else [grad]
        return reduce(torch.add, [shard.square().sum() for shard in shards])

    def norm_of_shards(grads: Sequence[Tensor]) -> Tensor:
        return torch.stack([sum_squares(grad) for grad in grads]).sum().sqrt()

    return norm_of_shards
