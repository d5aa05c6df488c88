"""Run a program on torch's own pipeline runtime: its tables, and modules made of the model's pure functions.

f({"1.weight": w}, x)    -->    module.get_parameter("1.weight") is w,    module(x) = f({"1.weight": w}, x)
loss_i * (1 / m), scale_grads=False    -->    .grad = the sum over microbatches, as in a step of fpipe
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
from fpipe.interop._torch_tables import refuse_unsupported_ops
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.single_device.params_and_state import check_params, trainable_bundle_leaves
from fpipe.model import Model, Stage, check_keys, label_with_random_modules
from fpipe.program import Program, ProgramError, parts_of
from fpipe.torch_private.pipelining import TableRuntime, load_tables

_USE_FPIPE = 'or use fpipe.build(runtime="distributed").'


class TorchStageModule(nn.Module):
    """One stage as a module, whose parameters share memory with the stage's pytree.

    Args:
        stage, params: the stage function, and its parameters.
        stage_name: how errors call the stage.
        trains: whether each leaf of `params` is trained.
        takes_batch: whether it is the first stage, which takes the batch.
    """

    def __init__(self, stage: Stage, stage_name: str, params: Any, trains: Sequence[bool], takes_batch: bool) -> None:
        super().__init__()
        leaves, self._containers = tree.flatten(params)
        self._stage, self._stage_name, self._takes_batch = stage, stage_name, takes_batch
        # nn.Parameter(leaf) shares its memory with the leaf. Leaves that are no tensors stay in the pytree only.
        self._leaves = [
            nn.Parameter(leaf, requires_grad=is_trained) if isinstance(leaf, Tensor) else leaf
            for leaf, is_trained in zip(leaves, trains, strict=True)
        ]
        for path, leaf in zip(self._containers.paths(), self._leaves, strict=True):
            if isinstance(leaf, nn.Parameter):
                _register_param(self, ".".join(map(str, path)) or "params", leaf)

    def params(self) -> Any:
        """Return the parameters in the containers that the stage function takes."""
        return tree.unflatten(self._containers, self._leaves)

    def grads(self) -> Any:
        """Return the accumulated gradients, in the containers of the params; None for a leaf without."""
        return tree.unflatten(self._containers, [getattr(leaf, "grad", None) for leaf in self._leaves])

    def forward(self, *inputs: Tensor, **keywords: Any) -> Tensor | tuple[Tensor, ...]:
        """Return the stage's output; keywords are the inputs of a batch that is a dict."""
        # Torch passes the keywords to all stages of a rank, and only the first stage of the pipeline wants them.
        x: Any = inputs[0] if len(inputs) == 1 else inputs
        if self._takes_batch and keywords:
            if inputs:
                raise TypeError("the inputs of a batch are one or several tensors, or a dict as keywords; found both.")
            x = keywords
        y = self._stage.forward(self.params(), x)
        if isinstance(y, Tensor) or (type(y) is tuple and len(y) > 1 and all(isinstance(leaf, Tensor) for leaf in y)):  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
            return y  # pyright: ignore[reportUnknownVariableType]
        description = f"one {type(y).__name__}"
        if type(y) is tuple:
            description = f"a tuple of {', '.join(type(leaf).__name__ for leaf in y) or 'nothing'}"  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        raise TypeError(
            f"{self._stage_name} returns {description}; torch's runtime passes on a tensor or a tuple of two or more."
        )

    def backward(self, run: Callable[[], Any]) -> Any:
        """Run a backward pass of the stage."""
        # A stage that recomputes reads the parameters of its net again: bind this module's in their place meanwhile.
        with_params_bound = self._stage.with_params_bound
        return run() if with_params_bound is None else with_params_bound(self.params(), run)


class _PipelineStage(PipelineStage):
    """Torch's stage, made safe for stages with embeddings, and for stages that recompute in their backward."""

    submod: TorchStageModule

    def _to_tensor(self, arg: Any) -> Tensor:
        # Torch takes uninitialized memory, and an embedding fails for such indices.
        example = super()._to_tensor(arg)
        with torch.no_grad():
            return example if isinstance(arg, Tensor) else example.zero_()

    def backward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        return self.submod.backward(lambda: super(_PipelineStage, self).backward_maybe_with_nosync(*args, **kwargs))


