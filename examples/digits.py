"""Train a convolutional net with batch norm and dropout on handwritten digits, as a pipeline and by plain autograd."""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fpipe

try:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator, PercentFormatter
    from sklearn.datasets import load_digits
except ImportError as error:
    raise SystemExit(
        f"This example needs {error.name}, which is missing: pip install 'fpipe[examples]'. That brings scikit-learn, "
        "whose digits are learned, and matplotlib, which draws them."
    ) from None

RANKS, MICROBATCHES, KEY, ROWS, HELD_OUT = 4, 8, 0, 100, 297
ABOUT = f"""\
1,500 of scikit-learn's handwritten digits are learned twice from the same start, as a program for {RANKS} ranks that
recomputes and splits its backward, and by plain autograd. {HELD_OUT} others test what was learned.
"""
Batch = tuple[Tensor, Tensor]
State = tuple[dict[str, Tensor], ...]


@dataclass
class Story:
    """What happened: losses of both, step by step; the accuracy on digits not seen, epoch by epoch; what is equal."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    accuracy: list[tuple[float, float]] = field(default_factory=list)
    equal: dict[str, bool] = field(default_factory=dict)


def digits() -> tuple[Batch, Batch]:
    """Images [rows, 1, 8, 8] between 0 and 1 and what they show, shuffled: to learn from, and held out."""
    found: Any = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(KEY))
    shown = torch.tensor(found.target)[order]
    images = images[order]
    return (images[HELD_OUT:], shown[HELD_OUT:]), (images[:HELD_OUT], shown[:HELD_OUT])


def parts(width: int) -> list[nn.Sequential]:
    """The net in four, one a rank."""

    def convolution(channels: int, made: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, made, 3, padding=1), nn.BatchNorm2d(made), nn.ReLU()]

    last = (
        nn.Linear(8 * width, 4 * width),
        nn.BatchNorm1d(4 * width),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(4 * width, 10),
    )
    return [
        nn.Sequential(*convolution(1, width)),
        nn.Sequential(*convolution(width, width), nn.MaxPool2d(2), nn.Dropout2d(0.1)),
        nn.Sequential(*convolution(width, 2 * width), nn.MaxPool2d(2), nn.Dropout(0.2)),
        nn.Sequential(nn.Flatten(), *last),
    ]


def pipeline(model: fpipe.Model, microbatches: int = MICROBATCHES) -> fpipe.Program:
    """The training step: zero-bubble, every stage recomputed but the last."""
    return fpipe.chain(
        fpipe.split(microbatches),
        fpipe.checkpoint("except_last"),
        fpipe.split_backward(),
        fpipe.schedules.zb_h1(ranks=RANKS),
        fpipe.merge(),
    )(fpipe.program(model))


def plain_backward(stages: Iterable[nn.Module], batch: Batch, key: int) -> Tensor:
    """Plain autograd, one microbatch after the other, gradients added up in `.grad`. Returns the loss.

    Its dropout draws what the pipeline's does, since it is seeded for each stage and microbatch as that is.
    """
    losses: list[Tensor] = []
    for index, (x, shown) in enumerate(zip(*(part.tensor_split(MICROBATCHES) for part in batch), strict=True)):
        share = len(x) / len(batch[0])
        for number, stage in enumerate(stages):
            torch.manual_seed(fpipe.fold_in(key, number, index))
            x = stage(x)
        loss = F.cross_entropy(x, shown) * share
        loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def shuffled(data: Batch, epoch: int) -> Iterator[Batch]:
    """The batches of an epoch; 100 rows make microbatches of 13 and of 12."""
    order = torch.randperm(len(data[0]), generator=torch.Generator().manual_seed(fpipe.fold_in(KEY, epoch)))
    for rows in order.split(ROWS):
        yield data[0][rows], data[1][rows]


@torch.no_grad()
def read(net: nn.Module, images: Tensor) -> Tensor:
    """What the net sees in images [rows, 1, 8, 8]: the chance of each digit, [rows, 10]."""
    net.eval()
    seen = torch.softmax(net(images), -1)
    net.train()
    return seen


def train(net: nn.Sequential, plain: list[nn.Sequential], data: Batch, test: Batch, epochs: int) -> Story:
    """Train `net` as a pipeline and its copy `plain` by hand, on the same batches with the same keys."""
    model, params, state = fpipe.from_sequential(net, sizes=list(map(len, plain)), loss=F.cross_entropy)
    step = fpipe.build(pipeline(model), model)
    whole = nn.Sequential(*(child for part in plain for child in part))
    leaves, plain_leaves = [leaf for stage in params for leaf in stage.values()], list(whole.parameters())
    adam, plain_adam = torch.optim.AdamW(leaves, 3e-3), torch.optim.AdamW(plain_leaves, 3e-3)
    story, equal = Story(), True
    print(f"\n{'epoch':>5}{'pipelined loss':>17}{'plain loss':>17}{'pipelined right':>18}{'plain right':>14}{'s':>7}")
    for epoch in range(epochs):
        start = time.perf_counter()
        for number, batch in enumerate(shuffled(data, epoch)):
            key = fpipe.fold_in(KEY, epoch, number)
            result = step(params, batch, state=state, key=key)
            state = result.state
            fpipe.assign_grads(params, result.grads)
            adam.step()

            whole.zero_grad()
            loss = plain_backward(plain, batch, key)
            plain_adam.step()
            equal &= same_bits([result.loss], [loss])
            story.losses.append((float(result.loss), float(loss)))
        net.load_state_dict({name: held for stage in state for name, held in stage.items()}, strict=False)
        right = [float((read(one, test[0]).argmax(-1) == test[1]).float().mean()) for one in (net, whole)]
        story.accuracy.append((right[0], right[1]))
        ends = "".join(f"{loss:>17.7f}" for loss in story.losses[-1])
        print(f"{epoch + 1:>5}{ends}{right[0]:>18.1%}{right[1]:>14.1%}{time.perf_counter() - start:>7.1f}", flush=True)
    story.equal = {
        f"{len(story.losses)} losses": equal,
        f"{len(leaves)} parameters": same_bits(leaves, plain_leaves),
        f"{len(list(net.buffers()))} buffers": same_bits(net.buffers(), whole.buffers()),
        f"{HELD_OUT} answers": same_bits([read(net, test[0])], [read(whole, test[0])]),
    }
    return story


def same_bits(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(one.detach().numpy().tobytes() == other.detach().numpy().tobytes() for one, other in pairs)


def draw(story: Story, net: nn.Module, test: Batch, file: Path) -> None:
    """Losses, accuracy, and digits with what the net sees in them: first those it is least sure of."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    above, below = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    for axes, values, what, along in zip(
        above.subplots(1, 2),
        (story.losses, story.accuracy),
        ("loss of each step", "right of those held out"),
        ("step", "epoch"),
        strict=True,
    ):
        at = range(1, len(values) + 1)
        for number, (name, how) in enumerate(
            (("pipelined", {"lw": 4, "alpha": 0.35}), ("plain autograd", {"lw": 1, "color": "black", "ls": "--"}))
        ):
            axes.plot(at, [value[number] for value in values], label=name, **how)
        axes.set_title(what)
        axes.set_xlabel(along)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    above.axes[0].set_yscale("log")
    above.axes[1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    chances = read(net, test[0])
    sure, seen = chances.max(-1)
    for axes, row in zip(below.subplots(2, 12).flat, sure.argsort(), strict=False):
        axes.imshow(test[0][row, 0].numpy(), cmap="gray_r")
        axes.set_axis_off()
        wrong = bool(seen[row] != test[1][row])
        said = f"{seen[row]}, is {test[1][row]}" if wrong else f"{seen[row]}"
        axes.set_title(f"{said}\n{sure[row]:.0%}", fontsize=9, color="crimson" if wrong else "black")
    below.suptitle("what it sees, and how sure it is: the 24 it is least sure of", fontsize=11)
    figure.savefig(file, dpi=120)


def run(epochs: int, rows: int | None = None, file: Path | None = None, width: int = 16) -> bool:
    """The whole example. True if everything has the same bits."""
    data, test = digits()
    data = data[0][:rows], data[1][:rows]
    torch.manual_seed(KEY)
    plain = parts(width)
    net = nn.Sequential(*(child for part in copy.deepcopy(plain) for child in part))
    print(ABOUT)
    print("The program, drawn with 4 microbatches (R recomputes, I and W are the halves of the backward):\n")
    print(fpipe.plot(pipeline(fpipe.from_sequential(net, sizes=list(map(len, plain)), loss=F.cross_entropy)[0], 4)))
    story = train(net, plain, data, test, epochs)
    print()
    for what, equal in story.equal.items():
        print(f"{what:>15}: {'every bit equal' if equal else 'NOT equal'}")
    if file is not None:
        draw(story, net, test, file)
        print(f"\nLosses, accuracy and the hardest digits: {file}")
    return all(story.equal.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="times it sees all digits (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="the picture (default: %(default)s)")
    given = parser.parse_args()
    if given.epochs < 1:
        parser.error(f"--epochs is at least 1, found {given.epochs}")
    torch.set_num_threads(1)  # bits are promised for one number of threads
    return 0 if run(given.epochs, file=given.plot) else 1


if __name__ == "__main__":
    sys.exit(main())
