"""Train a byte-level GPT on several processes, one a rank of the pipeline: save, resume, and compare with one process.

torchrun --standalone --nproc-per-node 2 examples/train_gpt.py --check
torchrun --standalone --nproc-per-node 4 examples/train_gpt.py --check --replicas 2
"""

from __future__ import annotations

import argparse
import copy
import os
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from demo import Batch, Sizes, batches, cross_entropy, gpt
from rich.console import Console
from torch.distributed.device_mesh import init_device_mesh

import fpipe
from fpipe import callbacks

MICROBATCHES, RATE, LIMIT = 8, 8e-3, 1.0


def arguments(typed: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="how many steps the whole training has (%(default)s)")
    parser.add_argument("--stop", type=int, help="stop after this one of them")
    parser.add_argument("--blocks", type=int, default=Sizes.blocks, help="stages are two more at most (%(default)s)")
    parser.add_argument("--schedule", default="one_f_one_b", help="a schedule by name (%(default)s)")
    parser.add_argument("--stages-per-rank", type=int, default=1, help="2 for zbv, interleaved and the like")
    parser.add_argument("--replicas", type=int, default=1, help="how many pipelines train on rows of their own")
    parser.add_argument("--save", type=Path, help="a folder to save to after the last step")
    parser.add_argument("--resume", type=Path, help="a folder to go on from, saved by any number of either")
    parser.add_argument("--csv", type=Path, help="a CSV file for the numbers of each step")
    parser.add_argument("--bfloat16", action="store_true", help="compute in bfloat16 where that will do")
    parser.add_argument("--check", action="store_true", help="rank 0 trains in one process too, to compare")
    return parser.parse_args(typed)


class Trainer:
    """Parameters and optimizer state of one rank, or of all ranks that this process runs."""

    def __init__(self, program: fpipe.Program, params: tuple[Any, ...], step: Any) -> None:
        self.step, self.params, self.opt = step, params, fpipe.optimizer_state(program, params)

    def __call__(self, number: int, steps: int, batch: Batch) -> Any:
        """Take a step at a rate that warms up and then falls; return its loss, which the first rank has."""
        rate = RATE * min(number / 20, 1 - (number - 1) / steps)
        result = self.step(self.params, batch, opt=self.opt, lr=rate)
        self.params, self.opt = result.params, result.opt
        return result.loss


def main() -> None:
    options = arguments()
    if "RANK" not in os.environ:
        raise SystemExit("Start it by torchrun: torchrun --standalone --nproc-per-node 2 examples/train_gpt.py")
    torch.set_num_threads(1)  # sums of several threads have other bits
    dist.init_process_group("gloo")
    train(options, Console())
    dist.destroy_process_group()


def train(options: argparse.Namespace, console: Console) -> tuple[int, int]:
    """Train on one rank; return the number of steps, and the number whose loss was that of one process."""
    replicas, ranks, stop = options.replicas, dist.get_world_size() // options.replicas, options.stop or options.steps
    mesh = init_device_mesh("cpu", (replicas, ranks), mesh_dim_names=("dp", "pp"))
    replica, rank, shows = mesh.get_local_rank("dp"), mesh.get_local_rank("pp"), dist.get_rank() == 0
    torch.manual_seed(0)  # each process makes the whole net, and trains what is its own
    sizes = Sizes(steps=options.steps, blocks=options.blocks)
    model, params, _ = fpipe.from_sequential(gpt(sizes), stages=ranks * options.stages_per_rank, loss=cross_entropy)
    full_params = copy.deepcopy(params)
    schedule = fpipe.schedules.get(options.schedule)(ranks)
    program = pipeline(model, MICROBATCHES // replicas, schedule, *[fpipe.data_parallel("dp")] * (replicas > 1))
    *train_batches, unseen = islice(batches(sizes), stop + 1)
    precision: Any = {"autocast": torch.bfloat16 if options.bfloat16 else None}
    build_options: Any = {"runtime": "distributed", "mesh": mesh, "timeout": 120, **precision}
    build_options["example"] = params, rows_of(unseen, replica, replicas)
    mine = fpipe.local_params(program, params, rank)
    trainer, done = Trainer(program, mine, fpipe.build(program, model, donate=True, **build_options)), 0
    evaluate = fpipe.build(fpipe.forward_only()(program), fpipe.evaluating(model), **build_options)
    if options.resume is not None:
        trainer.params, trainer.opt, _, numbers = fpipe.load(options.resume, program, mine, opt=trainer.opt, mesh=mesh)
        done = int(numbers["steps"])

    single = None
    if options.check and shows:
        program_of_one = pipeline(model, MICROBATCHES, schedule)
        single = Trainer(program_of_one, full_params, fpipe.build(program_of_one, model, **precision))
        for number, batch in enumerate(train_batches[:done], 1):
            single(number, options.steps, batch)

    equal = 0
    near = 0.0 if replicas == 1 else 1e-4  # replicas add up in another order
    work = callbacks.Workload(tokens=train_batches[0][0].numel())
    trackers = [callbacks.Progress(stop, work, completed=done, interval=max(1, options.steps // 6), console=console)]
    trackers += [] if options.csv is None else [callbacks.CSV(options.csv, work)]
    with callbacks.track(trainer.step, *trackers) as trainer.step:
        for number, batch in enumerate(train_batches[done:], done + 1):
            loss = trainer(number, options.steps, rows_of(batch, replica, replicas))
            equal += single is not None and abs(loss - single(number, options.steps, batch)) <= near * loss
    if options.save is not None:
        fpipe.save(options.save, program, trainer.params, opt=trainer.opt, mesh=mesh, steps=stop)
    loss = evaluate(trainer.params, rows_of(unseen, replica, replicas)).loss
    if shows:
        console.print(f"unseen text  loss {loss:.6f}")
    if single is not None:
        agreement = "bitwise equal" if replicas == 1 else "equal to rounding"
        console.print(
            f"The losses of {replicas * ranks} processes and of one are {agreement} at {equal} of {stop - done} steps."
        )
    return stop - done, equal


def pipeline(model: fpipe.Model, microbatches: int, schedule: Any, *replicas: Any) -> fpipe.Program:
    """Build the program of one replica: gradients, their norm over all ranks, and an update by AdamW."""
    parts = fpipe.split(microbatches), schedule, fpipe.merge(), *replicas, fpipe.update("AdamW", clip=LIMIT)
    return fpipe.chain(*parts)(fpipe.program(model))


def rows_of(batch: Batch, replica: int, replicas: int) -> Batch:
    """Return a replica's rows: equally many, as a DistributedSampler gives them."""
    inputs, target = batch
    return inputs[replica::replicas].contiguous(), target[replica::replicas].contiguous()


if __name__ == "__main__":
    main()
