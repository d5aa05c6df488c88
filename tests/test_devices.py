"""What a trace promises, on each device there is: bits of plain autograd, under its autocast too, and bytes as told."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from fpipe.tree import leaves, tree_map
from tests.processes import Processes

CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"))
on_each = pytest.mark.parametrize("device", ["cpu", CUDA])


class Mixer(nn.Module):
    """Attention, a convolution over time and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(16), nn.Linear(16, 48)
        self.conv, self.group = nn.Conv1d(16, 16, 3, padding=1), nn.GroupNorm(4, 16)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        return x + self.group(self.conv(F.hardtanh(y).transpose(1, 2))).transpose(1, 2) * self.scale


def squares(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()


def trained(device: str) -> tuple[fpipe.Model, tuple, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(Mixer(), Mixer(), nn.Linear(16, 16)).to(device)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 2], loss=squares)
    return model, params, (torch.randn(6, 8, 16, device=device), torch.randn(6, 8, 16, device=device))


PIPELINE = fpipe.chain(fpipe.split(3), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge())


def same(one: fpipe.Result, other: fpipe.Result) -> bool:
    return all(map(torch.equal, leaves((one.loss, one.grads)), leaves((other.loss, other.grads))))


@on_each
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_a_step_gives_the_bits_of_the_reference(device: str, dtype: torch.dtype | None):
    model, params, batch = trained(device)
    step = fpipe.build(PIPELINE(fpipe.program(model)), model)
    with torch.autocast(device, dtype, enabled=dtype is not None):
        found, expected = step(params, batch), fpipe.reference(model, params, batch, microbatches=3)
    assert same(found, expected)
    assert {leaf.device.type for leaf in leaves((found.loss, found.grads, found.outputs))} == {device}


@on_each
def test_sizes_are_those_of_the_run(device: str):
    model, params, batch = trained(device)
    program = PIPELINE(fpipe.program(model))
    told = fpipe.sizes(program, model, params, batch)
    found = fpipe.build(program, model, record=True)(params, batch)
    assert found.timeline is not None
    assert found.timeline.peak == told.peak


@on_each
def test_an_example_without_data_is_one_on_the_default_device(device: str):
    model, params, batch = trained(device)
    meta = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    with torch.device(device):
        step = fpipe.build(PIPELINE(fpipe.program(model)), model, example=meta)
        assert same(step(params, batch), fpipe.reference(model, params, batch, microbatches=3))


@on_each
def test_random_numbers_are_refused(device: str):
    with pytest.raises(ValueError, match="it draws random numbers"):
        fpipe.linearize(lambda p, x: F.dropout(x, 0.5) @ p["w"], *drawn(device))


def drawn(device: str) -> tuple[dict[str, Tensor], Tensor]:
    return {"w": torch.randn(4, 4, device=device)}, torch.randn(3, 4, device=device)


def on_gpus(rank: int, backend: str, how: str) -> list[bool]:
    """A step of two ranks, each on a GPU of its own if there are two, beside the reference on this rank's."""
    if backend == "nccl":
        dist.destroy_process_group()
        file = f"file://{how}"
        dist.init_process_group(backend, init_method=file, rank=rank, world_size=2)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    model, params, batch = trained(str(device))
    program = PIPELINE(fpipe.program(model))
    step = fpipe.build(program, model, runtime="distributed", example=(params, batch), broadcast=True, timeout=30)
    mine = fpipe.local_params(program, params, rank)
    expected = fpipe.reference(model, params, batch, microbatches=3)
    found = [step(mine, batch) for _ in range(2)][1]
    grads = fpipe.local_params(program, expected.grads, rank)
    right = same(replace(found, grads=()), replace(expected, grads=())), same_leaves(found.grads, grads)
    try:
        step(mine if rank else ({}, {}), batch)
    except (RuntimeError, ValueError) as error:
        return [*right, rank == 0 or "rank 0 failed" in str(error), same_leaves(step(mine, batch).grads, grads)]
    return [False]


def same_leaves(one: tuple, other: tuple) -> bool:
    """Of what is this rank's; the rest is None."""
    pairs = [(a, b) for a, b in zip(leaves(one), leaves(other), strict=True) if a is not None]
    return bool(pairs) and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_gloo_carries_tensors_of_a_gpu_through_the_host():
    pair = Processes(2)
    try:
        assert pair.each(on_gpus, "gloo", "") == [[True] * 4] * 2
    finally:
        pair.close()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
def test_nccl_carries_tensors_between_two_gpus(tmp_path: Path):
    pair = Processes(2)
    try:
        assert pair.each(on_gpus, "nccl", str(tmp_path / "group")) == [[True] * 4] * 2
    finally:
        pair.close()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_whole_step_as_one_cuda_graph_has_the_same_bits():
    model, params, batch = trained("cuda")
    step = fpipe.build(PIPELINE(fpipe.program(model)), model)
    expected, _ = step(params, batch), step(params, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step(params, batch)
    graph.replay()
    torch.cuda.synchronize()
    assert same(found, expected)
