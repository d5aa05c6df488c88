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
        f"This example needs {error.name}, which is missing: pip install scikit-learn matplotlib. The "
        "digits of scikit-learn are learned, and matplotlib draws them."
    ) from None

RANKS, MICROBATCHES, KEY, ROWS, TEST_ROWS = 4, 8, 0, 100, 297
ABOUT = f"""\
1,500 of scikit-learn's handwritten digits are learned twice from the same start, as a program for {RANKS} ranks that
recomputes and splits its backward, and by plain autograd. {TEST_ROWS} others test what was learned.
"""
Batch = tuple[Tensor, Tensor]
State = tuple[dict[str, Tensor], ...]


@dataclass
class Story:
    """The record of a training: losses by step, accuracies on test digits by epoch, and comparisons."""

    losses: list[tuple[float, float]] = field(default_factory=list)
    accuracy: list[tuple[float, float]] = field(default_factory=list)
    equal: dict[str, bool] = field(default_factory=dict)


def digits() -> tuple[Batch, Batch]:
    """Load images [rows, 1, 8, 8] between 0 and 1 with their digits, shuffled, as a training and a test set."""
    dataset: Any = load_digits()
    images = torch.tensor(dataset.images, dtype=torch.float32).unsqueeze(1) / 16
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(KEY))
    labels = torch.tensor(dataset.target)[order]
    images = images[order]
    return (images[TEST_ROWS:], labels[TEST_ROWS:]), (images[:TEST_ROWS], labels[:TEST_ROWS])


def parts(width: int) -> list[nn.Sequential]:
    """Build the net in four parts, one a rank."""

    def convolution(channels: int, out_channels: int) -> list[nn.Module]:
        return [nn.Conv2d(channels, out_channels, 3, padding=1), nn.BatchNorm2d(out_channels), nn.ReLU()]

    head = (
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
        nn.Sequential(nn.Flatten(), *head),
    ]


def pipeline(model: fpipe.Model, microbatches: int = MICROBATCHES) -> fpipe.Program:
    """Build the training step: zero-bubble, every stage recomputed but the last."""
    return fpipe.chain(
        fpipe.split(microbatches),
        fpipe.checkpoint("except_last"),
        fpipe.split_backward(),
        fpipe.schedules.zb_h1(ranks=RANKS),
        fpipe.merge(),
    )(fpipe.program(model))


def plain_backward(stages: Iterable[nn.Module], batch: Batch, key: int) -> Tensor:
    """Run plain autograd, microbatch after microbatch, adding up in `.grad`; return the loss.

    Its dropout draws the pipeline's numbers, because it is seeded by stage and microbatch as the pipeline is.
    """
    losses: list[Tensor] = []
    for index, (x, labels) in enumerate(zip(*(part.tensor_split(MICROBATCHES) for part in batch), strict=True)):
        share = len(x) / len(batch[0])
        for number, stage in enumerate(stages):
            torch.manual_seed(fpipe.fold_in(key, number, index))
            x = stage(x)
        loss = F.cross_entropy(x, labels) * share
        loss.backward()
        losses.append(loss.detach())
    return sum(losses[1:], losses[0])


def shuffled_batches(samples: Batch, epoch: int) -> Iterator[Batch]:
    """Yield the batches of an epoch; 100 rows make microbatches of 13 and of 12."""
    order = torch.randperm(len(samples[0]), generator=torch.Generator().manual_seed(fpipe.fold_in(KEY, epoch)))
    for rows in order.split(ROWS):
        yield samples[0][rows], samples[1][rows]


@torch.no_grad()
def predict(net: nn.Module, images: Tensor) -> Tensor:
    """Return the probability of each digit, [rows, 10], in images [rows, 1, 8, 8]."""
    net.eval()
    chances = torch.softmax(net(images), -1)
    net.train()
    return chances


