"""Steps of two processes, each with a rank on a fake device: what `scenarios.py` is for one process."""

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
from tests.fake_accelerator.group import NAME, Queued
from tests.fake_accelerator.scenarios import (
    PARTS,
    ROWS,
    STEPS,
    WIDTH,
    DeviceTime,
    Transform,
    batch_of,
    by_sgd,
    net_of,
    other_bits,
    pipeline_of,
    schedules,
    sgd,
    squares,
)


def mesh_of_two(*beside: str, kind: str = "cpu") -> DeviceMesh:
    """A mesh of two processes, the ranks, or with a dimension `beside` them those of one rank; it has groups of its
    own, as of a scenario that went wrong something may still be under way. DTensors want one of a `kind` of device."""
    group: Any = dist.new_group([0, 1], backend=NAME)
    if not beside:
        return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("pp",))
    alone: Any = [dist.new_group([rank], backend=NAME) for rank in (0, 1)][dist.get_rank()]
    return DeviceMesh.from_group([alone, group], kind, mesh=[[0, 1]], mesh_dim_names=("pp", *beside))


def trained(rank: int, stages: int, pipeline: Transform, in_turn: bool = False, **how: Any) -> list[str]:
    """Steps one behind the other, each on the parameters that this rank has made of its gradients before; on one
    stream, or each on one of its own."""
    device = torch.device("fake", rank)
    net, batch = net_of(stages).to(device), tuple(one.to(device) for one in batch_of())
    twin = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    program = pipeline(fpipe.program(model))
    mesh = mesh_of_two()
    mine = fpipe.local_params(program, params, rank)
    here = [stage for stage, one in enumerate(mine) if one]
    own = leaves([mine[stage] for stage in here])

    def run() -> None:
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, batch), **how)
        last = torch.accelerator.current_stream(device)
        for _ in range(STEPS):
            stream = torch.Stream(device) if in_turn else last
            stream.wait_stream(last)
            with stream:
                found = step(mine, batch)
                sgd(own, leaves([found.grads[stage] for stage in here]))
            last = stream

    reports = reports_of(run)
    by_sgd(twin, batch)
    return reports + other_bits(own, [one for stage in here for one in twin[stage].parameters()])


LEFT = {"calls": 0}


@torch.library.custom_op("fpipe_tests::last_but", mutates_args=())
def last_but(x: Tensor) -> Tensor:
    """One op of a trace, which raises when it has been called so often."""
    LEFT["calls"] -= 1
    if LEFT["calls"] == 0:
        raise KeyError("too often")
    return x.clone()


last_but.register_fake(torch.empty_like)
last_but.register_autograd(lambda ctx, dy: dy)


def failed(rank: int, who: int) -> list[str]:
    """An error of one rank ends a step while messages are on their way that nobody waits for any more."""
    device = torch.device("fake", rank)
    model = fpipe.from_functions([lambda p, x: last_but(x * p["w"])] * 2, squares)
    program = pipeline_of(schedules.one_f_one_b(2))(fpipe.program(model))
    params = tuple({"w": torch.full((WIDTH,), 2.0, device=device)} for _ in range(2))
    batch = tuple(one.to(device) for one in batch_of())
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh_of_two(), example=(params, batch))
    mine, said = fpipe.local_params(program, params, rank), list[str]()
    step(mine, batch)

    def run() -> None:
        LEFT["calls"] = 2 if rank == who else 0
        try:
            step(mine, batch)
        except (KeyError, fpipe.RankError) as error:
            said.append(str(error))

    reports = reports_of(run)
    return reports + ([] if "too often" in said[0] else said)


def beside_the_host(rank: int, stepped: Callable[[torch.device], list[fpipe.Result]], record: bool) -> list[str]:
    """Reports of steps on the device, which hold the host nowhere up, and whether they have the bits of the host; of a
    record, what it tells that cannot be."""
    found, Queued.held_up = list[fpipe.Result](), 0
    with DeviceTime() if record else nullcontext():
        reports = reports_of(lambda: found.extend(stepped(torch.device("fake", rank))))
    reports += ["a wait held the host up"] * Queued.held_up
    for result in found[1:] if record else ():  # those that only note events
        reports += odd_times(result.timeline)
    grads = (leaves([one.grads for one in results]) for results in (found, stepped(torch.device("cpu"))))
    return reports + other_bits(*([getattr(one, "_local_tensor", one) for one in each] for each in grads))


