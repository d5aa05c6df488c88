"""A program on torch's own pipeline runtime: its table, stages of the model, and a loss of each microbatch's weight.

loss_i * (1 / m), scale_grads=False    -->    .grad = the sum over microbatches, as a step of ours has it
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from torch import Tensor
from torch.distributed.pipelining import PipelineStage

from fpipe.interop._torch_stages import OURS, refuse_model
from fpipe.interop._torch_write import refuse_what_torch_lacks
from fpipe.model import Model
from fpipe.program import Program, ProgramError, parts_of
from fpipe.runtimes.definition.match import check_match
from fpipe.torch_private.pipelining import TableRuntime, hand_tables


class ProgramRuntime(TableRuntime):
    """Torch's runtime, which also knows its stages, and refuses a batch that it would cut into uneven microbatches.

    Attributes:
        stages: those of this process, in order.
    """

    def __init__(
        self,
        own: list[PipelineStage],
        microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        compute: str,
        comms: str,
    ) -> None:
        # Torch would divide what has been added up, that of the steps before too.
        super().__init__(own, microbatches, loss_fn=loss, scale_grads=False)
        self.stages = own
        self.microbatches = microbatches
        hand_tables(self, compute, comms)

    def step(self, *inputs: Tensor, target: Tensor | None = None, **given: Any) -> Any:
        """Torch's step. Inputs that are a tuple are spread, those that are a dict are keywords."""
        if any(stage.is_last for stage in self.stages) and not isinstance(target, Tensor):
            found = type(target).__name__
            raise ValueError(
                f"torch's runtime cuts a target that is one tensor; found {found} on the last stage's rank."
            )
        for what in (*inputs, *given.values(), target):
            if isinstance(what, Tensor) and what.ndim and len(what) % self.microbatches:
                raise ValueError(
                    f"{len(what)} rows make uneven microbatches, {self.microbatches} of them; torch's runtime has "
                    f"buffers of one size. Hand in a multiple of {self.microbatches} rows, {OURS}"
                )
        return super().step(*inputs, target=target, **given)


def refuse_order(program: Program, model: Model) -> None:
    """A program and a model that stages of torch's cannot be made of."""
    check_match(program, model)
    refuse_model(model)
    refuse_what_torch_lacks(program)


def refuse(program: Program, model: Model) -> None:
    """Refuse programs that torch's runtime could not carry out, or would carry out otherwise."""
    refuse_order(program, model)
    _refuse_loss(model)
    for end in program.inputs:
        home = program.placement[end.value.stage or 0]
        if end.value.name == "params" and end.homes != (home,):
            raise ProgramError(
                f"{end.value} has its home on ranks {end.homes} and its stage on rank {home}; torch's runtime moves no "
                f"parameters. Leave out place(homes=), {OURS}"
            )
    for op in program.ops:
        said = dict(op.how)
        for word in said.keys() - {"index", "count"} if op.kind == "SPLIT" else ():
            raise ProgramError(
                f"{op.cell} has {word}={said[word]!r}; torch's runtime cuts rows of dim 0 into equal microbatches. "
                f"Say fpipe.split({program.microbatches}) and no more, {OURS}"
            )
        if "cast" in said:
            raise ProgramError(
                f"{op.cell} casts to {said['cast']} on the way; torch's runtime sends what there is. Leave out "
                f"communicate(cast=), {OURS}"
            )
    names = [end.name for end in program.outputs]
    whole = {name.stage for name in names if name.name == "grads" and name.microbatch is None}
    if whole != set(range(program.stages)):
        raise ProgramError(
            "this program does not add its gradients up over microbatches, as torch's runtime does; put fpipe.merge() "
            "behind the schedule."
        )
    for odd in (name for name in names if name.name not in ("loss", "outputs", "grads", "losses")):
        raise ProgramError(
            f"this program also gives {odd}; torch's runtime gives losses, outputs and gradients. Write it without, "
            f"{OURS}"
        )
    last = [op.microbatch or 0 for op in parts_of(program.ops) if op.kind == "F" and op.stage == program.stages - 1]
    for late in (second for first, second in pairwise(last) if second < first):
        raise ProgramError(
            f"{program.stages - 1}F{late} comes after a later microbatch's; torch's runtime takes the losses of the "
            f"last stage for those of microbatches 0, 1, 2. Put its forwards in this order, {OURS}"
        )


def _refuse_loss(model: Model) -> None:
    if model.loss is None:
        raise ValueError(
            "this model has no loss=, and torch's runtime computes one from the last output and a target. Say "
            f"loss=lambda y, target: y where the last stage returns the loss, {OURS}"
        )
    if model.aux or model.reduction == "count":
        what = "auxiliary results" if model.aux else "a count, which all gradients are divided by at the end,"
        raise ValueError(
            f"the loss returns {what} beside it; torch's runtime takes a loss alone. Write one that returns no more, "
            f"{OURS}"
        )