def build_stages(
    model: Model, params: Sequence[Any], placement: Sequence[int], group: ProcessGroup | None, device: Any
) -> list[PipelineStage]:
    """Return the stages of this process, in order."""
    if not dist.is_initialized():
        raise ValueError("torch's stages are for processes that torch.distributed.init_process_group has joined.")
    ranks, group_size = 1 + max(placement), dist.get_world_size(group)
    if group_size != ranks:
        raise ValueError(f"the program has {ranks} ranks and the process group {group_size} processes; start as many.")
    local_stages = [stage for stage, rank in enumerate(placement) if rank == dist.get_rank(group)]
    checked_params = _local_params(model, params, local_stages)
    modules: dict[int, TorchStageModule] = {}
    for stage_index in local_stages:
        trains = trainable_bundle_leaves(model, stage_index, 0, checked_params[stage_index])
        modules[stage_index] = TorchStageModule(
            model.stages[stage_index],
            model.label_of(stage_index),
            checked_params[stage_index],
            trains,
            stage_index == 0,
        )
    common_device = _common_device(modules, device)
    return [
        _PipelineStage(module, stage_index, len(placement), common_device, group=group)
        for stage_index, module in modules.items()
    ]


def _refuse_model(model: Model) -> None:
    """Raise ValueError for a stage that asks for more than the tensors that the stage before returns."""
    for stage_index in range(len(model.stages)):
        plain_input = stage_index - 1 if stage_index else "batch"
        if model.inputs[stage_index] != plain_input:
            raise ValueError(
                f"{model.label_of(stage_index)} takes {model.inputs[stage_index]!r}; torch's runtime passes it "
                f"{'the output of the stage before' if stage_index else 'the batch'}. Pass values on in tuples, "
                f"{_USE_FPIPE}"
            )
    # Each stage's module keeps its own copy of a tied leaf, and its own `.grad`.
    for leaf, tied_leaf, *_ in model.tied_uses:
        raise ValueError(
            f"leaf {leaf.name!r} of stage {leaf.stage} is tied to {tied_leaf.name!r} of stage {tied_leaf.stage}; put "
            f"both into one stage, {_USE_FPIPE}"
        )
    for stage_index, stage in enumerate(model.stages):
        stage_name = model.label_of(stage_index)
        # Torch runs each stage once on zeros, to learn shapes, before the first step.
        if "state" in stage.keywords:
            raise ValueError(
                f"{stage_name} has module state, which torch's runtime updates once too often. Call eval() before the "
                f"net is cut, {_USE_FPIPE}"
            )
        if stage.keywords:
            raise ValueError(
                f"{stage_name} asks for {', '.join(map(repr, sorted(stage.keywords)))}; torch's runtime passes a stage "
                f"only its input. Write it without, {_USE_FPIPE}"
            )
        if getattr(stage.forward, "random_modules", list[str])():
            raise ValueError(
                f"{label_with_random_modules(model, stage_index)} draws random numbers; torch's runtime has no key. "
                f"Call eval() on it or set its probability to 0, {_USE_FPIPE}"
            )
        if stage.aux_loss:
            raise ValueError(
                f"{stage_name} returns a loss of its own; torch's runtime has the last stage's only. Pass it on "
                f"and add it there, {_USE_FPIPE}"
            )


def _local_params(model: Model, params: Any, local_stages: Sequence[int]) -> Sequence[Any]:
    if isinstance(params, tuple | list) and len(params) == len(model.stages):  # pyright: ignore[reportUnknownArgumentType]
        for missing in (stage_index for stage_index in local_stages if params[stage_index] is None):
            raise ValueError(f"params of stage {missing} is None, and the stage runs in this process.")
        params = tuple({} if stage is None else stage for stage in params)  # pyright: ignore[reportUnknownVariableType]
        model = replace(model, frozen=frozenset(leaf for leaf in model.frozen if leaf[0] in local_stages))
    checked_params = check_params(model, params)
    for stage_index in local_stages:
        names = model.stages[stage_index].names
        if names is not None:
            check_keys(checked_params[stage_index], [leaf[0] for leaf in names], f"params of stage {stage_index}")
    return checked_params


def _common_device(modules: dict[int, TorchStageModule], device: Any) -> torch.device:
    leaves = [(stage, name, leaf) for stage, module in modules.items() for name, leaf in module.named_parameters()]
    # Torch allocates the receive buffers of all stages of a process on one device.
    first_device = leaves[0][2].device if leaves else torch.device("cpu")
    common_device = first_device if device is None else torch.device(device)
    for stage_index, name, leaf in leaves:
        if leaf.device.type != common_device.type or common_device.index not in (None, leaf.device.index):
            raise ValueError(
                f"{name!r} of stage {stage_index} is on {leaf.device}, and the stages run on {common_device}: move "
                "it there first."
            )
    return common_device


def _register_param(module: nn.Module, name: str, leaf: nn.Parameter) -> None:
    *path, leaf_name = name.split(".")
    for child_name in path:
        if child_name not in dict(module.named_children()):
            module.add_module(child_name, nn.Module())
        module = module.get_submodule(child_name)
    module.register_parameter(leaf_name, leaf)


