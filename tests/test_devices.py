"""What a trace promises, on each device there is: bits of plain autograd, under its autocast too, and bytes as told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from fpipe.graphs.language.graph import Fact
from fpipe.meaning.devices import drop_duplicate_homes, find_moves
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import UntracedStages
from fpipe.transforms.communicate import with_transfers
from fpipe.tree import leaves, tree_map
from tests.fake_accelerator.scenarios import by_autograd, squares
from tests.processes import Processes
from tests.test_processes_on_devices import by_replicas, join
from tests.toys import Toy

ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"))
on_each = pytest.mark.parametrize("device", ["cpu", CUDA])


def mixed(own: Any, x: Tensor) -> Tensor:
    """Attention, a convolution over time and norms."""
    q, k, v = own.qkv(own.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    return x + own.group(own.conv(F.hardtanh(y).transpose(1, 2))).transpose(1, 2) * own.scale


def mixer() -> nn.Module:
    norms = {"norm": nn.LayerNorm(16), "group": nn.GroupNorm(4, 16)}
    conv = nn.Conv1d(16, 16, 3, padding=1)
    return Toy(mixed, **norms, qkv=nn.Linear(16, 48), conv=conv, scale=torch.tensor(0.5))


def trained(device: str) -> tuple[fpipe.Model, tuple, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(mixer(), mixer(), nn.Linear(16, 16)).to(device)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 2], loss=squares)
    return model, params, (torch.randn(6, 8, 16, device=device), torch.randn(6, 8, 16, device=device))


PIPELINE = fpipe.chain(fpipe.split(3), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge())


def same(one: fpipe.Result, other: fpipe.Result) -> bool:
    pairs = zip(leaves((one.loss, one.grads)), leaves((other.loss, other.grads)), strict=True)
    return all(torch.equal(mine, theirs) for mine, theirs in pairs)


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


def on_shards(rank: int, backend: str, kind: str, how: str) -> list[bool]:
    """Two replicas that share parameters out, by each policy: the bits of plain autograd, added by replica."""
    if backend == "nccl":
        join(rank, how)
    device = torch.device(kind, rank % torch.cuda.device_count()) if kind == "cuda" else torch.device(kind)
    mesh = dist.init_device_mesh(kind, (2, 1), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    wide = 512 if kind == "cpu" else 4096
    sizes = (5, 7), (7, wide), (wide, wide)  # rows that are not divided evenly, and a leaf that travels by itself
    net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes)).to(device)
    x, target = torch.randn(8, 5, device=device), torch.randn(8, wide, device=device)
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=squares)
    merged = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(1), fpipe.merge(outputs=False))
    summed = by_replicas(net, [x, target])
    batch = x.chunk(2)[rank], target.chunk(2)[rank]
    right = list[bool]()
    for gather in ("step", "use"):
        program = fpipe.shard(gather=gather)(merged(fpipe.program(model)))
        shards = fpipe.shard_params(params, mesh["dp"])
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batch))
        found = [step(shards, batch) for _ in range(2)][1]
        made = [grad.to_local() for grad in leaves(found.grads)]
        rows = [fpipe.shard_params(({"w": one},), mesh["dp"])[0]["w"].to_local() for one in summed]
        right.append(all(torch.equal(*pair) for pair in zip(made, rows, strict=True)))
    return right


@pytest.mark.parametrize(
    ("backend", "kind"),
    [("gloo", "cpu"), pytest.param("gloo", "cuda", marks=ONE_GPU), pytest.param("nccl", "cuda", marks=ONE_GPU)],
)
def test_replicas_on_devices_share_parameters_out(backend: str, kind: str, tmp_path: Path):
    with Processes(2) as pair:
        assert pair.each(on_shards, backend, kind, (tmp_path / "group").as_uri()) == [[True, True]] * 2


@ONE_GPU
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


PLACES = [
    ["cpu", "cpu"],
    pytest.param(["cuda:0", "cuda:0"], marks=ONE_GPU),
    pytest.param(["cuda:0", "cpu"], marks=ONE_GPU),
    pytest.param(["cuda:0", "cuda:1"], marks=TWO),
]


def on_ranks(
    devices: Sequence[str], schedule: str, stages: int, width: int
) -> tuple[fpipe.Program, fpipe.Model, tuple, nn.Sequential, tuple[Tensor, Tensor]]:
    """A program of two ranks, and a net whose blocks are where the ranks compute that have them."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages)))
    pipeline = fpipe.chain(fpipe.split(4), fpipe.schedules.get(schedule)(2), fpipe.merge())
    program = pipeline(fpipe.program(stages))
    homes = {end.value.stage: end.homes[0] for end in program.inputs if end.value.name == "params"}
    for stage, block in enumerate(net):
        block.to(devices[homes[stage]])
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    return program, model, params, net, (torch.randn(8, width), torch.randn(8, width))


