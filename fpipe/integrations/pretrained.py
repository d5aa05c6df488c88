"""Describe how a net of transformers is pipelined, cut it, and load the stages of one process.

Pipeline("zb_h1", ranks=2)    -->    cut_net(net, pipeline, 2, batch)    -->    the values of this rank's stages
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from fpipe.limits import check_whole_number, checked, checked_init
from fpipe.model import Model
from fpipe.models.from_module import from_module
from fpipe.models.parameters.load import load_params
from fpipe.schedules.registry import get
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.data_parallel import data_parallel
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split
from fpipe.transforms.training import program as program_of

Inputs = Mapping[str, Any]


@checked_init
@dataclass(frozen=True)
class Pipeline:
    """How a Trainer's batch is pipelined.

    Args:
        schedule: a schedule by name, or a function from a number of ranks to a transform.
        ranks: processes of one pipeline; by default all. Under `torchrun` with more processes there are replicas. In
            one process the program is run by it alone.
        stages: stages of the net, by default one a rank.
        microbatches: of each batch that the Trainer hands in; `per_device_train_batch_size` is that batch's rows. One
            of fewer rows has a microbatch for each.
        transforms: what comes between split and schedule, such as `fpipe.checkpoint()`.
        cuts: paths of the modules after which stages end, instead of equal parts.
        options: further arguments of `fpipe.build`.

    >>> Pipeline("zb_h1", ranks=2, microbatches=8).stages is None
    True
    """

    schedule: str | Callable[[int], Transform] = "one_f_one_b"
    ranks: int | None = None
    stages: int | None = None
    microbatches: int = 4
    transforms: Sequence[Transform] = ()
    cuts: Sequence[str] | None = None
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        for name in ("ranks", "stages", "microbatches"):
            if getattr(self, name) is not None:
                check_whole_number(name, getattr(self, name))
        if isinstance(self.schedule, str):
            get(self.schedule)

    def transform(self, ranks: int, microbatches: int, replica_axis: str | None) -> Transform:
        """Return the transform of the program of a batch of so many microbatches."""
        schedule = get(self.schedule) if isinstance(self.schedule, str) else self.schedule
        parts = [split(microbatches), *self.transforms, schedule(ranks), merge()]
        return chain(*parts, *([] if replica_axis is None else [data_parallel(replica_axis)]))


@checked
def from_pretrained_by_stage(
    name_or_folder: str | os.PathLike[str],
    pipeline: Pipeline,
    *,
    batch: Inputs,
    rank: int | None = None,
    net_class: Any = transformers.AutoModelForCausalLM,
    **options: Any,
) -> Any:
    """Load the stages of one rank of a pretrained net, and leave the others on the meta device.

    Only the bytes of these stages are read from the safetensors files. Buffers that a net computes, such as the
    frequencies of rotary embeddings, are those of its own `_init_weights`.

    Args:
        name_or_folder: a model on the hub, or a folder that `save_pretrained` wrote, in safetensors.
        pipeline: how the net is cut and placed, for a `PipelineTrainer`.
        batch: a batch, as the net takes it, with labels; values do not matter.
        rank: whose stages; by default those of this process.
        net_class: the class that makes the net of its configuration.
        options: for `net_class.from_config`, such as `dtype=torch.bfloat16`.

    Returns:
        The net, for `PipelineTrainer(net, .., pipeline=pipeline)`.

    Raises:
        ValueError: a parameter that the files lack or that has another shape.
        OSError: there is no such model or folder.
    """
    # 1. Make the net on meta, but for the buffers that it computes.
    folder = Path(name_or_folder)
    if folder.is_absolute() and not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {str(folder)!r}.")
    config = transformers.AutoConfig.from_pretrained(name_or_folder)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(str(name_or_folder), allow_patterns=["*.safetensors", "*.json"]))
    with torch.device("meta"):
        net: Any = net_class.from_config(config, **options)
    for module in net.modules():
        buffers = [name for name, buffer in module.named_buffers(recurse=False) if buffer.is_meta]
        for name in buffers:
            module._buffers[name] = torch.empty_like(module._buffers[name], device="cpu")
        if buffers:
            net._init_weights(module)
    # 2. Cut it as the Trainer will, to know which parameters this rank's stages have.
    ranks = pipeline.ranks or (dist.get_world_size() if dist.is_initialized() else 1)
    inputs = dict(batch)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in inspect.signature(net.forward).parameters.values()):
        # As the Trainer asks whether a net divides its loss by a number of labels.
        inputs.setdefault("num_items_in_batch", torch.ones(()))
    model, _, _ = cut_net(net, pipeline, ranks, inputs)
    program = pipeline.transform(ranks, pipeline.microbatches, None)(program_of(model))
    rank = (dist.get_rank() if dist.is_initialized() else 0) % ranks if rank is None else rank
    # 3. Read these, and put each into every module that shares it.
    values = load_params(model, program, folder, rank)
    aliases: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in net.modules():
        for name, parameter in module.named_parameters(recurse=False):
            aliases.setdefault(parameter, []).append((module, name))
    parameters = dict(net.named_parameters(remove_duplicate=False))
    for path, value in ((path, value) for stage in values for path, value in (stage or {}).items()):
        leaf = nn.Parameter(value, parameters[path].requires_grad)
        for module, name in aliases[parameters[path]]:
            setattr(module, name, leaf)
    return net


def cut_net(net: nn.Module, pipeline: Pipeline, ranks: int, batch: Inputs) -> tuple[Model, Any, Any]:
    """Cut a net whose inputs have labels; with "num_items_in_batch" among them its losses are summed."""
    stage_ends: Any = {"cuts": pipeline.cuts} if pipeline.cuts else {"stages": pipeline.stages or ranks}
    reduction = "sum" if "num_items_in_batch" in batch else "mean"
    return from_module(net, batch=dict(batch), reduction=reduction, **stage_ends)
