"""Steps of two processes that capture their parts as graphs; reports and bits as in `graph_scenarios.py`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fpipe
from fpipe.runtimes.processes import collective_parts
from fpipe.tree import leaves, tree_map
from tests.fake_accelerator import reports_of
from tests.fake_accelerator.graph_scenarios import REPLAYS, STEPS, count_mistakes, counted_replays, grads_by_autograd
from tests.fake_accelerator.process_scenarios import mesh_of_two
from tests.fake_accelerator.scenarios import (
    WIDTH,
    batch_of,
    differing_bits,
    net_of,
    pipeline_of,
    schedules,
    squares,
)


def batches_on(device: torch.device) -> list[Any]:
    return [tuple(tensor.to(device) * (k + 1) for tensor in batch_of()) for k in range(STEPS)]


def captured(rank: int, pipeline: fpipe.Transform, stages: int = 2, audit: Any = "never") -> list[str]:
    """Update the parameters of this rank in place between steps."""
    device = torch.device("fake", rank)
    net = net_of(stages).to(device)
    twin = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    program, batches = pipeline(fpipe.program(model)), batches_on(device)
    local_params = fpipe.local_params(program, params, rank)
    local_stages = [stage for stage, stage_params in enumerate(local_params) if stage_params]
    options: Any = {"mesh": mesh_of_two(), "example": (params, batches[0]), "graph": True, "audit": audit}
    step = fpipe.build(program, model, runtime="distributed", **options)
    results, expected = list[Any](), list[Any]()

    def run() -> None:
        for batch in batches:
            grads = step(local_params, batch).grads
            results.append([grads[stage] for stage in local_stages])
            for param in leaves([local_params[stage] for stage in local_stages]):
                param.mul_(0.9)

    with counted_replays() as replayed:
        reports = reports_of(run)
    for batch in batches:
        grads_by_autograd(twin, batch)
        expected.append([param.grad.clone() for stage in local_stages for param in twin[stage].parameters()])
        with torch.no_grad():
            for param in twin.parameters():
                param.mul_(0.9)
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 1)


def updated(rank: int) -> list[str]:
    """Train with donated parameters by an optimizer in the program, whose norm is summed around the ranks."""
    device = torch.device("fake", rank)
    net = net_of(2).to(device)
    twin = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=squares)
    pipeline = fpipe.chain(pipeline_of(schedules.one_f_one_b(2)), fpipe.update("AdamW", clip=1.0))
    program, batches = pipeline(fpipe.program(model)), batches_on(device)
    local_params = fpipe.local_params(program, params, rank)
    opt = fpipe.optimizer_state(program, local_params)
    options: Any = {"mesh": mesh_of_two(), "example": (params, batches[0]), "graph": True, "audit": "never"}
    step = fpipe.build(program, model, runtime="distributed", donate=True, **options)
    results, expected = list[Any](), list[Any]()

    def run() -> None:
        nonlocal local_params, opt
        for k, batch in enumerate(batches):
            result = step(local_params, batch, opt=opt, lr=0.1 / (k + 1))
            local_params, opt = result.params, result.opt
            results.append(tree_map(Tensor.clone, local_params[rank]))

    with counted_replays() as replayed:
        reports = reports_of(run)
    rate = torch.zeros((), device=device)
    optimizer = torch.optim.AdamW(twin.parameters(), lr=rate, foreach=False, capturable=True)
    for k, batch in enumerate(batches):
        grads_by_autograd(twin, batch)
        nn.utils.clip_grad_norm_(twin.parameters(), 1.0, foreach=False)
        rate.fill_(0.1 / (k + 1))
        optimizer.step()
        expected.append([param.detach().clone() for param in twin[rank].parameters()])
    return reports + differing_bits(leaves(results), leaves(expected)) + count_mistakes(replayed, REPLAYS, 1)


def replicated(rank: int, transform: fpipe.Transform) -> list[str]:
    """Run two replicas of one rank, which sum their gradients inside of their graphs."""
    device = torch.device("fake", rank)
    torch.manual_seed(0)
    weights = [{"w": torch.randn(WIDTH, WIDTH), "b": torch.randn(7, WIDTH)} for _ in range(2)]
    model = fpipe.from_functions([_biased] * 2, loss=squares)
    pipeline = fpipe.chain(pipeline_of(fpipe.place([0, 0]), schedules.one_f_one_b(1)), transform)
    program, batch = pipeline(fpipe.program(model)), batch_of()
    local_batch = tuple(tensor.tensor_split(2)[rank] for tensor in batch)

    def grads_on(device: torch.device, **options: Any) -> list[Any]:
        mesh = mesh_of_two("dp", kind=device.type)
        params, rows = tree_map(lambda leaf: leaf.to(device), (weights, local_batch))
        is_sharded = any(op.kind == "GATHER" for op in program.ops)
        params = fpipe.shard_params(params, mesh["dp"]) if is_sharded else params
        step = fpipe.build(
            program, model, runtime="distributed", mesh=mesh, example=(params, rows), audit="never", **options
        )
        return [step(params, tree_map(lambda leaf, k=k: leaf * (k + 1), rows)).grads for k in range(STEPS)]

    results = list[Any]()
    with counted_replays() as replayed, patch.object(collective_parts, "_LARGE_BYTES_ON_DEVICES", WIDTH**2):
        reports = reports_of(lambda: results.extend(grads_on(device, graph=True)))
    plain_results = grads_on(torch.device("cpu"))
    pairs = ([getattr(leaf, "_local_tensor", leaf) for leaf in leaves(side)] for side in (results, plain_results))
    return reports + differing_bits(*pairs) + count_mistakes(replayed, REPLAYS, 1)


def exchanged(rank: int) -> list[str]:
    """Exchange rows between the layers of one rank in two processes, inside of their graphs."""
    torch.manual_seed(rank)
    weights = [torch.randn(WIDTH, WIDTH) for _ in range(2)]
    rows = batch_of()
    stages = [_layer, fpipe.exchange("all_to_all", axis="ep"), _layer]
    model = fpipe.from_functions(stages, loss=squares)
    program = pipeline_of(fpipe.place([0, 0, 0]), schedules.one_f_one_b_overlap(1))(fpipe.program(model))

    def grads_on(device: torch.device, **options: Any) -> list[Any]:
        params = ({"w": weights[0].to(device)}, {}, {"w": weights[1].to(device)})
        batches = [tuple(tensor.to(device) * (k + 1) for tensor in rows) for k in range(STEPS)]
        options |= {"mesh": mesh_of_two("ep"), "example": (params, batches[0]), "audit": "never"}
        step = fpipe.build(program, model, runtime="distributed", **options)
        return [step(params, batch).grads for batch in batches]

    results = list[Any]()
    with counted_replays() as replayed:
        reports = reports_of(lambda: results.extend(grads_on(torch.device("fake", rank), graph=True)))
    plain_results = grads_on(torch.device("cpu"))
    return reports + differing_bits(leaves(results), leaves(plain_results)) + count_mistakes(replayed, REPLAYS, 1)


def _layer(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"])


def _biased(params: Any, x: Tensor) -> Tensor:
    return torch.tanh(x @ params["w"] + params["b"].sum(0))


PROCESS_GRAPH_SCENARIOS: dict[str, Callable[[int], list[str]]] = {
    "graphs of GPipe": partial(captured, pipeline=pipeline_of(schedules.gpipe(2))),
    "graphs next to audits": partial(captured, pipeline=pipeline_of(schedules.zb_h1(2)), audit="always"),
    "graphs of interleaved 1F1B": partial(captured, pipeline=pipeline_of(schedules.interleaved(2)), stages=4),
    "graphs that update in place": updated,
    "graphs with exchanges": exchanged,
    "graphs of replicas": partial(replicated, transform=fpipe.data_parallel()),
    "graphs of shards": partial(replicated, transform=fpipe.shard(gather="use", scatter="microbatch")),
}