def grads_of(net: nn.Sequential, batch: tuple[Tensor, Tensor]) -> list[Tensor | None]:
    """The gradients of the mean over four microbatches, each block where its parameters are."""
    by_autograd(net, batch, lambda: None, steps=1)
    return [parameter.grad for parameter in net.parameters()]


def agree(found: fpipe.Result, expected: Sequence[Tensor | None], devices: Sequence[str], schedule: str) -> bool:
    """Bit by bit, but to rounding where the CPU computes a part of a stage's microbatches, and a GPU the others."""
    pairs = zip(leaves(found.grads), expected, strict=True)
    if schedule != "dualpipe" or len({torch.device(one).type for one in devices}) == 1:
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)
    return all(torch.allclose(mine, theirs, rtol=1e-4, atol=1e-6) for mine, theirs in pairs)


@pytest.mark.parametrize("devices", PLACES, ids=" ".join)
@pytest.mark.parametrize(("schedule", "stages"), [("one_f_one_b", 2), ("zbv", 4), ("dualpipe", 2)])
def test_ranks_on_devices_give_the_bits_of_autograd(devices: list[str], schedule: str, stages: int):
    """Wide enough on a GPU that the host is far ahead of it, so that what does not wait reads too early."""
    width = 8 if set(devices) == {"cpu"} else 1024
    program, model, params, net, batch = on_ranks(devices, schedule, stages, width)
    step = fpipe.build(program, model, runtime="threads", devices=devices)
    for _ in range(3):
        found, expected = step(params, batch), grads_of(net, batch)
        assert agree(found, expected, devices, schedule)
        with torch.no_grad():  # what is done with results waits for them
            for parameter, grad in zip(net.parameters(), leaves(found.grads), strict=True):
                parameter -= 0.1 * grad


@pytest.mark.parametrize("devices", PLACES, ids=" ".join)
def test_an_example_without_data_stands_for_what_is_at_home_on_each_rank(
    devices: list[str], monkeypatch: pytest.MonkeyPatch
):
    """It was refused, since parameters on the meta device are not on that of their rank."""
    program, model, params, net, batch = on_ranks(devices, "dualpipe", 2, 8)
    meta = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="threads", devices=devices, example=meta)
    monkeypatch.setattr("fpipe.runtimes.in_process.local._prepare_first_step", None)  # no signature is new
    assert agree(step(params, batch), grads_of(net, batch), devices, "dualpipe")


@pytest.mark.parametrize("runtime", ["local", "threads"])
@pytest.mark.parametrize("device", [CUDA])
def test_without_devices_threads_compute_on_the_callers_stream(device: str, runtime: str):
    model, params, batch = trained(device)
    step = fpipe.build(PIPELINE(fpipe.program(model)), model, runtime=runtime)
    expected = fpipe.reference(model, params, batch, microbatches=3)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        assert all(same(step(params, batch), expected) for _ in range(3))


