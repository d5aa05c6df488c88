"""Run a table with transfers on torch's own pipeline runtime, one process a rank, and print what it gets."""

import json
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.pipelining import PipelineStage, schedules

WIDTH = 4


def nets(stages: int) -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [torch.nn.Linear(WIDTH, WIDTH) for _ in range(stages)]


def batch(microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(2 * microbatches, WIDTH), torch.randn(2 * microbatches, WIDTH)


def work(rank: int, placement: list[int], microbatches: int, folder: str) -> None:
    torch.set_num_threads(1)
    world = 1 + max(placement)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    mine = {stage: net for stage, net in enumerate(nets(len(placement))) if placement[stage] == rank}
    stages = [PipelineStage(net, stage, len(placement), torch.device("cpu")) for stage, net in mine.items()]
    runtime = schedules._PipelineScheduleRuntime(stages, microbatches, loss_fn=torch.nn.functional.mse_loss)
    runtime._load_csv(f"{folder}/table.csv", format="compute_comms")
    x, target = batch(microbatches)
    runtime.step(*((x,) if 0 in mine else ()), **({"target": target} if len(placement) - 1 in mine else {}))
    torch.save({stage: net.weight.grad for stage, net in mine.items()}, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    table, placement, microbatches = json.load(sys.stdin)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "table.csv").write_text(table)
        torch.multiprocessing.start_processes(
            work, (placement, microbatches, folder), nprocs=1 + max(placement), start_method="fork"
        )
        found = {}
        for file in Path(folder).glob("*.pt"):
            found |= torch.load(file)
    print(json.dumps([found[stage].tolist() for stage in sorted(found)]))
