"""Time steps of lengths that have not been seen before, against hand-written microbatched eager autograd.

    python benchmarks/lengths.py [--quick]

ZB-H1, two ranks in one process, one thread, four microbatches of one row. Each length runs as an eager step, as a step
whose length is new, and as the same step again; a ratio is that of the two within a length, in CPU seconds of this
process. The first two lengths are traced, and not counted. Memory is what the resident set grows by after the first
tenth of the lengths; eager alone grows too, by kernels that torch keeps for each shape.
"""

import argparse
import gc
import random
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
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


def resident_mib() -> float:
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


def compare(name: str, case: Case, lengths: Sequence[int]) -> None:
    net, model, params, make_batch, loss_of = case
    chain = fpipe.chain(
        fpipe.split(MICROBATCHES), fpipe.schedules.zb_h1(ranks=len(model.stages)), fpipe.merge(outputs=False)
    )
    step = fpipe.build(chain(fpipe.program(model)), model)

    def run_eager(batch: Any) -> None:
        net.zero_grad()
        for row in range(MICROBATCHES):
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
            start = time.process_time()
            run(batch)
            seconds.append(time.process_time() - start)
        if count > 1:
            new_ratios.append(seconds[1] / seconds[0])
            known_ratios.append(seconds[2] / seconds[0])
        if count == len(lengths) // 10:
            start_mib = resident_mib()
    print(
        f"{name}: {len(new_ratios)} new lengths, of eager's step in the median {statistics.median(new_ratios):.2f}",
        end=", ",
    )
    print(f"at most {against(max(new_ratios), 1.6)}, {sum(ratio <= 1.6 for ratio in new_ratios)} within 1.60")
    print(f"    a known length {against(statistics.median(known_ratios), 1.02)}", end=", ")
    print(f"MiB of memory {against(resident_mib() - start_mib, 20)}, eager alone before {eager_mib:.0f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer lengths")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    lengths = random.Random(0).sample(range(64, 320), 40 if quick else 200)
    compare("GPT 12 x 256", gpt(), lengths)
    compare("Llama 8 x 128", llama(), lengths)


if __name__ == "__main__":
    main()
