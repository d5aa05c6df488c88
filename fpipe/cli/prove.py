"""Ask whether a schedule is right: whether a file is a program, and whether a step gives the right gradients."""

from __future__ import annotations

from typing import Annotated

import typer

from fpipe.cli import options
from fpipe.cli.costs import parse
from fpipe.cli.output import print_error
from fpipe.cli.programs import read
from fpipe.cli.see import sizes

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
    ranks: options.Ranks = 4,
    microbatches: options.Microbatches = 8,
    stages: options.Stages = None,
    option: options.Options = None,
    replicated: options.Replicated = False,
) -> None:
    """Prove a schedule on a small real model, bit by bit.

    Every gradient is compared with that of plain autograd.

    \b
    Examples:
      python -m fpipe verify one_f_one_b --ranks 4 --microbatches 6
      python -m fpipe verify my_table.csv
    """
    options.only_of_names(typed, [what])
    program = options.program_of(what, ranks, microbatches, stages, option, parse(""), replicated)
    print(sizes(program))
    # The other commands, and refusals, come without torch, in a third of the time.
    from fpipe.cli.small_model import small_model
    from fpipe.verification.verify import verify as verify_program

    print(verify_program(program, *small_model(program)))
