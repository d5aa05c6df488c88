"""Train transformers' models as pipelines with their own Trainer.

Trainer(net, args, train_dataset=..)    -->    PipelineTrainer(net, args, train_dataset=.., pipeline=Pipeline("zb_h1"))

Data, optimizer, learning rates, logging, callbacks, evaluation and checkpoints stay the Trainer's. Only the gradients
of a batch are those of a program, which the processes of `torchrun` run together: each holds some of the stages, and
groups of `ranks` processes are replicas that train on rows of their own.
"""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

try:
    import transformers
    from accelerate.data_loader import prepare_data_loader  # pyright: ignore[reportMissingTypeStubs]
except ImportError as error:
    raise ModuleNotFoundError(
        f"the Trainer of pipelines needs {error.name}: pip install transformers accelerate."
    ) from None

from fpipe import tree
from fpipe.derived.freeze import evaluating
from fpipe.integrations.pretrained import Inputs as Inputs
from fpipe.integrations.pretrained import Pipeline as Pipeline
from fpipe.integrations.pretrained import cut_net
from fpipe.integrations.pretrained import from_pretrained_by_stage as from_pretrained_by_stage
from fpipe.limits import checked_init
from fpipe.meaning.purity.keys import fold_in
from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Step
from fpipe.models.parameters.gather import gather_state_dict
from fpipe.models.parameters.grads import assign_grads, global_norm
from fpipe.models.parameters.params import local_params
from fpipe.models.parameters.sources import source_of
from fpipe.runtimes.build import build
from fpipe.transforms.split_backward import forward_only
from fpipe.transforms.training import program as program_of


