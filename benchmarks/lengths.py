"""Time steps of lengths that have not been seen before, against hand-written microbatched eager autograd.

    python benchmarks/lengths.py [--quick]

ZB-H1, two ranks in one process and in two of gloo, one thread, four microbatches of one row. Each length runs as an
eager step, as a step whose length is new, and as the same step again; a ratio is that of the two within a length, in
CPU seconds of the busier process. Eager always runs in one. The first two lengths are traced, and not counted. Memory
is what the resident set grows by after the first tenth of the lengths; eager alone grows too, by kernels that torch
keeps for each shape.
"""

import argparse
import gc
import random
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from step import Block, against
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe

MICROBATCHES = 4
Case = tuple[nn.Module, fpipe.Model, Any, Callable[[int], Any], Callable[[Any, slice], Tensor]]


def gpt() -> Case:
    """Return a GPT, its model and parameters, a function that makes batches, and the loss of some rows."""
    net = nn.Sequential(*(Block(256) for _ in range(12)))
    model, params, _ = fpipe.from_sequential(net, stages=2, loss=F.mse_loss)

    def make_batch(length: int) -> tuple[Tensor, Tensor]:
        shape = MICROBATCHES, length, 256
        return torch.randn(shape), torch.randn(shape)

    return net, model, params, make_batch, lambda batch, rows: F.mse_loss(net(batch[0][rows]), batch[1][rows])


def llama() -> Case:
    """Return the same of a Llama of transformers, which computes its loss itself."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 4}
    net: Any = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes))

    def make_batch(length: int) -> tuple[dict[str, Tensor], None]:
        ids = torch.randint(256, (MICROBATCHES, length))
        return {"input_ids": ids, "labels": ids}, None

    model, params, _ = fpipe.from_module(net, 2, batch=make_batch(64)[0], microbatches=MICROBATCHES)

    def loss_of(batch: Any, rows: slice) -> Tensor:
        return net(**{key: leaf[rows] for key, leaf in batch[0].items()}).loss

    return net, model, params, make_batch, loss_of


CASES = {"GPT 12 x 256": gpt, "Llama 8 x 128": llama}


def resident_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def gather(number: float) -> list[float]:
    """Return a number of each process, once all have come here."""
    numbers = [number] * (dist.get_world_size() if dist.is_initialized() else 1)
    if len(numbers) > 1:
        dist.all_gather_object(numbers, number)
    return numbers


def compare(name: str, case: Case, lengths: Sequence[int], rank: int | None = None) -> None:
    """Print the ratios of a net; a `rank` runs its part in this process, and prints if it is the first."""
    net, model, params, make_batch, loss_of = case
    chain = fpipe.chain(
        fpipe.split(MICROBATCHES), fpipe.schedules.zb_h1(ranks=len(model.stages)), fpipe.merge(outputs=False)
    )
    options: dict[str, Any] = {}
    if rank is not None:
        options = {"runtime": "distributed", "example": (params, make_batch(lengths[0])), "check_batch": "never"}
    step = fpipe.build(chain(fpipe.program(model)), model, **options)

    def run_eager(batch: Any) -> None:
        net.zero_grad()
        for row in range(0 if rank else MICROBATCHES):
            (loss_of(batch, slice(row, row + 1)) / MICROBATCHES).backward()

    # 1. Eager alone on all lengths, so that what torch keeps for a shape is there before memory is compared.
    eager_start_mib = resident_mib()
    for length in lengths:
        run_eager(make_batch(length))
    eager_mib = resident_mib() - eager_start_mib
    # 2. Eager and both steps of each length.
    new_ratios, known_ratios, start_mib = list[float](), list[float](), 0.0
    for count, length in enumerate(lengths):
        batch = make_batch(length)
        seconds = list[float]()
        for run in (run_eager, lambda batch: step(params, batch), lambda batch: step(params, batch)):
            gather(0)
            start = time.process_time()
            run(batch)
            seconds.append(max(gather(time.process_time() - start)))
        if count > 1:
            new_ratios.append(seconds[1] / seconds[0])
            known_ratios.append(seconds[2] / seconds[0])
        if count == len(lengths) // 10:
            start_mib = resident_mib()
    growth_mib = max(gather(resident_mib() - start_mib))
    if rank:
        return
    print(
        f"{name}: {len(new_ratios)} new lengths, of eager's step in the median {statistics.median(new_ratios):.2f}",
        end=", ",
    )
    print(f"at most {against(max(new_ratios), 1.6)}, {sum(ratio <= 1.6 for ratio in new_ratios)} within 1.60")
    print(f"    a known length {against(statistics.median(known_ratios), 1.02)}", end=", ")
    print(f"MiB of memory {against(growth_mib, 20)}, eager alone before {eager_mib:.0f}", flush=True)


def compare_on_rank(rank: int, folder: str, lengths: Sequence[int]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=rank, world_size=2)
    for name, make_case in CASES.items():
        torch.manual_seed(0)
        compare(f"{name}, two processes", make_case(), lengths, rank)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer lengths")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = random.Random(0).sample(range(64, 320), 40 if quick else 200)
    for name, make_case in CASES.items():
        compare(name, make_case(), lengths)
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(compare_on_rank, (folder, lengths), nprocs=2, start_method="spawn")


if __name__ == "__main__":
    main()
