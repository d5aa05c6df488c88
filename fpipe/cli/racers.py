"""Build the steps that race: eager loops, torch's pipelines and FSDP2, and fpipe, on one device or on several ranks.

A step returns its gradients by the net's names, or the parameters that it has updated with AdamW and clipped gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fpipe.cli.race_nets import MICROBATCHES, STAGES
from fpipe.meaning.optimizers.optimizer_state import optimizer_state
from fpipe.models.from_sequential import from_sequential
from fpipe.models.parameters.first_values import shard_params
from fpipe.models.parameters.params import local_params
from fpipe.program import Program
from fpipe.runtimes.build import build
from fpipe.schedules.basic import one_f_one_b
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import shard
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program
from fpipe.transforms.update import update

Step = Callable[[], dict[str, Tensor]]
LEARNING_RATE, CLIP = 1e-3, 1.0


@dataclass(frozen=True)
class Case:
    """A net and its batch.

    Attributes:
        net, batch: what a step trains, and on which rows.
        dtype: the dtype of autocast, if any.
        mesh: of several ranks, the mesh of replicas ("dp") and of the ranks of each ("pp").
    """

    net: nn.Sequential
    batch: tuple[Tensor, Tensor]
    dtype: torch.dtype | None
    mesh: DeviceMesh | None = None

    @property
    def device(self) -> torch.device:
        """The device of the batch."""
        return self.batch[0].device

    @cached_property
    def compiled(self) -> Any:
        """The net compiled by torch, once for all steps that call it."""
        return torch.compile(self.net)

    def autocast(self) -> Any:
        """Return a context of autocast, which casts each weight once for all microbatches of an eager step."""
        return nullcontext() if self.dtype is None else torch.autocast(self.device.type, self.dtype)

    def under_autocast(self, step: Step) -> Step:
        """Return a step under autocast."""

        def run() -> dict[str, Tensor]:
            with self.autocast():
                return step()

        return run


@dataclass(frozen=True)
class Racer:
    """A way to run a step.

    Attributes:
        name: what the table calls it.
        against: the word of `--against` that asks for it; "fpipe" is always there.
        make: makes the step of a case, with an update or without.
        ranks: the processes that it needs.
        bits: whether its gradients are those of the eager loop bit by bit; else they are to rounding.
        options: options of `make`.
        updates: whether it can end with an update.
    """

    name: str
    against: str
    make: Callable[..., Step]
    ranks: int = 1
    bits: bool = True
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    updates: bool = True

    def step(self, case: Case, has_update: bool) -> Step:
        """Return the step of a case; raise an error with the reason if there is none."""
        return self.make(case, has_update, **self.options)


def eager_step(case: Case, has_update: bool, *, compile: bool = False, capture: bool = False, rule: Any = None) -> Step:
    """Write a step without a library: each microbatch forward and backward, then the update.

    Args:
        case, has_update: what the step does.
        compile: whether torch.compile compiles the net.
        capture: whether the step is captured by hand.
        rule: options of torch.optim.AdamW, instead of those for its fused kernel.
    """
    if capture and case.device.type != "cuda":
        raise ValueError("a CUDA graph needs a CUDA device.")
    net = case.compiled if compile else case.net

    def add_gradients() -> None:
        for x, target in zip(*(tensor.tensor_split(MICROBATCHES) for tensor in case.batch), strict=True):
            (F.mse_loss(net(x), target) * (1 / MICROBATCHES)).backward()

    # Captured kernels read the number of the step from the device, if torch.optim is told so.
    step = _training_step(case, has_update, add_gradients, rule or {"fused": True, "capturable": capture})
    return capture_step(step) if capture else step


def _training_step(case: Case, has_update: bool, add_gradients: Callable[[], None], rule: Any) -> Step:
    named = dict(case.net.named_parameters())
    options: Any = {"lr": LEARNING_RATE, **rule}
    optimizer = torch.optim.AdamW([*named.values()], **options)

    def step() -> dict[str, Tensor]:
        optimizer.zero_grad()
        add_gradients()
        if not has_update:
            return {name: parameter.grad for name, parameter in named.items() if parameter.grad is not None}
        nn.utils.clip_grad_norm_(named.values(), CLIP)
        optimizer.step()
        return {name: parameter.detach() for name, parameter in named.items()}

    return case.under_autocast(step)


def capture_step(step: Step) -> Step:
    """Capture a step by hand as one CUDA graph, after the warm-ups that torch asks for."""
    caller_stream, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(caller_stream)
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    caller_stream.wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()

    def replay() -> dict[str, Tensor]:
        graph.replay()
        return results

    return replay


def torch_step(case: Case, has_update: bool) -> Step:
    """Build the step of torch's pipeline runtime with all stages on this rank, which passes tensors on unsent."""
    from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]
    from torch.distributed.pipelining import PipelineStage, ScheduleInterleaved1F1B

    # The group of this process alone. It sends nothing, but torch asks for one that knows the device.
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if case.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    size = len(case.net) // STAGES
    parts: list[Any] = [case.net[start : start + size] for start in range(0, len(case.net), size)]
    stages: list[Any] = [PipelineStage(part, index, STAGES, case.device) for index, part in enumerate(parts)]
    schedule = ScheduleInterleaved1F1B(stages, MICROBATCHES, loss_fn=F.mse_loss)
    add_gradients = partial(schedule.step, case.batch[0], target=case.batch[1], return_outputs=False)
    return _training_step(case, has_update, add_gradients, {"fused": True})


