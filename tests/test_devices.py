"""A traced step on each available device: the bits of plain autograd, also under autocast, and the predicted bytes."""

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
from tests.fake_accelerator.scenarios import squares, train_by_autograd
from tests.processes import Processes
from tests.test_processes_on_devices import by_replicas, join
from tests.toys import Toy

ONE_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there are not two CUDA devices")
CUDA = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"))
on_every_device = pytest.mark.parametrize("device", ["cpu", CUDA])


def mix_forward(module: Any, x: Tensor) -> Tensor:
    """Apply attention, a convolution over time and norms."""
    q, k, v = module.qkv(module.norm(x)).view(*x.shape[:2], 3, 2, 8).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
    return x + module.group(module.conv(F.hardtanh(y).transpose(1, 2))).transpose(1, 2) * module.scale


def mixer_block() -> nn.Module:
    norms = {"norm": nn.LayerNorm(16), "group": nn.GroupNorm(4, 16)}
    conv = nn.Conv1d(16, 16, 3, padding=1)
    return Toy(mix_forward, **norms, qkv=nn.Linear(16, 48), conv=conv, scale=torch.tensor(0.5))


def training_case(device: str) -> tuple[fpipe.Model, tuple, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    net = nn.Sequential(mixer_block(), mixer_block(), nn.Linear(16, 16)).to(device)
    model, params, _ = fpipe.from_sequential(net, sizes=[1, 2], loss=squares)
    return model, params, (torch.randn(6, 8, 16, device=device), torch.randn(6, 8, 16, device=device))


PIPELINE = fpipe.chain(fpipe.split(3), fpipe.split_backward(), fpipe.schedules.one_f_one_b(2), fpipe.merge())


def results_equal(result: fpipe.Result, expected_result: fpipe.Result) -> bool:
    pairs = zip(leaves((result.loss, result.grads)), leaves((expected_result.loss, expected_result.grads)), strict=True)
    return all(torch.equal(leaf, expected_leaf) for leaf, expected_leaf in pairs)


@on_every_device
@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_a_step_gives_the_bits_of_the_reference(device: str, dtype: torch.dtype | None):
    model, params, batch = training_case(device)
    step = fpipe.build(PIPELINE(fpipe.program(model)), model)
    with torch.autocast(device, dtype, enabled=dtype is not None):
        result, expected = step(params, batch), fpipe.reference(model, params, batch, microbatches=3)
    assert results_equal(result, expected)
    assert {leaf.device.type for leaf in leaves((result.loss, result.grads, result.outputs))} == {device}


@on_every_device
def test_sizes_predict_the_peak_of_a_recorded_step(device: str):
    model, params, batch = training_case(device)
    program = PIPELINE(fpipe.program(model))
    predicted = fpipe.sizes(program, model, params, batch)
    result = fpipe.build(program, model, record=True)(params, batch)
    assert result.timeline is not None
    assert result.timeline.peak == predicted.peak


@on_every_device
def test_a_meta_example_stands_for_the_default_device(device: str):
    model, params, batch = training_case(device)
    meta = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    with torch.device(device):
        step = fpipe.build(PIPELINE(fpipe.program(model)), model, example=meta)
        assert results_equal(step(params, batch), fpipe.reference(model, params, batch, microbatches=3))


def sharded_steps_match(rank: int, backend: str, device_type: str, init_method: str) -> list[bool]:
    """Return, for each gather policy, whether two sharded replicas have the bits of plain autograd added by replica."""
    if backend == "nccl":
        join(rank, init_method)
    device = (
        torch.device(device_type, rank % torch.cuda.device_count())
        if device_type == "cuda"
        else torch.device(device_type)
    )
    mesh = dist.init_device_mesh(device_type, (2, 1), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    width = 512 if device_type == "cpu" else 4096
    sizes = (5, 7), (7, width), (width, width)  # rows that are not divided evenly, and a leaf that is sent alone
    net = nn.Sequential(*(nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in sizes)).to(device)
    x, target = torch.randn(8, 5, device=device), torch.randn(8, width, device=device)
    model, params, _ = fpipe.from_sequential(net, stages=3, loss=squares)
    pipeline = fpipe.chain(fpipe.split(2), fpipe.schedules.one_f_one_b(1), fpipe.merge(outputs=False))
    summed = by_replicas(net, [x, target])
    batch = x.chunk(2)[rank], target.chunk(2)[rank]
    matches = list[bool]()
    for gather in ("step", "use"):
        program = fpipe.shard(gather=gather)(pipeline(fpipe.program(model)))
        shards = fpipe.shard_params(params, mesh["dp"])
        step = fpipe.build(program, model, runtime="distributed", mesh=mesh, example=(shards, batch))
        result = [step(shards, batch) for _ in range(2)][1]
        actual_grads = [grad.to_local() for grad in leaves(result.grads)]
        expected_grads = [
            fpipe.shard_params(({"w": whole_grad},), mesh["dp"])[0]["w"].to_local() for whole_grad in summed
        ]
        matches.append(all(torch.equal(*pair) for pair in zip(actual_grads, expected_grads, strict=True)))
    return matches


@pytest.mark.parametrize(
    ("backend", "device_type"),
    [("gloo", "cpu"), pytest.param("gloo", "cuda", marks=ONE_GPU), pytest.param("nccl", "cuda", marks=ONE_GPU)],
)
def test_replicas_on_devices_shard_parameters(backend: str, device_type: str, tmp_path: Path):
    with Processes(2) as pair:
        assert pair.run(sharded_steps_match, backend, device_type, (tmp_path / "group").as_uri()) == [[True, True]] * 2


@ONE_GPU
def test_a_step_captured_as_one_cuda_graph_has_the_same_bits():
    model, params, batch = training_case("cuda")
    step = fpipe.build(PIPELINE(fpipe.program(model)), model)
    expected, _ = step(params, batch), step(params, batch)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step(params, batch)
    graph.replay()
    torch.cuda.synchronize()
    assert results_equal(result, expected)


RANK_DEVICES = [
    ["cpu", "cpu"],
    pytest.param(["cuda:0", "cuda:0"], marks=ONE_GPU),
    pytest.param(["cuda:0", "cpu"], marks=ONE_GPU),
    pytest.param(["cuda:0", "cuda:1"], marks=TWO_GPUS),
]


def pipeline_on(
    devices: Sequence[str], schedule: str, stages: int, width: int
) -> tuple[fpipe.Program, fpipe.Model, tuple, nn.Sequential, tuple[Tensor, Tensor]]:
    """Return a program of two ranks, and a net whose blocks are on the devices of the ranks that compute them."""
    torch.manual_seed(0)
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(stages)))
    pipeline = fpipe.chain(fpipe.split(4), fpipe.schedules.get(schedule)(2), fpipe.merge())
    program = pipeline(fpipe.program(stages))
    homes = {end.value.stage: end.homes[0] for end in program.inputs if end.value.name == "params"}
    for stage, block in enumerate(net):
        block.to(devices[homes[stage]])
    model, params, _ = fpipe.from_sequential(net, stages=stages, loss=squares)
    return program, model, params, net, (torch.randn(8, width), torch.randn(8, width))


