"""Ask whether a schedule is right: whether a file is a program, and whether a step gives the right gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fpipe.cli import options
from fpipe.cli.options import read
from fpipe.cli.output import print_error
from fpipe.cli.see import sizes
from fpipe.program import Program

if TYPE_CHECKING:
    from torch import Tensor

    from fpipe.model import Model

Files = Annotated[list[str], typer.Argument(metavar="FILE...", help="Files; '-' reads a pipe.")]


def check(files: Files, replicated: options.Replicated = False) -> None:
    """Check files: programs, tables, CSV (torch's too) or JSON.

    Says the sizes; or what is wrong, in which line and column, and the way out,
    with exit code 1.

    \b
    Examples:
      python -m fpipe check my_table.csv
      python -m fpipe export gpipe --format comms | python -m fpipe check -
      printf '0F0 0F1 0B0 0B1\\n1F0 1B0 1F1 1B1\\n' | python -m fpipe check -
    """
    wrong = 0
    for file in files:
        name = "standard input" if file == "-" else file
        try:
            print(f"{name}: {sizes(read(file, replicated=replicated))}")
        except (ValueError, OSError) as error:
            wrong += 1
            print_error(str(error) if isinstance(error, OSError) else f"{name}: {error}")  # an OSError says the name
    if wrong:
        raise typer.Exit(1)


def verify(
    typed: typer.Context,
    what: options.What,
    size: options.Sized,
) -> None:
    """Prove a schedule on a small real model, bit by bit.

    Every gradient is compared with that of plain autograd.

    \b
    Examples:
      python -m fpipe verify one_f_one_b --ranks 4 --microbatches 6
      python -m fpipe verify my_table.csv
    """
    options.only_of_names(typed, [what])
    program = size.program(what)
    print(sizes(program))
    # The other commands, and refusals, come without torch, in a third of the time.
    from fpipe.verification.verify import verify as verify_program

    print(verify_program(program, *_small_model(program)))


_WIDTH = 8


def _small_model(program: Program) -> tuple[Model, tuple[dict[str, Tensor], ...], tuple[Tensor, Tensor]]:
    """A model of as many stages, its parameters, and a batch whose microbatches are not all of one size; of a program
    with sequence slices it is causal along the sequence, and the slices are not all of one length."""
    import torch

    from fpipe.meaning.from_functions import from_functions

    make = torch.Generator().manual_seed(0)
    params = tuple(
        {"w": torch.randn(_WIDTH, _WIDTH, generator=make) / _WIDTH**0.5, "b": torch.randn(_WIDTH, generator=make)}
        for _ in range(program.stages)
    )
    rows = 2 * program.microbatches + (2 if program.microbatches > 2 else 0)
    shape = (rows, _WIDTH) if program.slices == 1 else (rows, 2 * program.slices + 1, _WIDTH)
    batch = (torch.randn(shape, generator=make), torch.randn(shape, generator=make))
    return from_functions([_stage if program.slices == 1 else _causal] * program.stages, _loss), params, batch


def _stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return (x @ params["w"] + params["b"]).tanh()


def _causal(params: dict[str, Tensor], x: Tensor, *, carry: Tensor | None) -> tuple[Tensor, Tensor]:
    """A position sees the sum of those before it; what a slice sums up it hands to the next."""
    total = (x @ params["w"]).cumsum(1)
    if carry is not None:
        total = total + carry
    return (total + params["b"]).tanh(), total[:, -1:]


def _loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().mean()