@checked_init
class PipelineTrainer(transformers.Trainer):
    """A Trainer that computes its gradients by a pipeline.

    The model is cut at the first batch. Its loss is its own: labels are among its inputs. The loss of a step is the sum
    over its labels divided by their number in the whole step, over microbatches, accumulated batches and replicas, as
    the Trainer has it for models that take `num_items_in_batch`; for others it is the mean of the microbatches' means.

    Args:
        arguments: those of `transformers.Trainer`, by position or keyword.
        pipeline: how a batch is pipelined.

    Raises:
        ValueError: an option of the Trainer that a pipeline does not have (`compute_loss_func`, fp16, FSDP, DeepSpeed),
            logits in several processes, a net with module state such as a batch norm, or numbers of processes that do
            not fit.
    """

    def __init__(self, *arguments: Any, pipeline: Pipeline | None = None, **options: Any) -> None:
        self.pipeline = pipeline or Pipeline()
        super().__init__(*arguments, **options)
        _refuse_options(self)
        size = self.args.world_size
        self.ranks = self.pipeline.ranks or (size if size > 1 else self.pipeline.stages or 1)
        self.replicas, self.rank = 1, 0
        self.mesh: Any = None
        if size > 1:
            if size % self.ranks:
                raise ValueError(f"{size} processes are no pipelines of {self.ranks} ranks.")
            self.replicas = size // self.ranks
            device_type = self.args.device.type
            self.mesh = init_device_mesh(device_type, (self.replicas, self.ranks), mesh_dim_names=("dp", "pp"))
            self.rank = self.mesh.get_local_rank("pp")
            # The Trainer then neither wraps the net by DistributedDataParallel nor averages its gradients.
            self.is_distributed_loading_by_transformers = True
        # By purpose and number of microbatches: the last batch of an epoch may have fewer rows.
        self._steps: dict[tuple[str, int], Step] = {}
        # The training step, and the number of the batch that it accumulates: the random key follows from both.
        self._batch_position = -1, 0

    # The Trainer divides numbers of rows and labels by the size of a group that shares a batch.
    def get_tp_size(self) -> int:
        """Return how many processes are handed the same rows: the ranks of a pipeline."""
        return self.ranks if self.args.world_size > 1 else 1

    def create_accelerator_and_postprocess(self) -> None:
        """Let the accelerator deal rows to replicas, and not to each process."""
        super().create_accelerator_and_postprocess()
        if self.args.world_size > 1:
            accelerator: Any = self.accelerator
            accelerator.prepare_data_loader = self._prepare_data_loader

    def _prepare_data_loader(self, loader: Any, **_: Any) -> Any:
        accelerator: Any = self.accelerator
        replica = 0 if self.mesh is None else self.mesh.get_local_rank("dp")
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            num_processes=self.replicas,
            process_index=replica,
            put_on_device=True,
            rng_types=accelerator.rng_types.copy(),
            even_batches=accelerator.even_batches,
            use_seedable_sampler=accelerator.use_seedable_sampler,
            data_seed=accelerator.dataloader_config.data_seed,
        )
        accelerator._dataloaders.append(prepared)
        return prepared

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if not any(parameter.is_meta for parameter in model.parameters()):
            super()._move_model_to_device(model, device)

    def _sync_replicated_trainable_parameters(self, model: nn.Module) -> None:
        """Do nothing: the first step compares the parameters of replicas."""

    def training_step(self, model: nn.Module, inputs: Inputs, num_items_in_batch: Any = None) -> Tensor:
        """Add a batch's gradients to the net's, and return its share of the step's loss."""
        step, number = self._batch_position
        self._batch_position = (step, number + 1) if step == self.state.global_step else (self.state.global_step, 0)
        model.train()
        # Schedule-free optimizers have a mode.
        getattr(self.optimizer, "train", _do_nothing)()
        result = self._run("train", inputs, num_items_in_batch)
        grads = result.grads
        loss = result.loss
        if num_items_in_batch is None or not self.model_accepts_loss_kwargs:
            # Means of batches: their mean is that of the step.
            scale = 1 / self.current_gradient_accumulation_steps
            grads = tree.tree_map(partial(_scaled, scale=scale), grads)
            loss = loss * scale
        assign_grads(self.model, grads, add=True)
        return loss.to(self.args.device)

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Inputs,
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return the loss of a batch that is evaluated, and in one process the net's own logits and labels."""
        if not prediction_loss_only:
            if self.mesh is not None:
                raise ValueError("logits and metrics need one process: save the net and evaluate it there.")
            return super().prediction_step(model, dict(inputs), prediction_loss_only, ignore_keys)
        model.eval()
        labels = inputs.get("labels")
        count = None
        if self.model_accepts_loss_kwargs and isinstance(labels, Tensor):
            counted = labels[..., 1:] if self._loss_shifts_labels else labels
            count = counted.ne(-100).sum()
            if self.replicas > 1:
                dist.all_reduce(count, group=self.mesh.get_group("dp"))
        return self._run("evaluate", inputs, count).loss.to(self.args.device), None, None

    def _run(self, purpose: str, inputs: Inputs, item_count: Any) -> Result:
        """Run the step for a purpose, "train" or "evaluate", on a batch; build it for the first batch of its size."""
        batch = dict(self._prepare_inputs(dict(inputs)))
        if item_count is not None and self.model_accepts_loss_kwargs:
            batch["num_items_in_batch"] = torch.as_tensor(item_count, dtype=torch.float32, device=self.args.device)
        rows = next(len(leaf) for leaf in batch.values() if isinstance(leaf, Tensor) and leaf.ndim)
        count = min(self.pipeline.microbatches, rows)
        if (purpose, count) not in self._steps:
            self._steps[purpose, count] = self._build(purpose, count, batch)
        key = fold_in(fold_in(self.args.seed, self._batch_position[0]), self._batch_position[1])
        return self._steps[purpose, count](self._params, (batch, None), key=key)

    def _build(self, purpose: str, count: int, batch: dict[str, Any]) -> Step:
        """Cut the net at its first batch, and build the step of a purpose for batches of so many microbatches."""
        if not self._steps:
            self._cut = cut_net(_unwrapped(self.model), self.pipeline, self.ranks, batch)
        model, params, state = self._cut
        if any(state or ()):
            names = ", ".join(name for stage in state for name in stage)
            raise ValueError(f"PipelineTrainer keeps no module state, and the net has {names}.")
        axis = "dp" if self.replicas > 1 else None
        program = self.pipeline.transform(self.ranks, count, axis)(program_of(model))
        if purpose == "evaluate":
            program, model = forward_only()(program), evaluating(model)
        options = dict(self.pipeline.options or {})
        if self.args.bf16:
            options["autocast"] = torch.bfloat16
        if self.mesh is not None:
            example = params, (batch, None)
            options |= {"runtime": "distributed", "mesh": self.mesh, "example": example, "broadcast": True}
            params, all_params = local_params(program, params, self.rank), params
            _free_other_stages(_unwrapped(self.model), all_params, params)
        self.program, self._params = program, params
        return build(program, model, **options)

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        norm = self._get_grad_norm(model)
        nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        parameters = dict(_unwrapped(self.model).named_parameters(remove_duplicate=False))
        grads = [stage and {name: parameters[name].grad for name in stage} for stage in self._params]
        return global_norm(tuple(grads), model=self._cut[0], mesh=self.mesh)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole net on rank 0, in the format of `from_pretrained`."""
        if self.mesh is None or not self._steps:
            super().save_model(output_dir, _internal_call)
            return
        state_dict = gather_state_dict(self.program, self._params, mesh=self.mesh, model=self._cut[0])
        if self.args.should_save:
            self._save(output_dir, state_dict=state_dict)
        dist.barrier()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.mesh is not None and self.mesh.get_local_rank("dp") == 0:
            os.makedirs(output_dir, exist_ok=True)
            optimizer: Any = self.optimizer
            torch.save(optimizer.state_dict(), Path(output_dir, f"optimizer-rank{self.rank}.pt"))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        files = [] if checkpoint is None else sorted(Path(checkpoint).glob("optimizer-rank*.pt"))
        # States go by the number of their parameter, which is the same on all ranks: any number of them may go on.
        saved = [torch.load(file, weights_only=True, map_location="cpu") for file in files]
        if saved:
            optimizer: Any = self.optimizer
            parameters = [leaf for group in optimizer.param_groups for leaf in group["params"]]
            states = {number: state for part in saved for number, state in part["state"].items()}
            local = {number: state for number, state in states.items() if _has_values(parameters[number])}
            optimizer.load_state_dict(saved[0] | {"state": local})

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        net = _unwrapped(self.model if model is None else model)
        if all(map(_has_values, net.parameters())):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        tensors = source_of(resume_from_checkpoint)
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                if _has_values(parameter):
                    parameter.copy_(tensors.read_tensors([name])[name])


def _do_nothing() -> None:
    """Stand in for a method that an optimizer lacks."""


def _scaled(grad: Tensor | None, scale: float) -> Tensor | None:
    return None if grad is None else grad * scale


def _has_values(parameter: Tensor) -> bool:
    """Whether a parameter has a value for each element: not one of another rank's stage."""
    return not parameter.is_meta and parameter.untyped_storage().nbytes() >= parameter.nbytes


def _free_other_stages(net: nn.Module, params: Any, rank_params: Any) -> None:
    """Put one NaN in place of the parameters of other ranks' stages: their values would go stale and take memory."""
    parameters = dict(net.named_parameters(remove_duplicate=False))
    local_leaves = {parameters[name] for stage in rank_params for name in stage or ()}
    for leaf in {parameters[name] for stage in params for name in stage} - local_leaves:
        if not leaf.is_meta:
            # The optimizer has the parameter itself, which cannot move to the meta device.
            leaf.data = leaf.new_full((), float("nan")).expand(leaf.shape)


def _unwrapped(model: Any) -> nn.Module:
    return getattr(model, "_orig_mod", model)


def _refuse_options(trainer: Any) -> None:
    """Raise ValueError for options of a Trainer that a pipeline does not have."""
    arguments = trainer.args
    refused = {
        "compute_loss_func": trainer.compute_loss_func is not None,
        "fp16": arguments.fp16,
        "fsdp": bool(arguments.fsdp),
        "deepspeed": bool(arguments.deepspeed),
        "torch_compile": arguments.torch_compile,
    }
    for name in (name for name, is_on in refused.items() if is_on):
        raise ValueError(f"PipelineTrainer has no {name}: leave it out.")
