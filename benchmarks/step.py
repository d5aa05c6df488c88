"""How long one local step takes, against hand-written microbatched eager autograd, alternating in one run.

    python benchmarks/step.py [--quick]

Four stages, eight microbatches, one thread. The floor is the time of the step's own torch ops: the functions of its
stages alone, called in the step's order on the step's tensors, with no program around them.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe

MICROBATCHES, STAGES = 8, 4


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each added to what came in."""

    def __init__(self, width: int, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.perceptron = nn.Sequential(nn.LayerNorm(width), *wide)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.perceptron(x)


def mlp(width: int, rows: int) -> tuple[nn.Sequential, Tensor, Tensor]:
    net = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(8)))
    return net, torch.randn(rows * MICROBATCHES, width), torch.randn(rows * MICROBATCHES, width)


def gpt(width: int = 64, length: int = 64, rows: int = 4) -> tuple[nn.Sequential, Tensor, Tensor]:
    net = nn.Sequential(*(Block(width) for _ in range(4)))
    shape = (rows * MICROBATCHES, length, width)
    return net, torch.randn(shape), torch.randn(shape)


def eager(net: nn.Module, x: Tensor, target: Tensor) -> Callable[[], None]:
    """What one writes without a library: forward and backward of each microbatch, gradients added up in `.grad`."""

    def step() -> None:
        for parameter in net.parameters():
            parameter.grad = None
        for part, wanted in zip(x.tensor_split(MICROBATCHES), target.tensor_split(MICROBATCHES), strict=True):
            (F.mse_loss(net(part), wanted) * (len(part) / len(x))).backward()

    return step


def pipelined(net: nn.Sequential, x: Tensor, target: Tensor, split: bool) -> Callable[[], object]:
    model, params, _ = fpipe.from_sequential(net, stages=STAGES, loss=F.mse_loss)
    pipeline = fpipe.chain(
        fpipe.split(MICROBATCHES),
        fpipe.split_backward() if split else fpipe.identity(),
        fpipe.schedules.one_f_one_b(ranks=STAGES),
        fpipe.merge(outputs=False),
    )
    step = fpipe.build(pipeline(fpipe.program(model)), model)
    return lambda: step(params, (x, target))


def compare(steps: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median seconds of each, measured in turns."""
    for step in steps.values():
        for _ in range(5):
            step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds):
        for name, step in steps.items():
            start = time.perf_counter()
            step()
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    quick = parser.parse_args().quick
    torch.set_num_threads(1)
    torch.manual_seed(0)
    cases = {
        "MLP, width 8, 1 row": (mlp(8, 1), 400),
        "MLP, width 512, 8 rows": (mlp(512, 8), 40),
        "MLP, width 512, 128 rows": (mlp(512, 128), 15),
        "GPT, width 64, T=64, 4 rows": (gpt(), 30),
    }
    for name, ((net, x, target), rounds) in cases.items():
        steps = {
            "eager": eager(net, x, target),
            "B": pipelined(net, x, target, False),
            "IW": pipelined(net, x, target, True),
        }
        took = compare(steps, rounds // 4 if quick else rounds)
        print(
            f"{name:28} eager {took['eager'] * 1e3:8.2f} ms   fpipe {took['B'] * 1e3:8.2f} ms = "
            f"{took['B'] / took['eager']:.2f} of eager   with I and W {took['IW'] / took['B']:.2f} of that"
        )


if __name__ == "__main__":
    main()