def autograd_grads(net: nn.Sequential, batch: tuple[Tensor, Tensor]) -> list[Tensor | None]:
    """Return the gradients of the mean over four microbatches, each on the device of its block."""
    train_by_autograd(net, batch, lambda: None, steps=1)
    return [parameter.grad for parameter in net.parameters()]


def grads_agree(result: fpipe.Result, expected: Sequence[Tensor | None], devices: Sequence[str], schedule: str) -> bool:
    """Compare bit by bit, but to rounding where the CPU and a GPU share the microbatches of one stage."""
    pairs = zip(leaves(result.grads), expected, strict=True)
    if schedule != "dualpipe" or len({torch.device(device).type for device in devices}) == 1:
        return all(torch.equal(grad, expected_grad) for grad, expected_grad in pairs)
    return all(torch.allclose(grad, expected_grad, rtol=1e-4, atol=1e-6) for grad, expected_grad in pairs)


@pytest.mark.parametrize("devices", RANK_DEVICES, ids=" ".join)
@pytest.mark.parametrize(("schedule", "stages"), [("one_f_one_b", 2), ("zbv", 4), ("dualpipe", 2)])
def test_ranks_on_devices_give_the_bits_of_autograd(devices: list[str], schedule: str, stages: int):
    """On a GPU the layers are so wide that the host runs far ahead: a missing wait reads too early."""
    width = 8 if set(devices) == {"cpu"} else 1024
    program, model, params, net, batch = pipeline_on(devices, schedule, stages, width)
    step = fpipe.build(program, model, runtime="threads", devices=devices)
    for _ in range(3):
        result, expected_grads = step(params, batch), autograd_grads(net, batch)
        assert grads_agree(result, expected_grads, devices, schedule)
        with torch.no_grad():  # the update must wait for the gradients
            for parameter, grad in zip(net.parameters(), leaves(result.grads), strict=True):
                parameter -= 0.1 * grad