def exchanged(rank: int, record: bool = False) -> list[str]:
    """Two processes that run one rank, and exchange rows between its layers."""
    mesh = mesh_of_two("ep")
    torch.manual_seed(rank)
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    stages = [_layer, fpipe.exchange("all_to_all", axis="ep"), _layer]
    model = fpipe.from_functions(stages, loss=squares)
    program = pipeline_of(fpipe.place([0, 0, 0]), schedules.one_f_one_b_overlap(1))(fpipe.program(model))

    def stepped(device: torch.device) -> list[fpipe.Result]:
        params = ({"w": weights[0].to(device)}, {}, {"w": weights[1].to(device)})
        own = tuple(one.to(device) for one in batch)
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(params, own), record=record)
        return [step(params, own) for _ in range(STEPS)]

    return beside_the_host(rank, stepped, record)


def odd_times(timeline: fpipe.Timeline) -> list[str]:
    """What a record tells of exchanges, or of collectives over replicas, that cannot be: they run beside work, and
    before who reads what they bring."""
    kinds = (*"FBIW", "GATHER", "SCATTER")
    spans = {op: (start, end) for op, start, end in timeline.events if op.kind in kinds}
    makers = {value: op for op in spans for value in op.writes}
    apart = {op: span for op, span in spans.items() if lane_of(op) != "main"}
    work = [span for op, span in spans.items() if lane_of(op) == "main"]
    early = [
        f"{op.cell} began before {maker.cell} had ended"
        for op, (start, _) in spans.items()
        for maker in map(makers.get, op.reads)
        if maker is not None and start < spans[maker][1] - 1e-9
    ]
    idle = [f"{op.cell} took no time" for op, (start, end) in apart.items() if not 1e-4 < end - start < 0.1]
    beside = [1 for start, end in apart.values() for low, high in work if low < end - 1e-5 and start < high - 1e-5]
    return early + idle + ([] if beside else ["nothing ran beside an exchange"])


def _layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def replicated(rank: int) -> list[str]:
    """Two replicas of one rank, which add up their gradients while the backward goes on."""
    device = torch.device("fake", rank)
    net, batch = net_of(2), batch_of()
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    pipeline = fpipe.chain(pipeline_of(fpipe.place([0, 0]), schedules.gpipe(1)), fpipe.data_parallel())
    program = pipeline(fpipe.program(model))
    params, batch = fpipe.tree.tree_map(lambda leaf: leaf.detach().to(device), (params, batch))
    own = tuple(one.tensor_split(2)[rank] for one in batch)
    step = fpipe.build(program, model, runtime="distributed", mesh=mesh_of_two("dp"), example=(params, own))
    found = list[Tensor]()
    reports = reports_of(lambda: [found.extend(leaves(step(params, own).grads)) for _ in range(STEPS)])
    expected = fpipe.reference(model, params, batch, microbatches=PARTS, replicas=2)
    return reports + other_bits(found, leaves(expected.grads) * STEPS)


def sharded(rank: int, record: bool = False, **policy: Any) -> list[str]:
    """Two replicas of one rank, which share out weights that travel alone, and rows that do not come out even."""
    torch.manual_seed(0)
    weights = [{"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(7, WIDTH)} for _ in range(2)]
    torch.manual_seed(rank)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    model = fpipe.from_functions([_biased] * 2, loss=squares)
    pipeline = fpipe.chain(pipeline_of(fpipe.place([0, 0]), schedules.one_f_one_b(1)), fpipe.shard(**policy))
    program = pipeline(fpipe.program(model))

    def stepped(device: torch.device) -> list[fpipe.Result]:
        mesh = mesh_of_two("dp", kind=device.type)
        params, own = fpipe.tree.tree_map(lambda leaf: leaf.to(device), (weights, batch))
        shards = fpipe.shard_params(params, mesh["dp"])
        how: Any = {"mesh": mesh, "example": (shards, own), "record": record}
        step = fpipe.build(program, model, runtime="distributed", **how)
        return [step(shards, own) for _ in range(STEPS)]

    with patch.object(collective_parts, "_LARGE_ON_DEVICES", WIDTH**2):
        return beside_the_host(rank, stepped, record)


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
"""Those come first that alone notice when some wait is gone."""
