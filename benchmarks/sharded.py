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
from step import Block, within
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
    """Layers, and a batch of one replica."""
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers)))
    return net, *(torch.randn(32 * MICROBATCHES, width) for _ in range(2))


def gpt(width: int, blocks: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    """Blocks, and a batch of one replica."""
    net = nn.Sequential(*(Block(width) for _ in range(blocks)))
    return net, *(torch.randn(2 * MICROBATCHES, 64, width) for _ in range(2))


TIMED = {"MLP 1024 x 8": partial(mlp, 1024, 8), "GPT 256 x 6": partial(gpt, 256, 6)}
HELD = {"MLP 1024 x 8": partial(mlp, 1024, 8), "GPT 512 x 8": partial(gpt, 512, 8)}
OURS = {
    "replicas": (False, fpipe.data_parallel()),
    "once a step": (False, fpipe.shard()),
    "each use": (True, fpipe.shard(gather="use")),
    "each use, lead 0": (True, fpipe.shard(gather="use", lead=0)),
}
TORCHS = {"FSDP2, kept": False, "FSDP2, resharded": True}
TOLD: dict[str, float] = {}
"""MiB of the fullest rank in our steps, as `fpipe.sizes` has them."""
# What is to be reached, of what.
REACH = {
    ("once a step", "FSDP2, kept"): 0.80,
    ("each use", "FSDP2, resharded"): 0.93,
    ("once a step", "replicas"): 1.03,
}


def built(name: str, mesh: DeviceMesh, case: Any, record: bool = False) -> Callable[[], fpipe.Result]:
    """Our step of this process, on shards or whole parameters."""
    _, x, target = case
    model, params, program = _program(name, case, mesh.size(1))
    mine = fpipe.local_params(program, params, mesh.get_local_rank("pp"))
    if name != "replicas":
        mine = fpipe.shard_params(mine, mesh["dp"])
    share = 1 if name == "replicas" else 2
    told = fpipe.sizes(program, model, params, (x, target), runtime="distributed", replicas=share).peak
    TOLD[name] = max(told) / 2**20
    how: Any = {"mesh": mesh, "example": (mine, (x, target)), "record": record}
    return partial(fpipe.build(program, model, runtime="distributed", **how), mine, (x, target))


def ours(name: str, mesh: DeviceMesh, case: Any) -> Step:
    """Our step, as the gradients that it gives."""
    step = built(name, mesh, case)
    return lambda: {name: grad for stage in step().grads if stage is not None for name, grad in stage.items()}


def _program(name: str, case: Any, ranks: int) -> tuple[fpipe.Model, Any, fpipe.Program]:
    """Our way."""
    net, (blocks, last) = case[0], OURS[name]
    model, params, _ = fpipe.from_sequential(net, stages=len(net) if blocks else 2, loss=MSE)
    schedule = fpipe.schedules.one_f_one_b(ranks)
    merged = fpipe.chain(fpipe.split(MICROBATCHES), schedule, fpipe.merge(outputs=False))(fpipe.program(model))
    return model, params, last(merged)


def torchs(name: str, mesh: DeviceMesh, case: Any) -> Step:
    """torch's schedule on this rank's half of the net, each block of it sharded."""
    net, x, target = case
    rank, half = mesh.get_local_rank("pp"), len(net) // 2
    mine = net[rank * half : (rank + 1) * half]
    for block in mine:
        fully_shard(block, mesh=mesh["dp"], reshard_after_forward=TORCHS[name])
    fully_shard(mine, mesh=mesh["dp"], reshard_after_forward=TORCHS[name])
    stage = PipelineStage(mine, rank, 2, x.device, group=mesh.get_group("pp"))
    schedule = Schedule1F1B(stage, MICROBATCHES, loss_fn=MSE)
    names = {
        one: f"{rank * half + number}.{path}"
        for number, part in enumerate(mine)
        for path, one in part.named_parameters()
    }

    def run() -> dict[str, Tensor]:
        mine.zero_grad()
        schedule.step(*((x,) if rank == 0 else ()), **({"target": target} if rank else {}))
        return {names[one]: one.grad for one in mine.parameters()}

    return run


def work(rank: int, folder: str, rounds: int, name: str, ways: list[str], held: bool, kind: str) -> None:
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
        if torch.cuda.device_count() < 4:
            os.environ.update(NCCL_HOSTID=f"host {rank}", NCCL_SOCKET_IFNAME="lo")
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/group", rank=rank, world_size=4)
    mesh = init_device_mesh(kind, (2, 2), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    case = (HELD if held else TIMED)[name]()
    steps: dict[str, Step] = {}
    for way in ways:
        torch.manual_seed(mesh.get_local_rank("dp"))
        net, x, target = case
        other = torch.manual_seed(1) and (HELD if held else TIMED)[name]()[0]
        other.load_state_dict(net.state_dict())
        torch.manual_seed(5 + mesh.get_local_rank("dp"))
        own = other.to(kind), torch.randn_like(x).to(kind), torch.randn_like(target).to(kind)
        steps[way] = (ours if way in OURS else torchs)(way, mesh, own)
    del case, own, other, net
    (memory if held else times)(rank, kind, name, steps, rounds)
    dist.barrier()
    dist.destroy_process_group()


def times(rank: int, kind: str, name: str, steps: dict[str, Step], rounds: int) -> None:
    """Seconds of each step, and whether their gradients agree."""
    found: dict[str, list[float]] = {way: [] for way in steps}
    made = {way: {key: _whole(grad) for key, grad in step().items()} for way, step in steps.items()}
    for way, grads in made.items():
        same = all(torch.equal(grads[key], one) for key, one in made["replicas"].items())
        close = all(torch.allclose(grads[key], one, rtol=1e-4, atol=1e-7) for key, one in made["replicas"].items())
        votes = torch.tensor([float(same), float(close)], device=kind)
        dist.all_reduce(votes, dist.ReduceOp.MIN)
        words = "the same bits as" if votes[0] else "to rounding those of" if votes[1] else "OTHER than those of"
        if rank == 0:
            print(f"{name:<14} {way:<18} gradients: {words} replicas")
    gc.collect()
    gc.freeze()
    for turn in range(WARM_UP + rounds):
        for way, step in steps.items():
            gc.collect()
            gc.disable()
            dist.barrier()
            _finish(kind)
            start = time.perf_counter()
            step()
            _finish(kind)
            took = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=kind)
            gc.enable()
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if turn >= WARM_UP:
                found[way].append(float(took))
    if rank == 0:
        middle = {way: statistics.median(each) for way, each in found.items()}
        print(f"{name:<14} " + "  ".join(f"{way} {1e3 * one:.0f} ms" for way, one in middle.items()))
        for (one, other), reach in REACH.items():
            print(f"{name:<14} {one} / {other}: {within(middle[one] / middle[other], reach)}", flush=True)


def simulated(rank: int, folder: str, rounds: int, name: str, ranks: int) -> None:
    """How long each of our steps takes, and how long it was said to take."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "these costs have no bytes")
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2 * ranks)
    mesh = init_device_mesh("cpu", (2, ranks), mesh_dim_names=("dp", "pp"))
    torch.manual_seed(0)
    net, x, target = TIMED[name]()
    case = net, torch.randn_like(x) + mesh.get_local_rank("dp"), target
    steps, recorded = ({way: built(way, mesh, case, record) for way in OURS} for record in (False, True))
    told, took, ended = ({way: list[float]() for way in OURS} for _ in range(3))
    for turn in range(COMPARED + rounds):
        if turn >= COMPARED and (turn - COMPARED) % 5 == 0:
            for way in OURS:
                program, costs = _profiled(way, mesh, case)
                told[way].append(fpipe.simulate(program, costs).delivered)
        for way in OURS:
            seconds, timeline = _timed(steps[way])[0], _timed(recorded[way])[1].timeline
            if turn >= COMPARED:
                took[way].append(seconds)
                ended[way].append(max(timeline.ends))
    for way in OURS if rank == 0 else ():
        said, found, inside = (1e3 * statistics.median(times[way]) for times in (told, took, ended))
        off = within(100 * abs(said / found - 1), 15.0)
        parts = f"measured {found:.1f} ms = program {inside:.1f} + outside {found - inside:.1f}"
        print(f"{name:<14} {way:<18} simulated {said:.1f} ms, {parts}: {off} % apart", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _timed(step: Callable[[], fpipe.Result]) -> tuple[float, fpipe.Result]:
    """Seconds of a step that all processes begin together, in the slowest, and its result."""
    gc.collect()
    gc.disable()
    dist.barrier()
    start = time.perf_counter()
    found = step()
    took = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    gc.enable()
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return float(took), found


def _profiled(way: str, mesh: DeviceMesh, case: Any) -> tuple[fpipe.Program, fpipe.Costs]:
    """Our way, and what its ops, messages and collectives cost while all are busy."""
    model, params, program = _program(way, case, mesh.size(1))
    mine = fpipe.local_params(program, params, mesh.get_local_rank("pp"))
    mine = mine if way == "replicas" else fpipe.shard_params(mine, mesh["dp"])
    return program, fpipe.profile(program, model, mine, case[1:], runtime="distributed", mesh=mesh)


def _whole(grad: Any) -> Tensor:
    return (grad.full_tensor() if hasattr(grad, "full_tensor") else grad).clone()


def _finish(kind: str) -> None:
    if kind == "cuda":
        torch.cuda.synchronize()


def memory(rank: int, kind: str, name: str, steps: dict[str, Step], rounds: int) -> None:
    """How far the resident peak grows in a step, or what is allocated on a GPU."""
    ((way, step),) = steps.items()
    for _ in range(2):
        step()
    grown: list[float] = []
    for _ in range(3):
        gc.collect()
        dist.barrier()
        _finish(kind)
        if kind == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step()
            grown.append((torch.cuda.max_memory_allocated() - before) / 2**20)
        else:
            Path("/proc/self/clear_refs").write_text("5")
            before = _status("VmRSS")
            step()
            grown.append(_status("VmHWM") - before)
    most = torch.tensor(max(grown), device=kind)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    if rank == 0:
        told = f", sizes said {TOLD[way]:.0f} ({most / TOLD[way]:.2f} of it)" if way in TOLD else ""
        print(f"{name:<14} {way:<18} grows by {most:.0f} MiB{told}", flush=True)


def _status(word: str) -> float:
    found = re.search(rf"{word}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def run(target: Callable[..., None], *how: Any, processes: int = 4) -> None:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(target, (folder, *how), nprocs=processes, start_method="spawn")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--memory", action="store_true", help="memory alone")
    parser.add_argument("--simulated", action="store_true", help="simulated beside measured steps alone")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    said = parser.parse_args()
    rounds, ranks = 5 if said.quick else 20, 2 if (os.cpu_count() or 1) >= 8 else 1
    for name in TIMED if said.simulated else ():
        run(simulated, rounds, name, ranks, processes=2 * ranks)
    for name in () if said.memory or said.simulated else TIMED:
        run(work, rounds, name, ["replicas", "once a step", "each use", *TORCHS], False, said.device)
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    for name in () if said.simulated else HELD:
        for way in (*OURS, *TORCHS):
            run(work, 1, name, [way], True, said.device)
