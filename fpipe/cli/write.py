"""Write a schedule for another tool."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from fpipe.cli import options
from fpipe.cli.costs import parse
from fpipe.interop import to_json, torch_pipelining
from fpipe.pictures.plot import plot
from fpipe.program import Program, ProgramError

Format = Literal["csv", "comms", "json", "table", "text"]
WRITERS: dict[Format, Callable[[Program], str]] = {
    "csv": torch_pipelining.to_csv,
    "comms": lambda program: torch_pipelining.to_csv(program, format="compute_comms"),
    "json": to_json,
    "table": lambda program: f"{plot(program)}\n",
    "text": lambda program: f"{program}\n",
}


def export(
    typed: typer.Context,
    what: options.What,
    format: Annotated[Format, typer.Option("--format", "-f", help="csv, comms, json, table or text.")] = "csv",
    ranks: options.Ranks = 4,
    microbatches: options.Microbatches = 8,
    stages: options.Stages = None,
    option: options.Options = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="By default standard output.")] = None,
    replicated: options.Replicated = False,
) -> None:
    """Write a schedule for torch's runtime, or as a program.

    \b
    csv    the order of each rank, as torch.distributed.pipelining loads it
    comms  the same with sends, receives and weights (compute_comms)
    json   every op with its reads and writes, for other tools
    table  the grid, as fpipe.schedules.from_table reads it
    text   the program's own text, as fpipe.Program.parse reads it
    \b
    Examples:
      python -m fpipe export one_f_one_b --ranks 2 --microbatches 4
      python -m fpipe export gpipe --format comms --output gpipe.csv
      python -m fpipe export gpipe --format json | jq '.ops[0]'
    """
    options.only_of_names(typed, [what])
    program = options.program_of(what, ranks, microbatches, stages, option, parse(""), replicated)
    try:
        text = WRITERS[format](program)
    except ProgramError as error:
        raise ProgramError(f"{error} (--format table, json and text write any program.)") from None
    if output is None:
        print(text, end="")
    elif not output.parent.is_dir():
        raise FileNotFoundError(f"{str(output.parent)!r} is not a folder: make it before a file is written there.")
    else:
        output.write_text(text)
        print(f"wrote {output}")
