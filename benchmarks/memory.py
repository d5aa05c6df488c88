"""What one stage holds between F and B, at most inside B, and between I and W: against eager autograd, and against the
split of torch's own pipeline runtime.

    python benchmarks/memory.py

Counted are the storages that ops have made and that are still there, by their bytes, after each op; parameters aside,
and without what an op itself uses while it runs. Everything that the next part does not read is let go first: the
output too, of which autograd needs only the node that made it. The floor between I and W is what W must be handed: for
each module with parameters of its own what came in, and the gradient of what went out.
"""

import argparse
import math
from typing import Any

import torch
from step import Block, within
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
    """Bytes of what ops have made and that is still there, now and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[StorageWeakRef, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = storages((args, kwargs))
        self.made |= {storage: size for storage, size in storages(made).items() if storage not in given}
        self.peak = max(self.peak, self.now())
        return made

    def now(self) -> int:
        self.made = {storage: size for storage, size in self.made.items() if not storage.expired()}
        return sum(self.made.values())


def storages(values: Any) -> dict[StorageWeakRef, int]:
    found = (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor))
    return {StorageWeakRef(storage): storage.nbytes() for storage in found}


def eager(block: Block, shape: tuple[int, ...]) -> tuple[int, int]:
    """Bytes that autograd holds between forward and backward, and at most inside the backward."""
    block.zero_grad()
    with Meter() as meter:
        node = get_gradient_edge(block(torch.randn(shape).requires_grad_()))
        held = meter.now()
        dy = torch.randn(shape)
        meter.peak = 0
        torch.autograd.backward([node], [dy])
    return held, meter.peak


def torchs_own(block: Block, shape: tuple[int, ...]) -> int:
    """Bytes that torch's runtime holds between its two halves of the backward."""
    block.zero_grad()
    with Meter() as meter:
        x = torch.randn(shape).requires_grad_()
        _, groups = stage_backward_input([block(x)], [torch.randn(shape)], [x], block.parameters())
        del x, _
        held = meter.now()
        stage_backward_weight(block.parameters(), groups)
    return held


def ours(block: Block, shape: tuple[int, ...]) -> tuple[int, int, int]:
    """Bytes between F and B, at most inside B, and between I and W: of the functions that a step calls."""
    params = {name: parameter.detach() for name, parameter in block.named_parameters()}
    one = fpipe.linearize(lambda p, x: torch.func.functional_call(block, p, x), params, torch.empty(shape))
    with torch.no_grad(), Meter() as meter:
        res = one.forward(params, torch.randn(shape))[1]
        held = meter.now()
        dy = torch.randn(shape)
        meter.peak = 0
        one.backward(params, res, dy, last=True)
        peak = meter.peak
    with torch.no_grad(), Meter() as meter:
        res = one.forward(params, torch.randn(shape))[1]
        wres = one.backward_input(params, res, torch.randn(shape), last=True)[1]
        between = meter.now()
        one.backward_weight(params, wres, last=True)
    return held, peak, between


def floor(block: Block, shape: tuple[int, ...]) -> int:
    """Bytes that come into and go out of modules with parameters of their own."""
    sizes: list[int] = []

    def look(module: Any, given: tuple[Tensor, ...], made: Tensor) -> None:
        sizes.append(given[0].nbytes + made.nbytes)

    hooks = [m.register_forward_hook(look) for m in block.modules() if [*m.parameters(recurse=False)]]
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
        held, peak = eager(block, shape)
        mine = ours(block, shape)
        print(f"{name + ': eager':36} {held / MIB:8.2f} {'':13} {peak / MIB:8.2f}")
        print(f"{'  torch pipelining':36} {'':22} {'':22} {torchs_own(block, shape) / MIB:8.2f}")
        print(
            f"{'  fpipe':36} {mine[0] / MIB:8.2f} {within(mine[0] / held, 1.0)} {mine[1] / MIB:8.2f} "
            f"{within(mine[1] / peak, 1.0)} {mine[2] / MIB:8.2f}"
        )
        print(f"{'  floor':36} {'':22} {'':22} {floor(block, shape) / MIB:8.2f}")


if __name__ == "__main__":
    main()
