"""A program on torch's own pipeline runtime: its tables, and stages that are modules of the model's pure functions.

f({"1.weight": w}, x)    -->    module.get_parameter("1.weight") is w,    module(x) = f({"1.weight": w}, x)
loss_i * (1 / m), scale_grads=False    -->    .grad = the sum over microbatches, as a step of ours has it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.pipelining import PipelineStage

from fpipe import tree
from fpipe.interop._torch_tables import refuse_what_torch_lacks
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.single_device.params_and_state import check_params, trained
from fpipe.model import Model, Stage, same_keys, who_draws
from fpipe.program import Program, ProgramError, parts_of
from fpipe.torch_private.pipelining import TableRuntime, hand_tables

_OURS = 'or run the program on fpipe.build(runtime="distributed").'


class TorchStageModule(nn.Module):
    """One stage as a module: aliases of its parameters by name. Errors call it `who`; the first takes the batch."""

    def __init__(self, stage: Stage, who: str, params: Any, trains: Sequence[bool], first: bool) -> None:
        super().__init__()
        leaves, self._containers = tree.flatten(params)
        self._stage, self._who, self._first = stage, who, first
        self._leaves = [
            nn.Parameter(leaf, requires_grad=is_trained) if isinstance(leaf, Tensor) else leaf
            for leaf, is_trained in zip(leaves, trains, strict=True)
        ]
        for path, leaf in zip(self._containers.paths(), self._leaves, strict=True):
            if isinstance(leaf, nn.Parameter):
                _register(self, ".".join(map(str, path)) or "params", leaf)

    def params(self) -> Any:
        """The parameters as the stage function takes them."""
        return tree.unflatten(self._containers, self._leaves)

    def grads(self) -> Any:
        """The gradients that autograd added up, in the containers of the params; None for a leaf without."""
        return tree.unflatten(self._containers, [getattr(leaf, "grad", None) for leaf in self._leaves])

    def forward(self, *inputs: Tensor, **keywords: Any) -> Tensor | tuple[Tensor, ...]:
        """The stage's output; keywords are the inputs of a batch that is a dict, and all stages of a rank get them."""
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        if self._first and keywords:
            if inputs:
                raise TypeError("the inputs of a batch are one or several tensors, or a dict as keywords; found both.")
            x = keywords
        y = self._stage.forward(self.params(), x)
        if isinstance(y, Tensor) or (type(y) is tuple and len(y) > 1 and all(isinstance(leaf, Tensor) for leaf in y)):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return y  # pyright: ignore[reportUnknownVariableType]
        found = f"one {type(y).__name__}"
        if type(y) is tuple:
            found = f"a tuple of {', '.join(type(leaf).__name__ for leaf in y) or 'nothing'}"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        raise TypeError(
            f"{self._who} returns {found}; torch's runtime hands on a tensor, or a tuple of two or more. Return these, "
            "and put them together in the stage after."
        )

    def backward(self, run: Callable[[], Any]) -> Any:
        """Run a backward pass of the stage, with its parameters in the place of a module's where it needs that."""
        within = self._stage.within
        return run() if within is None else within(self.params(), run)


class _PipelineStage(PipelineStage):
    """Torch's stage, for stages that look numbers up in a table, or compute something again in their backward."""

    submod: TorchStageModule

    def _to_tensor(self, arg: Any) -> Tensor:
        """Zeros to infer shapes with, where torch takes memory that nobody wrote."""
        example = super()._to_tensor(arg)
        with torch.no_grad():
            return example if isinstance(arg, Tensor) else example.zero_()

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return self.submod.backward(lambda: super(_PipelineStage, self).backward_maybe_with_nosync(*args, **kwargs))


