"""Prove a program right that updates its parameters: against plain autograd and torch.optim, step after step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch
from torch import Tensor

from fpipe.meaning.around_steps import post_validated
from fpipe.meaning.lockstep import lockstep
from fpipe.meaning.meaning import batch_of
from fpipe.meaning.optimizers.op_words import update_of, words_of
from fpipe.meaning.optimizers.optimizer_state import check_optimizer_state, optimizer_state
from fpipe.meaning.single_device.batches import batches_of
from fpipe.meaning.single_device.over_parts import over_parts
from fpipe.meaning.single_device.reference import parts_of_replicas
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.single_device.training_loop import Norm, of_one, scaler_of, total_norm, training_loop
from fpipe.meaning.step import StepInputs, checked_key, checked_optim
from fpipe.model import Model
from fpipe.program import PARAMETERS, Program, parts_of
from fpipe.runtimes.build import build
from fpipe.verification.ways import (
    added_by,
    computed,
    how_of,
    joined_by,
    like_params,
    microbatches_of,
    sliced_by,
    spec_of_split,
)

LR = 0.01
"""The learning rate of a check that is handed none."""

SCALE = 2.0**16
"""The first loss scale of such a check, as torch's scaler begins."""


def trained(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: Any,
    *,
    replicas: int,
    within: int,
    state: Sequence[Any] | None,
    key: Any,
    opt: Sequence[Any] | None,
    lr: Any,
    scale: Any,
) -> tuple[Result, Result]:
    """The results of a program that updates, and what a plain loop makes of the same."""
    op = update_of(program)
    assert op is not None
    opt = optimizer_state(program, params) if opt is None else opt
    lr = LR if lr is None and any(value.name == "lr" for value in op.reads) else lr
    scale = SCALE if scale is None and any(value.name == "valid" for value in op.reads) else scale
    optim = checked_optim(program, opt, lr, scale)
    assert optim is not None
    check_optimizer_state(words_of(op.how), params, opt)
    scaler = None if optim[2] is None else scaler_of(optim[2], how_of(program, "VALIDATE"))
    rates = optim[1] or [None] * program.steps
    batch_of(program, batch)
    keys = checked_key(program, (), key)
    batches = batches_of(batch, program.steps) if program.steps > 1 else [batch]
    each = [parts_of_replicas(one, replicas, model, spec_of_split(program)) for one in batches]
    how: Any = {"sliced": sliced_by(program), "joined": joined_by(program, batches[0])}
    how |= {"added_by": added_by(program, within), "zeros": False}

    def gradients(
        read: Sequence[Any], own: Sequence[Any], state: Sequence[Any] | None, key: int | None, scale: Any
    ) -> Result:
        parts = microbatches_of(program, own)
        made = over_parts(model, computed(program, read), parts, replicas, state=state, key=key, scale=scale, **how)
        return replace(made, grads=like_params(params, made.grads))

    expected = training_loop(
        params,
        each,
        gradients,
        words_of(op.how),
        rates=rates,
        keys=[*keys] if isinstance(keys, tuple) else [keys] * program.steps,
        opt=opt,
        state=state,
        behind=partial(_behind, program, versions(program)),
        norm=_norm(program, within),
        scaler=scaler,
    )
    expected = of_one(expected) if program.steps == 1 else expected
    if replicas == 1:
        return build(program, model)(params, batch, state=state, key=key, opt=opt, lr=lr, scale=scale), expected
    own = [[one[number] for one in each] for number in range(replicas)]
    own = own if program.steps > 1 else [one for (one,) in own]
    run = post_validated(program, lambda one, _: partial(lockstep, one, model, within=within), donate=False)
    return run(StepInputs(params, None, state, optim, keys), own), expected


def versions(program: Program) -> dict[tuple[int, int], int]:
    """How many updates the parameters of a stage have had that its forwards read, in each training step."""
    size = program.microbatches // program.steps
    gathers = {op.writes[0]: op.reads[0] for op in program.ops if op.kind == "GATHER"}
    found = dict[tuple[int, int], int]()
    for op in (part for part in parts_of(program.ops) if part.kind == "F"):
        read = next(value for value in op.reads if value.name in PARAMETERS and value.stage == op.stage)
        last = gathers.get(read, read).microbatch
        found[(op.microbatch or 0) // size, op.stage or 0] = 0 if last is None else (last + 1) // size
    return found


def _behind(program: Program, known: dict[tuple[int, int], int], step: int, stage: int) -> int:
    return step - known[step, stage]


def _norm(program: Program, within: int) -> Norm:
    """The norm in the program's order of additions."""
    if not any(value.name == "squares" for op in program.ops for value in op.writes):
        return total_norm

    def of_shards(stages: Sequence[Sequence[Tensor]]) -> Tensor:
        parts = list[Tensor]()
        for grads in stages:
            whole = [grad for grad in grads if grad.ndim]
            each = [[_rows(grad, number, within).square().sum() for grad in whole] for number in range(within)]
            sums = [reduce(torch.add, column) for column in zip(*each, strict=True)]
            parts += [*sums, *(grad.square().sum() for grad in grads if not grad.ndim)]
        return torch.stack(parts).sum().sqrt()

    return of_shards


def _rows(grad: Tensor, number: int, count: int) -> Tensor:
    most = -(-len(grad) // count)
    return grad[most * number : most * (number + 1)]
