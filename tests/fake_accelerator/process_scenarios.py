"""Steps of two processes, each with a rank on a fake device, like `scenarios.py` in one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import fpipe
from fpipe.ops import lane_of
from fpipe.runtimes.processes import collective_parts
from fpipe.tree import leaves
from tests.fake_accelerator import reports_of
from tests.fake_accelerator.group import NAME, QueuedWork
from tests.fake_accelerator.scenarios import (
    PARTS,
    ROWS,
    STEPS,
    WIDTH,
    DeviceTime,
    Transform,
    batch_of,
    differing_bits,
    net_of,
    pipeline_of,
    schedules,
    sgd_step,
    squares,
    train_by_sgd,
)

RunSteps = Callable[[torch.device], list[fpipe.Result]]


def mesh_of_two(*replica_dims: str, kind: str = "cpu") -> DeviceMesh:
    """Return a mesh of two processes: two ranks, or with `replica_dims` two replicas of one rank.

    Its groups are new, as work of a scenario that failed may still be under way in others. DTensors need a mesh whose
    `kind` is their device's.
    """
    group: Any = dist.new_group([0, 1], backend=NAME)
    if not replica_dims:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    alone: Any = [dist.new_group([rank], backend=NAME) for rank in (0, 1)][dist.get_rank()]
    return DeviceMesh.from_group([alone, group], kind, mesh=[[0, 1]], mesh_dim_names=("pp", *replica_dims))


def trained(rank: int, stages: int, pipeline: Transform, in_turn: bool = False, **options: Any) -> list[str]:
    """Train this rank for several steps by SGD, all on one stream or each on a new one (`in_turn`)."""
    device = torch.device("fake", rank)
    net, batch = net_of(stages).to(device), tuple(tensor.to(device) for tensor in batch_of())
    twin = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    program = pipeline(fpipe.program(model))
    mesh = mesh_of_two()
    local_params = fpipe.local_params(program, params, rank)
    local_stages = [stage for stage, stage_params in enumerate(local_params) if stage_params]
    local_leaves = leaves([local_params[stage] for stage in local_stages])

    def run() -> None:
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch), **options)
        last_stream = torch.accelerator.current_stream(device)
        for _ in range(STEPS):
            stream = torch.Stream(device) if in_turn else last_stream
            stream.wait_stream(last_stream)
            with stream:
                result = step(local_params, batch)
                sgd_step(local_leaves, leaves([result.grads[stage] for stage in local_stages]))
            last_stream = stream

    reports = reports_of(run)
    train_by_sgd(twin, batch)
    expected = [param for stage in local_stages for param in twin[stage].parameters()]
    return reports + differing_bits(local_leaves, expected)


REMAINING = {"calls": 0}


@torch.library.custom_op("fpipe_tests::last_but", mutates_args=())
def raise_at_last_call(x: Tensor) -> Tensor:
    """Copy the input; raise at the call that brings `REMAINING["calls"]` to zero."""
    REMAINING["calls"] -= 1
    if REMAINING["calls"] == 0:
        raise KeyError("too often")
    return x.clone()


raise_at_last_call.register_fake(torch.empty_like)
raise_at_last_call.register_autograd(lambda ctx, dy: dy)


def failed(rank: int, failing_rank: int) -> list[str]:
    """Let an error of one rank end a step while messages are in flight that nobody will wait for."""
    device = torch.device("fake", rank)
    model = fpipe.from_functions([lambda p, x: raise_at_last_call(x * p["w"])] * 2, squares)
    program = pipeline_of(schedules.one_f_one_b(2))(fpipe.program(model))
    params = tuple({"w": torch.full((WIDTH,), 2.0, device=device)} for _ in range(2))
    batch = tuple(tensor.to(device) for tensor in batch_of())
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh_of_two(), example=(params, batch))
    local_params, messages = fpipe.local_params(program, params, rank), list[str]()
    step(local_params, batch)

    def run() -> None:
        REMAINING["calls"] = 2 if rank == failing_rank else 0
        try:
            step(local_params, batch)
        except (KeyError, fpipe.RankError) as error:
            messages.append(str(error))

    reports = reports_of(run)
    return reports + ([] if "too often" in messages[0] else messages)


def run_on_device_and_host(rank: int, run_steps: RunSteps, record: bool) -> list[str]:
    """Run steps on device and host; report races, waits of the host, differing bits and impossible times."""
    device_results, QueuedWork.host_waits = list[fpipe.Result](), 0
    with DeviceTime() if record else nullcontext():
        reports = reports_of(lambda: device_results.extend(run_steps(torch.device("fake", rank))))
    reports += ["a wait held the host up"] * QueuedWork.host_waits
    for result in device_results[1:] if record else ():  # the first step measures, the later ones only note events
        reports += impossible_times(result.timeline)
    runs = device_results, run_steps(torch.device("cpu"))
    grads = (leaves([result.grads for result in results]) for results in runs)
    return reports + differing_bits(*([getattr(grad, "_local_tensor", grad) for grad in run] for run in grads))


def exchanged(rank: int, record: bool = False) -> list[str]:
    """Run one rank in two processes, which exchange rows between its layers."""
    mesh = mesh_of_two("ep")
    torch.manual_seed(rank)
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    stages = [_layer, fpipe.exchange("all_to_all", axis="ep"), _layer]
    model = fpipe.from_functions(stages, loss=squares)
    program = pipeline_of(fpipe.place([0, 0, 0]), schedules.one_f_one_b_overlap(1))(fpipe.program(model))

    def run_steps(device: torch.device) -> list[fpipe.Result]:
        params = ({"w": weights[0].to(device)}, {}, {"w": weights[1].to(device)})
        local_batch = tuple(tensor.to(device) for tensor in batch)
        options: Any = {"mesh": mesh, "example": (params, local_batch), "record": record}
        step = fpipe.build(program, model, runtime="distributed", **options)
        return [step(params, local_batch) for _ in range(STEPS)]

    return run_on_device_and_host(rank, run_steps, record)


def impossible_times(timeline: fpipe.Timeline) -> list[str]:
    """List the impossible times in a record of exchanges or collectives over replicas.

    They run next to compute, take time, and end before their readers start.
    """
    kinds = (*"FBIW", "GATHER", "SCATTER")
    spans = {op: (start, end) for op, start, end in timeline.events if op.kind in kinds}
    writer_by_value = {value: op for op in spans for value in op.writes}
    side_spans = {op: span for op, span in spans.items() if lane_of(op) != "main"}
    work_spans = [span for op, span in spans.items() if lane_of(op) == "main"]
    early_starts = [
        f"{op.cell} began before {writer.cell} had ended"
        for op, (start, _) in spans.items()
        for writer in map(writer_by_value.get, op.reads)
        if writer is not None and start < spans[writer][1] - 1e-9
    ]
    instant_ops = [f"{op.cell} took no time" for op, (start, end) in side_spans.items() if not 1e-4 < end - start < 0.1]
    overlaps = [1 for a, b in side_spans.values() for c, d in work_spans if c < b - 1e-5 and a < d - 1e-5]
    return early_starts + instant_ops + ([] if overlaps else ["no work ran next to an exchange"])


def _layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def replicated(rank: int) -> list[str]:
    """Run two replicas of one rank, which sum their gradients during the backward."""
    device = torch.device("fake", rank)
    net, batch = net_of(2), batch_of()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    pipeline = fpipe.chain(pipeline_of(fpipe.place([0, 0]), schedules.gpipe(1)), fpipe.data_parallel())
    program = pipeline(fpipe.program(model))
    params, batch = fpipe.tree.tree_map(lambda leaf: leaf.detach().to(device), (params, batch))
    local_batch = tuple(tensor.tensor_split(2)[rank] for tensor in batch)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh_of_two("dp"), example=(params, local_batch))
    actual_grads = list[Tensor]()
    reports = reports_of(lambda: [actual_grads.extend(leaves(step(params, local_batch).grads)) for _ in range(STEPS)])
    expected = fpipe.reference(model, params, batch, microbatches=PARTS, replicas=2)
    return reports + differing_bits(actual_grads, leaves(expected.grads) * STEPS)


def sharded(rank: int, record: bool = False, **policy: Any) -> list[str]:
    """Run two replicas of one rank on sharded weights, one large leaf and one whose rows do not divide evenly."""
    torch.manual_seed(0)
    weights = [{"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(7, WIDTH)} for _ in range(2)]
    torch.manual_seed(rank)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    model = fpipe.from_functions([_biased] * 2, loss=squares)
    pipeline = fpipe.chain(pipeline_of(fpipe.place([0, 0]), schedules.one_f_one_b(1)), fpipe.shard(**policy))
    program = pipeline(fpipe.program(model))

    def run_steps(device: torch.device) -> list[fpipe.Result]:
        mesh = mesh_of_two("dp", kind=device.type)
        params, local_batch = fpipe.tree.tree_map(lambda leaf: leaf.to(device), (weights, batch))
        shards = fpipe.shard_params(params, mesh["dp"])
        options: Any = {"mesh": mesh, "example": (shards, local_batch), "record": record}
        step = fpipe.build(program, model, runtime="distributed", **options)
        return [step(shards, local_batch) for _ in range(STEPS)]

    with patch.object(collective_parts, "_LARGE_BYTES_ON_DEVICES", WIDTH**2):
        return run_on_device_and_host(rank, run_steps, record)


def _biased(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"].sum(0))


PROCESS_SCENARIOS: dict[str, Callable[[int], list[str]]] = {
    "an exchange, recorded": lambda rank: exchanged(rank, record=True),
    "shards, recorded": lambda rank: sharded(rank, record=True),
    "1F1B, recorded": lambda rank: trained(rank, 2, pipeline_of(schedules.one_f_one_b(2)), record=True),
    "an error of rank 0": lambda rank: failed(rank, 0),
    "replicas of a process": replicated,
    "an error of rank 1": lambda rank: failed(rank, 1),
    "1F1B": lambda rank: trained(rank, 2, pipeline_of(schedules.one_f_one_b(2))),
    "ZB-H1, on streams in turn": lambda rank: trained(rank, 2, pipeline_of(schedules.zb_h1(2)), in_turn=True),
    "interleaved": lambda rank: trained(rank, 4, pipeline_of(schedules.interleaved(2))),
    "an exchange": exchanged,
    "shards of each microbatch": lambda rank: sharded(rank, gather="use", scatter="microbatch"),
}
"""Scenarios in order: first those that are the only one to notice some missing wait."""