def stages(
    model: Model, params: Sequence[Any], placement: Sequence[int], group: ProcessGroup | None, device: Any
) -> list[PipelineStage]:
    """Return the stages of this process, in order."""
    if not dist.is_initialized():
        raise ValueError("torch's stages are for processes that torch.distributed.init_process_group has joined.")
    ranks, size = 1 + max(placement), dist.get_world_size(group)
    if size != ranks:
        raise ValueError(f"the program has {ranks} ranks and the process group {size} processes; they must be as many.")
    local = [stage for stage, rank in enumerate(placement) if rank == dist.get_rank(group)]
    checked = _local_params(model, params, local)
    modules: dict[int, TorchStageModule] = {}
    for number in local:
        trains = trained(model, number, 0, checked[number])
        modules[number] = TorchStageModule(
            model.stages[number], model.who(number), checked[number], trains, number == 0
        )
    common = _common_device(modules, device)
    return [_PipelineStage(module, number, len(placement), common, group=group) for number, module in modules.items()]


def _refuse_model(model: Model) -> None:
    """Raise ValueError for a stage that asks for more than a tensor of the stage before, or a tuple of them."""
    for number in range(len(model.stages)):
        wanted = number - 1 if number else "batch"
        if model.inputs[number] != wanted:
            raise ValueError(
                f"{model.who(number)} takes {model.inputs[number]!r}; torch's runtime hands a stage what the one "
                "before it returns, and the first the batch. Let the stages between hand on what a later one reads, "
                f"in a tuple, {_OURS}"
            )
    for first, second, *_ in model.tied_uses:
        raise ValueError(
            f"leaf {first.name!r} of stage {first.stage} is tied to {second.name!r} of stage {second.stage}; torch's "
            f"runtime adds up no gradients of two stages. Cut the model so that one stage has both uses, {_OURS}"
        )
    for number, stage in enumerate(model.stages):
        who = model.who(number)
        if "state" in stage.asks:
            raise ValueError(
                f"{who} has module state; torch's runtime runs a stage once more than a step does, to learn shapes, "
                f"and that would be in it. Call eval() on what remembers before the net is cut, {_OURS}"
            )
        if stage.asks:
            raise ValueError(
                f"{who} asks for {', '.join(map(repr, sorted(stage.asks)))}; torch's runtime hands a stage its input "
                f"and nothing else. Write it without, {_OURS}"
            )
        if getattr(stage.forward, "drawing", list[str])():
            raise ValueError(
                f"{who_draws(model, number)} draws random numbers; torch's runtime has no key to draw them with. "
                f"Set its probability to 0 or call eval() on it, {_OURS}"
            )
        if stage.aux_loss:
            raise ValueError(
                f"{who} returns a loss of its own; torch's runtime has the loss of the last stage only. Hand it on in "
                f"a tuple and add it there, {_OURS}"
            )


def _local_params(model: Model, params: Any, local: Sequence[int]) -> Sequence[Any]:
    """Check the parameters of this process's stages; those of others may be None."""
    if isinstance(params, tuple | list) and len(params) == len(model.stages):  # pyright: ignore[reportUnknownArgumentType]
        for missing in (number for number in local if params[number] is None):
            raise ValueError(f"params of stage {missing} is None, and this process runs the stage: hand them in.")
        params = tuple({} if stage is None else stage for stage in params)  # pyright: ignore[reportUnknownVariableType]
        model = replace(model, frozen=frozenset(leaf for leaf in model.frozen if leaf[0] in local))
    checked = check_params(model, params)
    for number in local:
        names = model.stages[number].names
        if names is not None:
            same_keys(checked[number], [leaf[0] for leaf in names], f"params of stage {number}")
    return checked


def _common_device(modules: dict[int, TorchStageModule], device: Any) -> torch.device:
    leaves = [(number, name, leaf) for number, module in modules.items() for name, leaf in module.named_parameters()]
    common = torch.device(device) if device is not None else leaves[0][2].device if leaves else torch.device("cpu")
    for number, name, leaf in leaves:
        if leaf.device.type != common.type or common.index not in (None, leaf.device.index):
            raise ValueError(
                f"{name!r} of stage {number} is on {leaf.device}, and the stages run on {common}: move the net there "
                "before it is cut, or the params before they are handed in."
            )
    return common


