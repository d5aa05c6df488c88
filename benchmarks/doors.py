"""How long it takes from a net to its first step, against what `torch.export` alone takes for it.

    python benchmarks/doors.py [--layers 12] [--width 256]

A GPT-2 of transformers, cut into four stages by `from_module`; four microbatches, ZB-H1. Times are those of the process
on its CPUs, in seconds, the least of three rounds that alternate: other work on the machine counts little.
"""

import argparse
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers

import fpipe

WORDS, ROWS, LENGTH, ROUNDS = 1000, 8, 32, 3


def gpt2(layers: int, width: int) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=WORDS, n_positions=128, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.loss_type, config.use_cache = "ForCausalLM", False
    return transformers.GPT2LMHeadModel(config).train()


def timed(what: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.process_time()
    made = what()
    return time.process_time() - start, made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = gpt2(asked.layers, asked.width)
    ids = torch.randint(0, WORDS, (ROWS, LENGTH))
    inputs = {"input_ids": ids, "labels": ids}
    shapes = {name: dict.fromkeys(range(2), torch.export.Dim.AUTO) for name in inputs}

    def export() -> Any:
        return torch.export.export(net, (), inputs, strict=False, dynamic_shapes=shapes)

    def cut() -> Any:
        return fpipe.from_module(net, 4, example=inputs)

    rounds: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        alone, _ = timed(export)
        door, (model, params, _) = timed(cut)
        program = fpipe.chain(fpipe.split(4), fpipe.schedules.zb_h1(4), fpipe.merge())(fpipe.program(model))
        step = fpipe.build(program, model)
        first, _ = timed(lambda step=step, params=params: step(params, (inputs, None), key=0))
        rounds.append((alone, door, first))
    alone, door, first = map(min, zip(*rounds, strict=True))
    print(f"GPT-2, {asked.layers} blocks of width {asked.width}, in seconds of CPU")
    print(f"torch.export {alone:.1f}   from_module {door:.1f}   first step {first:.1f}")
    print(f"from_module and first step: {(door + first) / alone:.2f} x torch.export")


if __name__ == "__main__":
    main()