@pytest.mark.parametrize("devices", PLACES, ids=" ".join)
def test_a_recorded_step_tells_what_devices_did_and_when(devices: list[str]):
    """By events in the ranks' streams, on the clock of the host: an op ends before what reads it begins."""
    program, model, params, _, batch = on_ranks(devices, "one_f_one_b", 2, 8 if set(devices) == {"cpu"} else 2048)
    step = fpipe.build(program, model, runtime="threads", devices=devices, record=True)
    for _ in range(2):
        before = time.perf_counter()
        found = step(params, batch).timeline
        whole = time.perf_counter() - before
    when = {op: (start, end) for op, start, end in found.events if op.kind in "FB"}
    written = {value: op for op in when for value in op.writes}
    slack = 0.0 if set(devices) == {"cpu"} else 5e-4  # clocks of devices differ
    assert all(-slack < start < end < whole + slack for start, end in when.values())
    for op, (start, _) in when.items():
        assert all(when[written[value]][1] <= start + slack for value in op.reads if value in written)


@pytest.mark.parametrize("data", [True, False])
def test_every_value_is_on_the_device_of_its_rank(data: bool):
    """Two devices that every machine has: what is on the meta device has all but data. So has an example."""
    program, model, params, _, batch = on_ranks(["cpu", "meta"], "dualpipe", 2, 8)
    params = params if data else tree_map(lambda leaf: leaf.to("meta"), params)
    devices = [torch.device("cpu"), torch.device("meta")]
    program = with_transfers(drop_duplicate_homes(program, devices))
    made = PreparedStep(
        program, model, StepInputs(params, batch), UntracedStages(), StepOptions(), ProcessContext(devices=devices)
    )
    values = [(op.rank, value) for op in program.ops if op.kind not in ("SEND", "MERGE") for value in op.writes]
    facts = [(devices[rank], leaf) for rank, value in values for leaf in made.trees[value].leaves]
    assert len(facts) > 50
    assert all(leaf.aval.device == device for device, leaf in facts if isinstance(leaf, Fact))
    assert len(find_moves(program, devices)) > 10


def test_what_a_rank_sends_by_hand_arrives_on_the_device_of_the_other():
    program, model, params, _, batch = on_ranks(["cpu", "meta"], "gpipe", 2, 8)
    program = fpipe.forward_only()(program)
    result = fpipe.build(program, model, runtime="threads", devices=["cpu", "meta"])(params, batch)
    assert (result.outputs.device.type, result.loss.device.type) == ("meta", "meta")


@pytest.mark.parametrize("made", [True, False])
def test_parameters_elsewhere_are_refused(made: bool):
    program, model, params, _, batch = on_ranks(["cpu", "meta"], "gpipe", 2, 8)
    step = fpipe.build(program, model, runtime="threads", devices=["cpu", "cpu"])
    params = tree_map(lambda leaf: torch.zeros(leaf.shape, device="meta"), params) if made else params
    with pytest.raises(ValueError, match=r"params\[\d\] \(of shape .* is on meta, and its rank computes on cpu: move"):
        step(params, batch)
    devices = [torch.device("meta")] * 2
    params = tree_map(lambda leaf: torch.zeros(leaf.shape), params)
    with pytest.raises(ValueError, match=r"is on cpu, and its rank computes on meta: move"):
        PreparedStep(
            with_transfers(program),
            model,
            StepInputs(params, batch),
            UntracedStages(),
            StepOptions(),
            ProcessContext(devices=devices),
        )


def test_each_rank_has_a_device():
    program, model, *_ = on_ranks(["cpu", "cpu"], "gpipe", 2, 8)
    for odd in (["cpu"], "cpu", ["cpu"] * 3):
        with pytest.raises(ValueError, match=r"devices= has a device for each rank, .* has 2 ranks, found"):
            fpipe.build(program, model, runtime="threads", devices=odd)
    with pytest.raises(ValueError, match="devices= is of runtime='threads'"):
        fpipe.build(program, model, devices=["cpu", "cpu"])
