"""Train with DP-SGD as a pipeline: the gradient of each example is clipped before they are added and noise goes on."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe
from fpipe import tree

RANKS, MICROBATCHES, ROWS, CLASSES, SEED = 2, 4, 64, 4, 0


def sample_points(rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw points [rows, 2] around a circle, and the quarter of each."""
    angle = torch.rand(rows, generator=torch.Generator().manual_seed(seed)) * 2 * torch.pi
    return torch.stack([angle.cos(), angle.sin()], 1), (angle / (2 * torch.pi) * CLASSES).long()


def network() -> nn.Sequential:
    """Build three linear layers with a norm that reads one row alone, for two stages."""
    return nn.Sequential(
        nn.Linear(2, 32), nn.LayerNorm(32), nn.GELU(), nn.Linear(32, 32), nn.GELU(), nn.Linear(32, CLASSES)
    )


def private_gradient(rows: Any, limit: float, noise: float, generator: torch.Generator) -> Any:
    """Return the mean of row gradients, each clipped to a norm of `limit` over all stages, with noise of `noise` times
    `limit` (Abadi et al. 2016, algorithm 1)."""
    leaves, containers = tree.flatten(rows)
    norms = torch.stack([leaf.flatten(1).norm(dim=1) for leaf in leaves]).norm(dim=0)
    factors = (limit / norms).clamp(max=1.0)
    sums = [torch.tensordot(factors, leaf, 1) for leaf in leaves]
    noisy = [grad + limit * noise * torch.randn(grad.shape, generator=generator) for grad in sums]
    return tree.unflatten(containers, [grad / len(norms) for grad in noisy])


def pipeline(model: fpipe.Model) -> Any:
    """Build a step that returns the gradient of each row, on a zero-bubble schedule."""
    program = fpipe.chain(
        fpipe.split(MICROBATCHES), fpipe.schedules.zb_h1(RANKS), fpipe.merge(grads="rows", outputs=False)
    )(fpipe.program(model))
    return fpipe.build(program, model)


def run(steps: int = 150, limit: float = 1.0, noise: float = 0.5, rate: float = 1.0) -> float:
    """Train, and return the accuracy on new points."""
    torch.manual_seed(SEED)
    net = network()
    model, params, _ = fpipe.from_sequential(net, stages=RANKS, loss=F.cross_entropy)
    step, generator = pipeline(fpipe.per_example(model)), torch.Generator().manual_seed(SEED)
    optimizer = torch.optim.SGD(net.parameters(), lr=rate)
    for number in range(steps):
        result = step(params, sample_points(ROWS, number))
        fpipe.assign_grads(net, private_gradient(result.grads, limit, noise, generator))
        optimizer.step()
        if number % 50 == 0 or number == steps - 1:
            losses = result.aux["loss"]
            print(f"step {number:4}: loss {losses.mean():.3f}, of the worst example {losses.max():.3f}")
    x, target = sample_points(1000, steps)
    right = (net(x).argmax(1) == target).float().mean().item()
    print(f"{right:.1%} of 1000 new points are right.")
    return right


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--noise", type=float, default=0.5, help="standard deviation of the noise, times the limit")
    options = parser.parse_args()
    run(options.steps, noise=options.noise)