def train(net: nn.Sequential, plain: list[nn.Sequential], train_set: Batch, test_set: Batch, epochs: int) -> Story:
    """Train `net` as a pipeline and its copy `plain` by hand, on the same batches with the same keys."""
    model, params, state = fpipe.from_sequential(net, sizes=list(map(len, plain)), loss=F.cross_entropy)
    step = fpipe.build(pipeline(model), model)
    plain_net = nn.Sequential(*(child for part in plain for child in part))
    leaves, plain_leaves = [leaf for stage in params for leaf in stage.values()], list(plain_net.parameters())
    adam, plain_adam = torch.optim.AdamW(leaves, 3e-3), torch.optim.AdamW(plain_leaves, 3e-3)
    story, equal = Story(), True
    print(f"\n{'epoch':>5}{'pipelined loss':>17}{'plain loss':>17}{'pipelined right':>18}{'plain right':>14}{'s':>7}")
    for epoch in range(epochs):
        start = time.perf_counter()
        for number, batch in enumerate(shuffled_batches(train_set, epoch)):
            key = fpipe.fold_in(KEY, epoch, number)
            result = step(params, batch, state=state, key=key)
            state = result.state
            fpipe.assign_grads(params, result.grads)
            adam.step()

            plain_net.zero_grad()
            loss = plain_backward(plain, batch, key)
            plain_adam.step()
            equal &= same_bits([result.loss], [loss])
            story.losses.append((float(result.loss), float(loss)))
        net.load_state_dict({name: buffer for stage in state for name, buffer in stage.items()}, strict=False)
        guesses = (predict(module, test_set[0]).argmax(-1) for module in (net, plain_net))
        right = [float((guess == test_set[1]).float().mean()) for guess in guesses]
        story.accuracy.append((right[0], right[1]))
        ends = "".join(f"{loss:>17.7f}" for loss in story.losses[-1])
        print(f"{epoch + 1:>5}{ends}{right[0]:>18.1%}{right[1]:>14.1%}{time.perf_counter() - start:>7.1f}", flush=True)
    story.equal = {
        f"{len(story.losses)} losses": equal,
        f"{len(leaves)} parameters": same_bits(leaves, plain_leaves),
        f"{len(list(net.buffers()))} buffers": same_bits(net.buffers(), plain_net.buffers()),
        f"{TEST_ROWS} answers": same_bits([predict(net, test_set[0])], [predict(plain_net, test_set[0])]),
    }
    return story


def same_bits(actual: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    pairs = zip(actual, expected, strict=True)
    return all(a.detach().numpy().tobytes() == b.detach().numpy().tobytes() for a, b in pairs)


def draw(story: Story, net: nn.Module, test_set: Batch, file: Path) -> None:
    """Draw losses, accuracy, and the digits with the least certain guesses."""
    figure = Figure(figsize=(11, 6.4), layout="constrained")
    upper, lower = figure.subfigures(2, 1, height_ratios=[1.2, 1])
    for axes, values, title, along in zip(
        upper.subplots(1, 2),
        (story.losses, story.accuracy),
        ("loss of each step", "right of those held out"),
        ("step", "epoch"),
        strict=True,
    ):
        ticks = range(1, len(values) + 1)
        for number, (name, line_style) in enumerate(
            (("pipelined", {"lw": 4, "alpha": 0.35}), ("plain autograd", {"lw": 1, "color": "black", "ls": "--"}))
        ):
            axes.plot(ticks, [value[number] for value in values], label=name, **line_style)
        axes.set_title(title)
        axes.set_xlabel(along)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
    upper.axes[0].set_yscale("log")
    upper.axes[1].yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
    chances = predict(net, test_set[0])
    confidence, guesses = chances.max(-1)
    for axes, row in zip(lower.subplots(2, 12).flat, confidence.argsort(), strict=False):
        axes.imshow(test_set[0][row, 0].numpy(), cmap="gray_r")
        axes.set_axis_off()
        wrong = bool(guesses[row] != test_set[1][row])
        caption = f"{guesses[row]}, is {test_set[1][row]}" if wrong else f"{guesses[row]}"
        axes.set_title(f"{caption}\n{confidence[row]:.0%}", fontsize=9, color="crimson" if wrong else "black")
    lower.suptitle("what it sees, and how sure it is: the 24 it is least sure of", fontsize=11)
    figure.savefig(file, dpi=120)


def run(epochs: int, rows: int | None = None, file: Path | None = None, width: int = 16) -> bool:
    """Run the example; return whether everything is equal bit by bit."""
    train_set, test_set = digits()
    train_set = train_set[0][:rows], train_set[1][:rows]
    torch.manual_seed(KEY)
    plain = parts(width)
    net = nn.Sequential(*(child for part in copy.deepcopy(plain) for child in part))
    print(ABOUT)
    print("The program, drawn with 4 microbatches (R recomputes, I and W are the halves of the backward):\n")
    print(fpipe.plot(pipeline(fpipe.from_sequential(net, sizes=list(map(len, plain)), loss=F.cross_entropy)[0], 4)))
    story = train(net, plain, train_set, test_set, epochs)
    print()
    for label, equal in story.equal.items():
        print(f"{label:>15}: {'every bit equal' if equal else 'NOT equal'}")
    if file is not None:
        draw(story, net, test_set, file)
        print(f"\nLosses, accuracy and the hardest digits: {file}")
    return all(story.equal.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10, help="times it sees all digits (default: %(default)s)")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="the picture (default: %(default)s)")
    options = parser.parse_args()
    if options.epochs < 1:
        parser.error(f"--epochs is at least 1, found {options.epochs}")
    torch.set_num_threads(1)  # bits are promised for one number of threads
    return 0 if run(options.epochs, file=options.plot) else 1


if __name__ == "__main__":
    sys.exit(main())
