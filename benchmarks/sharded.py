"""Train on shards of parameters on four processes, against FSDP2 under torch's own 1F1B, and against whole replicas.

    python benchmarks/sharded.py [--quick] [--memory | --simulated] [--device cuda]

Four processes of one gloo group, two replicas of two ranks, one intra-op thread each, or with --device cuda of one NCCL
group, on a GPU of their own where there are four (else NCCL, told that they are on four hosts, goes over sockets). In
each round every step runs once, one after another, on all: ours on whole replicas (data_parallel), and sharded,
gathered once a step or for each use with a stage a block; `fully_shard` on each block under torch's Schedule1F1B, which
keeps what it has gathered or reshards after forward. A time is that of the slowest process, a ratio one of medians over
rounds. Gradients of all are compared: ours bit by bit with those of whole replicas.

Memory is how far the resident peak grows in a step, in the process where most: gathered copies, gradients, activations
and buffers, beside the shards that are there before; of our steps also as a part of what `fpipe.sizes` told; on a GPU,
the peak of what is allocated there. Each way has processes of its own, whose C library gives what is freed back at once
(MALLOC_MMAP_THRESHOLD_).

With --simulated, how far simulation is from our steps: each way is profiled, all processes together, simulated with
what its ops, messages and collectives took there, and compared with other steps, that are not recorded. Beside them
steps are recorded: how long the program takes of a step, and what is outside. Messages take a core too, so this wants
twice as many cores as processes; there are two ranks of two replicas where there are eight, else one.
"""

from __future__ import annotations

import argparse
import gc
import os
import re
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import Block, against
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

import fpipe

Step = Callable[[], dict[str, Tensor]]
MSE = nn.functional.mse_loss
MICROBATCHES, WARM_UP = 8, 2
COMPARED = 12
"""Steps after which ranks no longer compare their batches in each."""


def mlp(width: int, layers: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
    return net, *(torch.randn(32 * MICROBATCHES, width) for _ in range(2))


def gpt(width: int, blocks: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    net = nn.Sequential(*(Block(width) for _ in range(blocks)))
    return net, *(torch.randn(2 * MICROBATCHES, 64, width) for _ in range(2))


TIME_CASES = {"MLP 1024 x 8": partial(mlp, 1024, 8), "GPT 256 x 6": partial(gpt, 256, 6)}
MEMORY_CASES = {"MLP 1024 x 8": partial(mlp, 1024, 8), "GPT 512 x 8": partial(gpt, 512, 8)}
OURS = {
    "replicas": (False, fpipe.data_parallel()),
    "once a step": (False, fpipe.shard()),
    "each use": (True, fpipe.shard(gather="use")),
    "each use, lead 0": (True, fpipe.shard(gather="use", lead=0)),
}
TORCHS = {"FSDP2, kept": False, "FSDP2, resharded": True}
PREDICTED: dict[str, float] = {}
"""MiB of the fullest rank in our steps, as `fpipe.sizes` has them."""
# What is to be reached, of what.
REACH = {
    ("once a step", "FSDP2, kept"): 0.80,
    ("each use", "FSDP2, resharded"): 0.93,
    ("once a step", "replicas"): 1.03,
}


def build_step(name: str, mesh: DeviceMesh, case: Any, record: bool = False) -> Callable[[], fpipe.Result]:
    """Build our step of this process, on shards or whole parameters."""
    _, x, target = case
    model, params, program = _program(name, case, mesh.size(1))
    mine = fpipe.local_params(program, params, mesh.get_local_rank("pp"))
    if name != "replicas":
        mine = fpipe.shard_params(mine, mesh["dp"])
    share = 1 if name == "replicas" else 2
    peaks = fpipe.sizes(program, model, params, (x, target), runtime="distributed", replicas=share).peak
    PREDICTED[name] = max(peaks) / 2**20
    options: Any = {"mesh": mesh, "example": (mine, (x, target)), "record": record}
    return partial(fpipe.build(program, model, runtime="distributed", **options), mine, (x, target))


def build_fpipe_step(name: str, mesh: DeviceMesh, case: Any) -> Step:
    """Build our step, which returns its gradients by name."""
    step = build_step(name, mesh, case)
    return lambda: {name: grad for stage in step().grads if stage is not None for name, grad in stage.items()}


def _program(name: str, case: Any, ranks: int) -> tuple[fpipe.Model, Any, fpipe.Program]:
    """Build the model, parameters and program of one of our variants."""
    net, (stage_per_block, transform) = case[0], OURS[name]
    model, params, _ = fpipe.from_sequential(net, stages=len(net) if stage_per_block else 2, loss=MSE)
    schedule = fpipe.schedules.one_f_one_b(ranks)
    merged = fpipe.chain(fpipe.split(MICROBATCHES), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    return model, params, transform(merged)


def build_torch_step(name: str, mesh: DeviceMesh, case: Any) -> Step:
    """Build the step of torch's schedule on this rank's half of the net, each block sharded."""
    net, x, target = case
    rank, half = mesh.get_local_rank("pp"), len(net) // 2
    mine = net[rank * half : (rank + 1) * half]
    for block in mine:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=TORCHS[name])
    fully_shard(mine, mesh=mesh["dp"], reshard_after_forward=TORCHS[name])
    stage = PipelineStage(mine, rank, 2, x.device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=MSE)
    names = {
        parameter: f"{rank * half + number}.{path}"
        for number, part in enumerate(mine)
        for path, parameter in part.named_parameters()
    }

    def run() -> dict[str, Tensor]:
        mine.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank else {}))
        return {names[parameter]: parameter.grad for parameter in mine.parameters()}

    return run


