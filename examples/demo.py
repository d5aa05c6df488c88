"""Train a byte-level GPT as a pipeline program and by plain autograd, side by side, and compare every bit."""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe

try:
    from rich import box
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table
except ImportError:
    raise SystemExit("The demo shows progress and tables with rich, which is missing: pip install rich") from None

RANKS, MICROBATCHES, SEED, RATE = 4, 8, 0, 8e-3
SCHEDULES = {"gpipe": fpipe.schedules.gpipe, "one_f_one_b": fpipe.schedules.one_f_one_b}
TRAINED = ("one_f_one_b", "except_last", True)
PROGRAMS = list(product(SCHEDULES, ("never", "except_last", "always"), (False, True)))
ABOUT = f"""\
This trains a GPT on the bytes of Python's own documentation twice, from the same start: as an fpipe
program for {RANKS} ranks, walked in this one process, and by plain autograd on one device. Losses, final
parameters and the gradients of {len(PROGRAMS)} programs are compared bit by bit.
"""
TRY = (
    "print(fpipe.plot(fpipe.chain(fpipe.split(6), fpipe.schedules.gpipe(ranks=3))(fpipe.program(3))))",
    "mine = fpipe.schedules.from_table('0F0 0F1 0B0 0B1 \\n 1F0 1B0 1F1 1B1')  # a line a rank",
    "print(fpipe.simulate(fpipe.chain(fpipe.split(2), mine)(fpipe.program(2))))",
)