class ProgramRuntime(TableRuntime):
    """Torch's runtime for a program, which refuses a batch that makes uneven microbatches.

    Attributes:
        stages: the stages of this process, in order.
    """

    def __init__(
        self,
        stages: list[PipelineStage],
        microbatches: int,
        loss: Callable[[Any, Any], Tensor],
        compute: str,
        comms: str,
    ) -> None:
        # scale_grads=True would divide the sums at each step, and with them what earlier steps have added.
        super().__init__(stages, microbatches, loss_fn=loss, scale_grads=False)
        self.stages = stages
        self.microbatches = microbatches
        load_tables(self, compute, comms)

    def step(self, *inputs: Tensor, target: Tensor | None = None, **keywords: Any) -> Any:
        """Run torch's step; the inputs of a tuple are arguments, and the inputs of a dict are keywords."""
        if any(stage.is_last for stage in self.stages) and not isinstance(target, Tensor):
            type_name = type(target).__name__
            raise ValueError(f"torch's runtime takes one tensor as target; found {type_name}.")
        for leaf in (*inputs, *keywords.values(), target):
            if isinstance(leaf, Tensor) and leaf.ndim and len(leaf) % self.microbatches:
                raise ValueError(
                    f"torch's runtime needs equal microbatches; found {len(leaf)} rows for {self.microbatches}. Hand "
                    f"in a multiple of {self.microbatches} rows, {_USE_FPIPE}"
                )
        return super().step(*inputs, target=target, **keywords)


def refuse_unsupported_order(program: Program, model: Model) -> None:
    """Refuse a program or a model that torch's stages cannot run."""
    check_match(program, model)
    _refuse_model(model)
    refuse_unsupported_ops(program)


def refuse_unsupported(program: Program, model: Model) -> None:
    """Refuse a program that torch's runtime cannot run, or would run in another way."""
    refuse_unsupported_order(program, model)
    _refuse_loss(model)
    # Each check below is of something that the runtime would do in silence, with other results.
    for program_input in program.inputs:
        home = program.placement[program_input.value.stage or 0]
        if program_input.value.name == "params" and program_input.homes != (home,):
            raise ProgramError(
                f"{program_input.value} has its home on ranks {program_input.homes} and its stage on rank {home}. "
                f"Leave out place(homes=), {_USE_FPIPE}"
            )
    for op in program.ops:
        options = dict(op.options)
        for option in options.keys() - {"index", "count"} if op.kind == "SPLIT" else ():
            raise ProgramError(
                f"{op.cell} has {option}={options[option]!r}; torch's runtime cuts equal microbatches of "
                f"rows. Say fpipe.split({program.microbatches}), {_USE_FPIPE}"
            )
        if "cast" in options:
            raise ProgramError(
                f"{op.cell} casts to {options['cast']}, and torch's runtime does not. Leave out communicate(cast=), "
                f"{_USE_FPIPE}"
            )
    names = [program_input.name for program_input in program.outputs]
    merged_stages = {name.stage for name in names if name.name == "grads" and name.microbatch is None}
    if merged_stages != set(range(program.stages)):
        raise ProgramError(
            "this program does not sum gradients over microbatches, as torch's runtime does; put fpipe.merge() behind "
            "the schedule."
        )
    for unsupported in (name for name in names if name.name not in ("loss", "outputs", "grads", "losses")):
        raise ProgramError(
            f"this program also gives {unsupported}; torch's runtime does not. Leave it out, {_USE_FPIPE}"
        )
    # Torch appends losses in the order of the last stage's forwards, and takes the i-th for that of microbatch i.
    last_forwards = [
        op.microbatch or 0 for op in parts_of(program.ops) if op.kind == "F" and op.stage == program.stages - 1
    ]
    for late_microbatch in (later for earlier, later in pairwise(last_forwards) if later < earlier):
        raise ProgramError(
            f"{program.stages - 1}F{late_microbatch} comes after a later microbatch's forward; torch's runtime needs "
            f"ascending losses. Reorder them, {_USE_FPIPE}"
        )


def _refuse_loss(model: Model) -> None:
    if model.loss is None or not model.has_loss:
        raise ValueError(
            f"this model has no loss=, which torch's runtime computes. Say loss=lambda y, target: y, {_USE_FPIPE}"
        )
    if model.aux or model.reduction == "count":
        extra_result = "auxiliary results" if model.aux else "a count"
        raise ValueError(
            f"the loss also returns {extra_result}; torch's runtime takes a loss alone. Return no more, {_USE_FPIPE}"
        )