def work(rank: int, folder: str, rounds: int, name: str, variants: list[str], measures_memory: bool, kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < 4:
            os.environ.update(NCCL_HOSTID=f"host {rank}", NCCL_SOCKET_IFNAME="lo")
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=4)
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    case = (MEMORY_CASES if measures_memory else TIME_CASES)[name]()
    steps: dict[str, Step] = {}
    for variant in variants:
        torch.manual_seed(mesh.get_local_rank("dp"))
        net, x, target = case
        net_copy = torch.manual_seed(1) and (MEMORY_CASES if measures_memory else TIME_CASES)[name]()[0]
        net_copy.load_state_dict(net.state_dict())
        torch.manual_seed(5 + mesh.get_local_rank("dp"))
        local_case = net_copy.to(kind), torch.randn_like(x).to(kind), torch.randn_like(target).to(kind)
        steps[variant] = (build_fpipe_step if variant in OURS else build_torch_step)(variant, mesh, local_case)
    del case, local_case, net_copy, net
    (measure_memory if measures_memory else compare_times)(rank, kind, name, steps, rounds)
    dist.barrier()
    dist.destroy_process_group()


def compare_times(rank: int, kind: str, name: str, steps: dict[str, Step], rounds: int) -> None:
    """Print the seconds of each step, and whether gradients agree."""
    times: dict[str, list[float]] = {variant: [] for variant in steps}
    grads_by_variant = {name: {key: _full_grad(grad) for key, grad in step().items()} for name, step in steps.items()}
    expected = grads_by_variant["replicas"]
    for variant, grads in grads_by_variant.items():
        equal = all(torch.equal(grads[key], grad) for key, grad in expected.items())
        close = all(torch.allclose(grads[key], grad, rtol=1e-4, atol=1e-7) for key, grad in expected.items())
        votes = torch.tensor([float(equal), float(close)], device=kind)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        verdict = "the same bits as" if votes[0] else "to rounding those of" if votes[1] else "OTHER than those of"
        if rank == 0:
            print(f"{name:<14} {variant:<18} gradients: {verdict} replicas")
    gc.collect()
    gc.freeze()
    for turn in range(WARM_UP + rounds):
        for variant, step in steps.items():
            gc.collect()
            gc.disable()
            dist.barrier()
            _synchronize(kind)
            start = time.perf_counter()
            step()
            _synchronize(kind)
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=kind)
            gc.enable()
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                times[variant].append(float(took))
    if rank == 0:
        medians = {variant: statistics.median(seconds) for variant, seconds in times.items()}
        print(f"{name:<14} " + "  ".join(f"{variant} {1e3 * seconds:.0f} ms" for variant, seconds in medians.items()))
        for (variant, base), reach in REACH.items():
            print(f"{name:<14} {variant} / {base}: {against(medians[variant] / medians[base], reach)}", flush=True)