@pytest.mark.parametrize("devices", RANK_DEVICES, ids=" ".join)
def test_a_meta_example_stands_for_parameters_of_all_devices(devices: list[str], monkeypatch: pytest.MonkeyPatch):
    """Used to be refused: parameters on the meta device are not on the device of their rank."""
    program, model, params, net, batch = pipeline_on(devices, "dualpipe", 2, 8)
    meta = tree_map(lambda leaf: leaf.to("meta"), (params, batch))
    step = fpipe.build(program, model, runtime="threads", devices=devices, example=meta)
    monkeypatch.setattr("fpipe.runtimes.in_process.local._prepare_first_step", None)  # no signature is new
    assert grads_agree(step(params, batch), autograd_grads(net, batch), devices, "dualpipe")


@pytest.mark.parametrize("runtime", ["local", "threads"])
@pytest.mark.parametrize("device", [CUDA])
def test_without_devices_threads_compute_on_the_callers_stream(device: str, runtime: str):
    model, params, batch = training_case(device)
    step = fpipe.build(PIPELINE(fpipe.program(model)), model, runtime=runtime)
    expected = fpipe.reference(model, params, batch, microbatches=3)
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(10_000_000)
        assert all(results_equal(step(params, batch), expected) for _ in range(3))


@pytest.mark.parametrize("devices", RANK_DEVICES, ids=" ".join)
def test_a_recorded_timeline_ends_each_write_before_its_reads(devices: list[str]):
    """Times come from events in the ranks' streams, on the clock of the host."""
    program, model, params, _, batch = pipeline_on(devices, "one_f_one_b", 2, 8 if set(devices) == {"cpu"} else 2048)
    step = fpipe.build(program, model, runtime="threads", devices=devices, record=True)
    for _ in range(2):
        started = time.perf_counter()
        timeline = step(params, batch).timeline
        elapsed = time.perf_counter() - started
    times = {op: (start, end) for op, start, end in timeline.events if op.kind in "FB"}
    writers = {value: op for op in times for value in op.writes}
    clock_tolerance = 0.0 if set(devices) == {"cpu"} else 5e-4  # clocks of devices differ
    assert all(-clock_tolerance < start < end < elapsed + clock_tolerance for start, end in times.values())
    for op, (start, _) in times.items():
        assert all(times[writers[value]][1] <= start + clock_tolerance for value in op.reads if value in writers)


@pytest.mark.parametrize("has_data", [True, False])
def test_every_value_is_on_the_device_of_its_rank(has_data: bool):
    """The CPU and the meta device, which has everything but data, are two devices on every machine."""
    program, model, params, _, batch = pipeline_on(["cpu", "meta"], "dualpipe", 2, 8)
    params = params if has_data else tree_map(lambda leaf: leaf.to("meta"), params)
    devices = [torch.device("cpu"), torch.device("meta")]
    program = with_transfers(drop_duplicate_homes(program, devices))
    prepared = PreparedStep(
        program, model, StepInputs(params, batch), UntracedStages(), StepOptions(), ProcessContext(devices=devices)
    )
    values = [(op.rank, value) for op in program.ops if op.kind not in ("SEND", "MERGE") for value in op.writes]
    facts = [(devices[rank], leaf) for rank, value in values for leaf in prepared.trees[value].leaves]
    assert len(facts) > 50
    assert all(leaf.aval.device == device for device, leaf in facts if isinstance(leaf, Fact))
    assert len(find_moves(program, devices)) > 10


def test_outputs_arrive_on_the_device_of_the_last_rank():
    program, model, params, _, batch = pipeline_on(["cpu", "meta"], "gpipe", 2, 8)
    program = fpipe.forward_only()(program)
    result = fpipe.build(program, model, runtime="threads", devices=["cpu", "meta"])(params, batch)
    assert (result.outputs.device.type, result.loss.device.type) == ("meta", "meta")


@pytest.mark.parametrize("is_meta", [True, False])
def test_parameters_on_another_device_than_their_rank_are_refused(is_meta: bool):
    program, model, params, _, batch = pipeline_on(["cpu", "meta"], "gpipe", 2, 8)
    step = fpipe.build(program, model, runtime="threads", devices=["cpu", "cpu"])
    params = tree_map(lambda leaf: torch.zeros(leaf.shape, device="meta"), params) if is_meta else params
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
    program, model, *_ = pipeline_on(["cpu", "cpu"], "gpipe", 2, 8)
    for wrong_devices in (["cpu"], "cpu", ["cpu"] * 3):
        with pytest.raises(ValueError, match=r"devices= has a device for each rank, .* has 2 ranks, found"):
            fpipe.build(program, model, runtime="threads", devices=wrong_devices)
    with pytest.raises(ValueError, match="devices= is of runtime='threads'"):
        fpipe.build(program, model, devices=["cpu", "cpu"])