Batch = tuple[Tensor, Tensor]
Params = tuple[dict[str, Tensor], ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of the training: `rows` texts of `context` bytes a step. 60 rows make microbatches of 8 and of 7 rows."""

    width: int = 64
    heads: int = 4
    blocks: int = 4
    context: int = 32
    rows: int = 60
    steps: int = 300
    sample: int = 400


class Embedding(nn.Module):
    """Embed bytes and their positions. This module and the next know nothing of pipelines."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, width), nn.Embedding(context, width)

    def forward(self, text: Tensor) -> Tensor:
        return self.byte(text) + self.position(torch.arange(text.shape[1]))


class Block(nn.Module):
    """Causal self-attention, then a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        wide = (nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.perceptron = nn.Sequential(nn.LayerNorm(width), *wide)

    def attention(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).reshape(rows, length, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.perceptron(x)


def gpt(sizes: Sizes) -> nn.Sequential:
    embedding, blocks = (
        Embedding(sizes.width, sizes.context),
        (Block(sizes.width, sizes.heads) for _ in range(sizes.blocks)),
    )
    return nn.Sequential(embedding, *blocks, nn.LayerNorm(sizes.width), nn.Linear(sizes.width, 256))


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


def batches(sizes: Sizes) -> Iterator[Batch]:
    """Yield texts from random positions of help()'s topics, each with itself one byte later as the target."""
    text = torch.frombuffer(bytearray("\n".join(topics.values()).encode()), dtype=torch.uint8).long()
    chance = torch.Generator().manual_seed(SEED)
    while True:
        starts = torch.randint(len(text) - sizes.context, (sizes.rows, 1), generator=chance)
        window = text[starts + torch.arange(sizes.context + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


def plain_backward(net: nn.Module, batch: Batch) -> Tensor:
    """Run plain autograd, microbatch after microbatch, adding up in `.grad`; return the loss."""
    net.zero_grad()
    losses: list[Tensor] = []
    for inputs, target in zip(*(part.tensor_split(MICROBATCHES) for part in batch), strict=True):
        loss = cross_entropy(net(inputs), target) * (len(inputs) / len(batch[0]))
        loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def pipeline(model: fpipe.Model, schedule: str, policy: str, split: bool, m: int = MICROBATCHES) -> fpipe.Program:
    """Build the program of a step with m microbatches."""
    return fpipe.chain(
        fpipe.split(m),
        fpipe.checkpoint(policy),
        fpipe.split_backward() if split else fpipe.identity(),
        SCHEDULES[schedule](ranks=RANKS),
        fpipe.merge(),
    )(fpipe.program(model))


def same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(actual, expected, strict=True))


def train(console: Console, sizes: Sizes, step: Callable[..., fpipe.Result], params: Params, plain: nn.Module) -> bool:
    """Train both on the same batches; return whether all losses and the final parameters are equal bit by bit."""
    leaves, plain_leaves = [leaf for stage in params for leaf in stage.values()], list(plain.parameters())
    adam, plain_adam = torch.optim.AdamW(leaves), torch.optim.AdamW(plain_leaves)
    losses: list[tuple[float, float]] = []
    equal = 0
    console.print(f"\n{'step':>6}{'pipelined loss':>18}{'plain loss':>18}   same bits")
    hidden = not console.is_terminal
    turns = track(range(1, sizes.steps + 1), "training", console=console, transient=True, disable=hidden)
    for number, batch in zip(turns, batches(sizes), strict=False):
        for optimizer in (adam, plain_adam):  # a short warm-up, then down to zero
            optimizer.param_groups[0]["lr"] = RATE * min(number / 20, 1 - (number - 1) / sizes.steps)

        result = step(params, batch)
        fpipe.assign_grads(params, result.grads)
        adam.step()
        plain_loss = plain_backward(plain, batch)
        plain_adam.step()
        is_equal = same_bits([result.loss], [plain_loss])
        equal += is_equal
        losses.append((float(result.loss), float(plain_loss)))
        if number == 1 or number % max(1, sizes.steps // 10) == 0:
            console.print(f"{number:>6}{result.loss:>18.7f}{plain_loss:>18.7f}   {'yes' if is_equal else 'NO'}")

    params_are_equal = same_bits(leaves, (leaf.detach() for leaf in plain_leaves))
    console.print("", *map(curve, zip(*losses, strict=True), ("pipelined", "plain")), sep="\n")
    console.print(f"The losses are bitwise equal at {equal} of {sizes.steps} steps,", end=" ")
    console.print("and so are the final parameters.\n" if params_are_equal else "but the final parameters are NOT.\n")
    return params_are_equal and equal == sizes.steps


def curve(losses: Sequence[float], name: str) -> str:
    """Draw losses as a line of blocks, full where they are highest."""
    low, high, width = min(losses), max(losses), min(70, len(losses))
    parts = [losses[len(losses) * i // width : len(losses) * (i + 1) // width] for i in range(width)]
    blocks = ("▁▂▃▄▅▆▇█"[round(7 * (sum(part) / len(part) - low) / (high - low + 1e-9))] for part in parts)
    return f"{name:<10}{losses[0]:.2f} {''.join(blocks)} {losses[-1]:.2f}"


@torch.no_grad()
def write(net: nn.Module, sizes: Sizes) -> str:
    """Write text with the model, one byte at a time."""
    text, chance = list(b"The "), torch.Generator().manual_seed(SEED)
    for _ in range(sizes.sample):
        logits = net(torch.tensor([text[-sizes.context :]]))[0, -1]
        text.append(int(torch.multinomial(torch.softmax(logits / 0.5, 0), 1, generator=chance)))
    return "".join(chr(byte) if 32 <= byte < 127 or byte == 10 else "?" for byte in text)


def compare(console: Console, model: fpipe.Model, params: Params, plain: nn.Module, batch: Batch) -> int:
    """Compare the gradients of all programs with plain autograd; return how many are equal bit by bit."""
    loss = plain_backward(plain, batch)
    expected = {"loss": loss, **{name: leaf.grad for name, leaf in plain.named_parameters()}}
    table = Table("schedule", "checkpoint", "backward", box=box.SIMPLE)
    for heading in ("max error", "same bits", "MiB max", "MiB sum", "makespan", "bubble"):
        table.add_column(heading, justify="right")
    equal = 0
    for choice in track(PROGRAMS, "comparing", console=console, transient=True, disable=not console.is_terminal):
        program = pipeline(model, *choice)
        result = fpipe.build(program, model, record=True)(params, batch)
        actual = {"loss": result.loss, **fpipe.join_params(model, result.grads)}
        error = max(float((actual[name] - expected[name]).abs().max()) for name in expected)
        is_equal = same_bits([actual[name] for name in expected], expected.values())
        equal += is_equal
        peaks, timeline = [size / 2**20 for size in result.timeline.peak], fpipe.simulate(program)
        numbers = (f"{max(peaks):.2f}", f"{sum(peaks):.2f}", f"{timeline.makespan:g}", f"{timeline.bubble:.1%}")
        table.add_row(*choice[:2], "I, W" if choice[2] else "B", f"{error:g}", "yes" if is_equal else "NO", *numbers)
    console.print(
        f"Loss and {len(expected) - 1} gradients of each program against plain autograd; MiB held at the peak"
    )
    console.print("besides parameters and batch (largest rank, all ranks); simulated time (B takes 2, F I W R take 1):")
    console.print(table)
    return equal


def run(console: Console, sizes: Sizes) -> bool:
    """Run the demo; return whether everything is equal bit by bit."""
    torch.manual_seed(SEED)
    net = gpt(sizes)
    plain = copy.deepcopy(net)
    model, params, _ = fpipe.from_sequential(net, stages=RANKS, loss=cross_entropy)
    count = sum(leaf.numel() for leaf in net.parameters())
    console.print(f"{ABOUT}\nThe model: {count:,} parameters ({count / 2**18:.2f} MiB), {RANKS} stages, one a rank")
    for number, (stage, stage_params) in enumerate(zip(model.stages, params, strict=True)):
        names = ", ".join(type(net.get_submodule(name)).__name__ for name in stage.name.split(", "))
        console.print(f"  stage {number}: {names} ({sum(leaf.numel() for leaf in stage_params.values()):,})")
    trained = train(console, sizes, fpipe.build(pipeline(model, *TRAINED), model), params, plain)
    console.print(f"What it writes after {sizes.steps} steps:\n\n{write(net, sizes)}\n")
    equal = compare(console, model, params, plain, next(batches(sizes)))
    console.print("The trained program, drawn with 4 microbatches (R recomputes, I and W are the halves of B):")
    console.print(fpipe.plot(pipeline(model, *TRAINED, m=4)), soft_wrap=True)
    console.print(f"\n{equal} of {len(PROGRAMS)} programs bitwise equal to plain autograd\n")
    hint = "Try next `.venv/bin/python examples/demo.py --steps 1000`, or in Python after `import fpipe`:"
    console.print(hint, *TRY, sep="\n    ", soft_wrap=True)
    return trained and equal == len(PROGRAMS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=Sizes.steps, help="training steps (default: %(default)s)")
    steps = parser.parse_args().steps
    if steps < 1:
        parser.error(f"--steps is at least 1, found {steps}")
    torch.set_num_threads(1)  # bits are promised for one number of threads
    sys.stdout.reconfigure(errors="replace")  # for terminals without the blocks of the curve
    console = Console(width=None if sys.stdout.isatty() else 110, highlight=False, markup=False, emoji=False)
    return 0 if run(console, Sizes(steps=steps)) else 1


if __name__ == "__main__":
    sys.exit(main())