def compare_simulation(rank: int, folder: str, rounds: int, name: str, ranks: int) -> None:
    """Print measured and simulated times of each of our steps."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "these costs have no bytes")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2 * ranks)
    mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    net, x, target = TIME_CASES[name]()
    case = net, torch.randn_like(x) + mesh.get_local_rank("dp"), target
    steps, recorded = ({name: build_step(name, mesh, case, record) for name in OURS} for record in (False, True))
    predicted, took, ends = ({variant: list[float]() for variant in OURS} for _ in range(3))
    for turn in range(COMPARED + rounds):
        if turn >= COMPARED and (turn - COMPARED) % 5 == 0:
            for variant in OURS:
                program, costs = _profiled(variant, mesh, case)
                predicted[variant].append(fpipe.simulate(program, costs).delivered)
        for variant in OURS:
            seconds, timeline = _timed(steps[variant])[0], _timed(recorded[variant])[1].timeline
            if turn >= COMPARED:
                took[variant].append(seconds)
                ends[variant].append(max(timeline.ends))
    for variant in OURS if rank == 0 else ():
        medians = (1e3 * statistics.median(times[variant]) for times in (predicted, took, ends))
        predicted_ms, measured_ms, program_ms = medians
        error = against(100 * abs(predicted_ms / measured_ms - 1), 15.0)
        parts = f"measured {measured_ms:.1f} ms = program {program_ms:.1f} + outside {measured_ms - program_ms:.1f}"
        print(f"{name:<14} {variant:<18} simulated {predicted_ms:.1f} ms, {parts}: {error} % apart", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _timed(step: Callable[[], fpipe.Result]) -> tuple[float, fpipe.Result]:
    """Return the slowest process's seconds for a step that all begin together, and its result."""
    gc.collect()
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    result = step()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    gc.enable()
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took), result


def _profiled(variant: str, mesh: DeviceMesh, case: Any) -> tuple[fpipe.Program, fpipe.Costs]:
    """Return a variant's program, and its costs profiled while all processes are busy."""
    model, params, program = _program(variant, case, mesh.size(1))
    mine = fpipe.local_params(program, params, mesh.get_local_rank("pp"))
    mine = mine if variant == "replicas" else fpipe.shard_params(mine, mesh["dp"])
    return program, fpipe.profile(program, model, mine, case[1:], runtime="distributed", mesh=mesh)


def _full_grad(grad: Any) -> Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


def _synchronize(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def measure_memory(rank: int, kind: str, name: str, steps: dict[str, Step], rounds: int) -> None:
    """Print how far the resident peak grows in a step, or the memory allocated on a GPU."""
    ((variant, step),) = steps.items()
    for _ in range(2):
        step()
    grown: list[float] = []
    for _ in range(3):
        gc.collect()
        dist.barrier()
        _synchronize(kind)
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            start = torch.cuda.memory_allocated()
            step()
            grown.append((torch.cuda.max_memory_allocated() - start) / 2**20)
        else:
            Path("/proc/self/clear_refs").write_text("5")
            start = _status("VmRSS")
            step()
            grown.append(_status("VmHWM") - start)
    peak = torch.tensor(max(grown), device=kind)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        expected = PREDICTED.get(variant)
        note = f", sizes said {expected:.0f} ({peak / expected:.2f} of it)" if expected else ""
        print(f"{name:<14} {variant:<18} grows by {peak:.0f} MiB{note}", flush=True)


def _status(field: str) -> float:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) / 1024


def run(target: Callable[..., None], *arguments: Any, processes: int = 4) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(target, (folder, *arguments), nprocs=processes, start_method="spawn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--memory", action="store_true", help="memory alone")
    parser.add_argument("--simulated", action="store_true", help="simulated beside measured steps alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    rounds, ranks = 5 if options.quick else 20, 2 if (os.cpu_count() or 1) >= 8 else 1
    for name in TIME_CASES if options.simulated else ():
        run(compare_simulation, rounds, name, ranks, processes=2 * ranks)
    for name in () if options.memory or options.simulated else TIME_CASES:
        run(work, rounds, name, ["replicas", "once a step", "each use", *TORCHS], False, options.device)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    for name in () if options.simulated else MEMORY_CASES:
        for variant in (*OURS, *TORCHS):
            run(work, 1, name, [variant], True, options.device)
