"""Measure the bytes that one stage holds, against eager autograd and the split backward of torch's pipeline runtime.

    python benchmarks/memory.py

It measures between F and B, at most inside B, and between I and W. It counts, after each op, the bytes of storages that
ops have made and that are still alive, without parameters and without an op's own workspace. Everything that the next
part does not read is freed first: the output too, since autograd needs only its node. The floor between I and W is what
W must read: for each module with parameters of its own its input, and the gradient of its output.
"""

import argparse
import math
from typing import Any

import torch
from step import Block, against
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fpipe

MIB = 2**20


class Softmax(Block):
    """The block with its attention written out, so that all of its weights are there at once."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        ahead = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool).triu(1)
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        return scores.masked_fill(ahead, -torch.inf).softmax(-1) @ v


class Meter(TorchDispatchMode):
    """Count the bytes of storages that ops have made and that are still alive, now and at the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.size_by_storage: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        input_storages = storages((args, kwargs))
        self.size_by_storage |= {key: size for key, size in storages(output).items() if key not in input_storages}
        self.peak = max(self.peak, self.live_bytes())
        return output

    def live_bytes(self) -> int:
        self.size_by_storage = {key: size for key, size in self.size_by_storage.items() if not key.expired()}
        return sum(self.size_by_storage.values())


def storages(values: Any) -> dict[StorageWeakRef, int]:
    leaf_storages = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {StorageWeakRef(storage): storage.nbytes() for storage in leaf_storages}


def measure_eager(block: Block, shape: tuple[int, ...]) -> tuple[int, int]:
    """Measure the bytes that autograd holds between forward and backward, and its peak inside the backward."""
    block.zero_grad()
    with Meter() as meter:
        node = get_gradient_edge(block(torch.randn(shape).requires_grad_()))
        held_bytes = meter.live_bytes()
        dy = torch.randn(shape)
        meter.peak = 0
        torch.autograd.backward([node], [dy])
    return held_bytes, meter.peak


def measure_torch(block: Block, shape: tuple[int, ...]) -> int:
    block.zero_grad()
    with Meter() as meter:
        x = torch.randn(shape).requires_grad_()
        _, groups = stage_backward_input([block(x)], [torch.randn(shape)], [x], block.parameters())
        del x, _
        held_bytes = meter.live_bytes()
        stage_backward_weight(block.parameters(), groups)
    return held_bytes


def measure_fpipe(block: Block, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Measure the bytes that a step's functions hold between F and B, at most inside B, and between I and W."""
    params = {name: parameter.detach() for name, parameter in block.named_parameters()}
    linearized = fpipe.linearize(lambda p, x: torch.func.functional_call(block, p, x), params, torch.empty(shape))
    with torch.no_grad(), Meter() as meter:
        residuals = linearized.forward(params, torch.randn(shape))[1]
        held_bytes = meter.live_bytes()
        dy = torch.randn(shape)
        meter.peak = 0
        linearized.backward(params, residuals, dy, last=True)
        peak = meter.peak
    with torch.no_grad(), Meter() as meter:
        residuals = linearized.forward(params, torch.randn(shape))[1]
        weight_residuals = linearized.backward_input(params, residuals, torch.randn(shape), last=True)[1]
        i_to_w_bytes = meter.live_bytes()
        linearized.backward_weight(params, weight_residuals, last=True)
    return held_bytes, peak, i_to_w_bytes


def measure_floor(block: Block, shape: tuple[int, ...]) -> int:
    """Measure the bytes that enter and leave modules with parameters of their own."""
    sizes: list[int] = []

    def record_sizes(module: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        sizes.append(inputs[0].nbytes + output.nbytes)

    hooks = [m.register_forward_hook(record_sizes) for m in block.modules() if [*m.parameters(recurse=False)]]
    block(torch.randn(shape))
    for hook in hooks:
        hook.remove()
    return sum(sizes)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    shape = (4, 256, 64)
    print(f"{'MiB, width 64, T=256, 4 rows':36} {'F to B':>22} {'inside B':>22} {'I to W':>8}")
    for name, block in {"block, softmax written out": Softmax(64), "block, torch's attention": Block(64)}.items():
        held_bytes, peak = measure_eager(block, shape)
        sizes = measure_fpipe(block, shape)
        print(f"{name + ': eager':36} {held_bytes / MIB:8.2f} {'':13} {peak / MIB:8.2f}")
        print(f"{'  torch pipelining':36} {'':22} {'':22} {measure_torch(block, shape) / MIB:8.2f}")
        print(
            f"{'  fpipe':36} {sizes[0] / MIB:8.2f} {against(sizes[0] / held_bytes, 1.0)} {sizes[1] / MIB:8.2f} "
            f"{against(sizes[1] / peak, 1.0)} {sizes[2] / MIB:8.2f}"
        )
        print(f"{'  floor':36} {'':22} {'':22} {measure_floor(block, shape) / MIB:8.2f}")


if __name__ == "__main__":
    main()
