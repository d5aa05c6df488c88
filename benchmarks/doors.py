"""Time the way from a net to its first step, against `torch.export` alone.

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

VOCABULARY, ROWS, LENGTH, ROUNDS = 1000, 8, 32, 3


def gpt2(layers: int, width: int) -> torch.nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=128, n_embd=width, n_layer=layers, n_head=4, bos_token_id=0, eos_token_id=0
    )
    config.loss_type, config.use_cache = "ForCausalLM", False
    return transformers.GPT2LMHeadModel(config).train()


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    gc.collect()
    start = time.process_time()
    result = function()
    return time.process_time() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = gpt2(options.layers, options.width)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    inputs = {"input_ids": ids, "labels": ids}
    shapes = {name: dict.fromkeys(range(2), torch.export.Dim.AUTO) for name in inputs}

    def export() -> Any:
        return torch.export.export(net, (), inputs, strict=False, dynamic_shapes=shapes)

    def cut() -> Any:
        return fpipe.from_module(net, 4, batch=inputs)

    rounds: list[tuple[float, float, float]] = []
    for _ in range(ROUNDS):
        export_seconds, _ = timed(export)
        door_seconds, (model, params, _) = timed(cut)
        program = fpipe.chain(fpipe.split(4), fpipe.schedules.zb_h1(4), fpipe.merge())(fpipe.program(model))
        step = fpipe.build(program, model)
        step_seconds, _ = timed(lambda step=step, params=params: step(params, (inputs, None), key=0))
        rounds.append((export_seconds, door_seconds, step_seconds))
    export_seconds, door_seconds, step_seconds = map(min, zip(*rounds, strict=True))
    print(f"GPT-2, {options.layers} blocks of width {options.width}, in seconds of CPU")
    print(f"torch.export {export_seconds:.1f}   from_module {door_seconds:.1f}   first step {step_seconds:.1f}")
    print(f"from_module and first step: {(door_seconds + step_seconds) / export_seconds:.2f} x torch.export")


if __name__ == "__main__":
    main()