def _pipeline(microbatches: int, ranks: int, *transforms: Transform) -> Transform:
    return chain(split(microbatches), one_f_one_b(ranks), merge(outputs=False), *transforms)


def fpipe_step(case: Case, has_update: bool, **options: Any) -> Step:
    """Build fpipe's step; with an update, parameters and state are donated."""
    model, params, _ = from_sequential(case.net, stages=STAGES, loss=F.mse_loss)
    updates = [update("AdamW", clip=CLIP)] if has_update else []
    program = _pipeline(MICROBATCHES, STAGES, *updates)(base_program(model))
    step = build(program, model, donate=has_update, **options)
    if not has_update:
        return case.under_autocast(lambda: _by_name(step(params, case.batch).grads))
    current: list[Any] = [params, optimizer_state(program, params)]

    def train() -> dict[str, Tensor]:
        result = step(current[0], case.batch, opt=current[1], lr=LEARNING_RATE)
        current[:] = result.params, result.opt
        return _by_name(result.params)

    return case.under_autocast(train)


def _by_name(trees: Any) -> dict[str, Tensor]:
    return {name: leaf for stage in trees if stage is not None for name, leaf in stage.items()}


def sharded_step(case: Case, has_update: bool) -> Step:
    """Build fpipe's step of this rank on shards of its stage, each replica with its share of the microbatches."""
    mesh: Any = case.mesh
    ranks = mesh.size(1)
    model, params, _ = from_sequential(case.net, stages=ranks, loss=F.mse_loss)
    program: Program = _pipeline(MICROBATCHES // mesh.size(0), ranks, shard())(base_program(model))
    shards = shard_params(local_params(program, params, mesh.get_local_rank("pp")), mesh["dp"])
    batch = _replica_batch(case, mesh)
    with case.autocast():
        step = build(program, model, runtime="distributed", mesh=mesh, example=(shards, batch))
    return case.under_autocast(lambda: _by_name(step(shards, batch).grads))


def fsdp_step(case: Case, has_update: bool) -> Step:
    """Build the step of this rank by FSDP2 on each block, under torch's 1F1B where a replica has several ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    mesh: Any = case.mesh
    ranks, rank = mesh.size(1), mesh.get_local_rank("pp")
    size = len(case.net) // ranks
    part: Any = case.net[rank * size : (rank + 1) * size]
    x, target = _replica_batch(case, mesh)
    # Gathered once a step, as ours: resharding would gather again for each microbatch.
    for block in part:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=False)
    fully_shard(part, mesh=mesh["dp"], reshard_after_forward=False)
    stage = PipelineStage(part, rank, ranks, case.device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES // mesh.size(0), loss_fn=F.mse_loss)

    def step() -> dict[str, Tensor]:
        part.zero_grad()
        inputs = (x,) if rank == 0 else ()
        targets: dict[str, Any] = {"target": target} if rank == ranks - 1 else {}
        schedule.step(*inputs, **targets, return_outputs=False)
        return {name: parameter.grad for name, parameter in part.named_parameters() if parameter.grad is not None}

    return case.under_autocast(step)


def _replica_batch(case: Case, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    x, target = (tensor.chunk(mesh.size(0))[mesh.get_local_rank("dp")] for tensor in case.batch)
    return x, target


RACERS = (
    Racer("eager loop", "eager", eager_step),
    Racer("eager loop, captured", "eager", eager_step, options={"capture": True}),
    Racer("torch.compile", "compile", eager_step, bits=False, options={"compile": True}),
    Racer("torch.compile, captured", "compile", eager_step, bits=False, options={"compile": True, "capture": True}),
    Racer("torch pipelining", "torch", torch_step),
    Racer("fpipe", "fpipe", fpipe_step),
    Racer("fpipe, graph", "fpipe", fpipe_step, options={"graph": True}),
    Racer("fpipe, compile", "compile", fpipe_step, bits=False, options={"compile": True}),
    Racer("fpipe, compile + graph", "compile", fpipe_step, bits=False, options={"compile": True, "graph": True}),
    *(
        Racer(f"{name}, {count} ranks", "fsdp2", make, ranks=count, updates=False)
        for count in (2, 4)
        for name, make in (("FSDP2", fsdp_step), ("fpipe shards", sharded_step))
    ),
)
"""All racers; fpipe's own compiled steps race where torch.compile does, and its shards where FSDP2 does."""
