"""List, draw, compare and export schedules."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Annotated

import typer

from fpipe.cli import options
from fpipe.cli.options import is_file, read_program
from fpipe.cli.output import number, print_program, table
from fpipe.interop import to_json, to_megatron, to_primus, torch_pipelining
from fpipe.pictures.plot import plot
from fpipe.pictures.style import PLAIN
from fpipe.program import Program, ProgramError
from fpipe.schedules import about, names
from fpipe.schedules.compare import compare as compare_schedules
from fpipe.schedules.notations import parse
from fpipe.timing.bounds import bounds
from fpipe.timing.simulate import simulate


def schedules() -> None:
    """List the schedules, with source, sizes, idle time and peak.

    \b
    p ranks, m microbatches, v stages a rank; F, B, W: seconds of a forward, an
    input gradient and a weight gradient of one microbatch on a whole rank,
    T = F+B+W; c: latency of a transfer; r: a rank. Peak: microbatches held.

    \b
    Examples:
      python -m fpipe schedules
      python -m fpipe schedules | grep -i zero
    """
    rows = [about(name) for name in names()]
    columns = ("name", "title", "source", "accepts", "idle", "peak")
    table(columns, [(s.name, s.title or "-", s.source or "-", s.accepts, s.idle or "-", s.peak or "-") for s in rows])


def show(
    typed: typer.Context,
    name_or_file: options.NameOrFile,
    size: options.Sized,
    priced: options.Priced,
    files: options.Pictures,
    style: options.Style = None,
) -> None:
    """Draw a schedule, and print its time and its memory.

    Without --costs the grid has one column an op; with costs it is to scale.

    \b
    Examples:
      python -m fpipe show one_f_one_b --ranks 4 --microbatches 8
      python -m fpipe show gpipe -p 2 -m 4 --costs F=1,B=1.2,W=0.8,c=0.1
      python -m fpipe show gpipe --svg gpipe.svg --perfetto gpipe.json
      python -m fpipe show gpipe --svg gpipe.svg --style width_mm=84,font_pt=7,memory=no
      python -m fpipe show my_table.csv
    """
    options.refuse_sizes_of_files(typed, [name_or_file])
    if style is not None and files == options.Pictures():
        raise typer.BadParameter("--style is of a file: add --svg, --png, --pdf, --html or --perfetto.", ctx=typed)
    costs = priced.on_cluster
    program = size.program(name_or_file, costs)
    seconds = costs.of(program)
    if not is_file(name_or_file) and (schedule := parse(name_or_file).schedule).title:
        print(f"{schedule.title}: {schedule.source}")
    print(sizes(program))
    print_program(program, seconds if costs.are_typed else None)
    timeline, lower_bound = simulate(program, seconds), bounds(program, seconds)
    print(timeline)
    least_seconds, excess = number(lower_bound.makespan), f"{lower_bound.gap(timeline):.1%}"
    print(f"at least {least_seconds} ({lower_bound.binding.name}), this is {excess} above")
    files.write(program, costs=seconds, names=[name_or_file], style=style or PLAIN)


def sizes(program: Program) -> str:
    """Return the sizes of a program in words."""
    forms_of_words = (("stage", "stages"), ("microbatch", "microbatches"), ("rank", "ranks"), ("op", "ops"))
    counts = (program.stages, program.microbatches, program.ranks, len(program.ops))
    return ", ".join(f"{n} {forms[n != 1]}" for forms, n in zip(forms_of_words, counts, strict=True))


def compare(
    typed: typer.Context,
    priced: options.Priced,
    files: options.Pictures,
    names_or_files: options.NamesOrFiles = None,
    ranks: options.Ranks = 4,
    microbatches: options.Microbatches = 8,
    stages: options.Stages = None,
    replicated: options.Replicated = False,
) -> None:
    """Put schedules side by side: time, memory, lower bound (fpipe.compare).

    \b
    makespan  from the first start to the last end, in seconds
    span      the longest any rank takes from its first op to its last
    bubble    the idle share of each
    idle      makespan less the mean work of a rank, in seconds
    peak      the most microbatches held on a rank (a whole rank's share is 1)
    bound     no order in this placement and memory takes less time
    above     how far above that this one is
    ranks, microbatches: said where they differ, as those of a file may
    \b
    Below the table, schedules that have no such sizes say why.
    \b
    Examples:
      python -m fpipe compare gpipe one_f_one_b chimera --ranks 4 --microbatches 8
      python -m fpipe compare hanayo:waves=2 interleaved:stages=12 zbv
      python -m fpipe compare zb_h1 zb_h2 zbv --costs F=10,B=12,W=8,c=0.5
      python -m fpipe compare one_f_one_b my_table.csv --html both.html
      python -m fpipe compare gpipe interleaved --ranks 4 --stages 12
    """
    options.refuse_sizes_of_files(typed, names_or_files or ())
    typed_names = names_or_files or names()
    subjects = [(name, read_program(name, replicated=replicated)) if is_file(name) else name for name in typed_names]
    costs = priced.on_cluster
    typed_costs = costs.for_library if costs.are_typed else None
    comparison = compare_schedules(subjects, ranks, microbatches, typed_costs, stages=stages)
    print(comparison)
    served = [row for row in comparison if row.timeline is not None]
    if not served:
        raise typer.Exit(1)
    files.write(*(row.timeline for row in served), names=[row.name for row in served])
    # The page gets the table too, above the pictures.
    if files.html is not None:
        head, body, tail = files.html.read_text(encoding="utf-8").partition("<body>\n")
        files.html.write_text(f"{head}{body}<pre>{escape(str(comparison))}</pre>\n{tail}", encoding="utf-8")


WRITERS: dict[str, Callable[[Program], str]] = {
    "csv": torch_pipelining.to_csv,
    "comms": lambda program: torch_pipelining.to_csv(program, format="compute_comms"),
    "megatron": lambda program: f"{to_megatron(program)}\n",
    "primus": lambda program: f"{to_primus(program)}\n",
    "json": to_json,
    "table": lambda program: f"{options.table_of(program) and plot(program)}\n",
    "text": lambda program: f"{program}\n",
}


def _format(text: str) -> str:
    if text not in WRITERS:
        close = difflib.get_close_matches(text, WRITERS, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it is {', '.join(WRITERS)}."
        raise ValueError(f"there is no format {text!r}; {hint}")
    return text


def export(
    typed: typer.Context,
    name_or_file: options.NameOrFile,
    size: options.Sized,
    format: Annotated[
        str | None,
        options.parsed_by(
            *(_format, "--format", "-f"),
            metavar="|".join(WRITERS),
            help="By default that of the file's ending, else csv.",
        ),
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="By default standard output.")] = None,
) -> None:
    """Write a schedule for the runtime of torch, Megatron-LM or Primus, or as a program.

    \b
    csv       the order of each rank, as torch.distributed.pipelining loads it
    comms     the same with sends, receives and weights (compute_comms)
    megatron  Megatron-LM's schedule table and warm-ups, as JSON
    primus    the nodes of Primus' schedule table, as JSON
    json      every op with its reads and writes, for other tools
    table     the grid, as fpipe.schedules.from_table reads it
    text      the program's own text, which every command reads: .fpipe
    \b
    Examples:
      python -m fpipe export one_f_one_b --ranks 2 --microbatches 4
      python -m fpipe export roundpipe --output roundpipe.fpipe
      python -m fpipe export gpipe --format comms --output gpipe.csv
      python -m fpipe export gpipe --format json | jq '.ops[0]'
    """
    options.refuse_sizes_of_files(typed, [name_or_file])
    program = size.program(name_or_file)
    endings = {".fpipe": "text", ".json": "json"}
    format = format or endings.get("" if output is None else output.suffix, "csv")
    try:
        text = WRITERS[format](program)
    except ProgramError as error:
        raise ProgramError(f"{error} (--format json and text write any program.)") from None
    if output is None:
        print(text, end="")
    elif not output.parent.is_dir():
        raise FileNotFoundError(f"{str(output.parent)!r} is not a folder: make it before a file is written there.")
    else:
        output.write_text(text)
        print(f"wrote {output}")