def _register(module: nn.Module, name: str, leaf: nn.Parameter) -> None:
    """Register a parameter under a name with dots, in children that are made where there are none."""
    *path, last = name.split(".")
    for word in path:
        if word not in dict(module.named_children()):
            module.add_module(word, nn.Module())
        module = module.get_submodule(word)
    module.register_parameter(last, leaf)


class ProgramRuntime(TableRuntime):
    """Torch's runtime, which also knows its stages, and refuses a batch that it would cut into uneven microbatches.

    Attributes:
        stages: those of this process, in order.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        compute: str,
        comms: str,
    ) -> None:
        # Torch would divide what has been added up, that of the steps before too.
        super().__init__(stages, microbatches, loss_fn=loss, scale_grads=False)
        self.stages = stages
        self.microbatches = microbatches
        hand_tables(self, compute, comms)

    def step(self, *inputs: Tensor, target: Tensor | None = None, **keywords: Any) -> Any:
        """Torch's step. Inputs that are a tuple are spread, those that are a dict are keywords."""
        if any(stage.is_last for stage in self.stages) and not isinstance(target, Tensor):
            found = type(target).__name__
            raise ValueError(
                f"torch's runtime cuts a target that is one tensor; found {found} on the last stage's rank."
            )
        for leaf in (*inputs, *keywords.values(), target):
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) % self.microbatches:
                raise ValueError(
                    f"{len(leaf)} rows make uneven microbatches, {self.microbatches} of them; torch's runtime has "
                    f"buffers of one size. Hand in a multiple of {self.microbatches} rows, {_OURS}"
                )
        return super().step(*inputs, target=target, **keywords)


def refuse_order(program: Program, model: Model) -> None:
    """Refuse a program or a model that stages of torch's cannot be made of."""
    check_match(program, model)
    _refuse_model(model)
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
                f"parameters. Leave out place(homes=), {_OURS}"
            )
    for op in program.ops:
        options = dict(op.how)
        for word in options.keys() - {"index", "count"} if op.kind == "SPLIT" else ():
            raise ProgramError(
                f"{op.cell} has {word}={options[word]!r}; torch's runtime cuts rows of dim 0 into equal microbatches. "
                f"Say fpipe.split({program.microbatches}) and no more, {_OURS}"
            )
        if "cast" in options:
            raise ProgramError(
                f"{op.cell} casts to {options['cast']} on the way; torch's runtime sends what there is. Leave out "
                f"communicate(cast=), {_OURS}"
            )
    names = [end.name for end in program.outputs]
    merged_stages = {name.stage for name in names if name.name == "grads" and name.microbatch is None}
    if merged_stages != set(range(program.stages)):
        raise ProgramError(
            "this program does not add its gradients up over microbatches, as torch's runtime does; put fpipe.merge() "
            "behind the schedule."
        )
    for unsupported in (name for name in names if name.name not in ("loss", "outputs", "grads", "losses")):
        raise ProgramError(
            f"this program also gives {unsupported}; torch's runtime gives losses, outputs and gradients. Write it "
            f"without, {_OURS}"
        )
    last = [op.microbatch or 0 for op in parts_of(program.ops) if op.kind == "F" and op.stage == program.stages - 1]
    for late in (second for first, second in pairwise(last) if second < first):
        raise ProgramError(
            f"{program.stages - 1}F{late} comes after a later microbatch's; torch's runtime takes the losses of the "
            f"last stage for those of microbatches 0, 1, 2. Put its forwards in this order, {_OURS}"
        )


def _refuse_loss(model: Model) -> None:
    if model.loss is None:
        raise ValueError(
            "this model has no loss=, and torch's runtime computes one from the last output and a target. Say "
            f"loss=lambda y, target: y where the last stage returns the loss, {_OURS}"
        )
    if model.aux or model.reduction == "count":
        what = "auxiliary results" if model.aux else "a count, which all gradients are divided by at the end,"
        raise ValueError(
            f"the loss returns {what} beside it; torch's runtime takes a loss alone. Write one that returns no more, "
            f"{_OURS}"
        )
