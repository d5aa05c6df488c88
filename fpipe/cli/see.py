"""Look at schedules: the list of them, one of them, several side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fpipe.cli.options import (
    CostsSaid,
    Microbatches,
    Options,
    Ranks,
    Replicated,
    Stages,
    What,
    Whats,
    only_of_names,
    program_of,
    usage,
)
from fpipe.cli.output import columns_of_terminal, number, print_error, table
from fpipe.cli.style import parse
from fpipe.cli.what import is_file
from fpipe.pictures.plot import plot
from fpipe.pictures.style import PLAIN
from fpipe.program import Program, ProgramError
from fpipe.schedules import about, names
from fpipe.timing.bounds import bounds
from fpipe.timing.costs import Costs
from fpipe.timing.simulate import simulate


def _to(word: str, ending: str, says: str) -> Any:
    """An option for a picture, which is of its kind whatever else the file's name would say."""

    def picture(text: str) -> Path:
        if Path(text).suffix != ending:
            raise ValueError(f"--{word} writes {ending}, found {text!r}; name it {Path(text).with_suffix(ending)}.")
        return Path(text)

    return typer.Option(f"--{word}", metavar=f"FILE{ending}", parser=usage(picture), help=says)


Svg = Annotated[Path | None, _to("svg", ".svg", "Draw it, to scale, for a page.")]
Png = Annotated[Path | None, _to("png", ".png", "Draw it for a document (fpipe[plot]).")]
Pdf = Annotated[Path | None, _to("pdf", ".pdf", "The same as PDF, for a paper (fpipe[plot]).")]
Html = Annotated[Path | None, _to("html", ".html", "Draw it on a page to zoom into.")]
Perfetto = Annotated[Path | None, _to("perfetto", ".json", "A trace for ui.perfetto.dev.")]
StyleSaid = Annotated[
    Any,
    typer.Option(
        "--style",
        metavar="LIST",
        parser=usage(parse),
        help="How the files look: width_mm=84, font_pt=7, labels=all, microbatch or none, ranks=GPU 0/GPU 1, "
        "window=0/20, F=#2a66be; yes or no: memory, waits, arrows, figures, legend, critical_path.",
    ),
]


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
    found = [about(name) for name in names()]
    columns = ("name", "title", "source", "accepts", "idle", "peak")
    table(columns, [(s.name, s.title or "-", s.source or "-", s.accepts, s.idle or "-", s.peak or "-") for s in found])


def show(
    typed: typer.Context,
    what: What,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    stages: Stages = None,
    option: Options = None,
    costs: CostsSaid = "",
    svg: Svg = None,
    png: Png = None,
    pdf: Pdf = None,
    html: Html = None,
    perfetto: Perfetto = None,
    style: StyleSaid = None,
    replicated: Replicated = False,
) -> None:
    """Draw a schedule, and say how long it takes and what it holds.

    Without --costs the grid has one column an op; with costs it is to scale.

    \b
    Examples:
      python -m fpipe show one_f_one_b --ranks 4 --microbatches 8
      python -m fpipe show gpipe -p 2 -m 4 --costs F=1,B=1.2,W=0.8,c=0.1
      python -m fpipe show gpipe --svg gpipe.svg --perfetto gpipe.json
      python -m fpipe show gpipe --svg gpipe.svg --style width_mm=84,font_pt=7,memory=no
      python -m fpipe show my_table.csv
    """
    only_of_names(typed, [what])
    files = [file for file in (svg, png, pdf, html, perfetto) if file is not None]
    if style is not None and not files:
        raise typer.BadParameter("--style is of a file: add --svg, --png, --pdf, --html or --perfetto.", ctx=typed)
    program = program_of(what, ranks, microbatches, stages, option, costs, replicated)
    seconds = costs.of(program)
    if not is_file(what) and about(what).title:
        print(f"{about(what).title}: {about(what).source}")
    print(sizes(program))
    width = columns_of_terminal()
    print(plot(program, costs=seconds if costs.text else None, width=width and max(width, 40)))
    found, least = simulate(program, seconds), bounds(program, seconds)
    print(found)
    print(f"at least {number(least.makespan)} ({least.binding.name}), this is {least.gap(found):.1%} above")
    for file in files:
        print(f"wrote {plot(program, costs=seconds, file=file, names=[what], style=style or PLAIN)}")


def sizes(program: Program) -> str:
    """How large a program is."""
    counts = {
        "stage": program.stages,
        "microbatch": program.microbatches,
        "rank": program.ranks,
        "op": len(program.ops),
    }
    plural = {"microbatch": "microbatches"}
    return ", ".join(f"{n} {word if n == 1 else plural.get(word, word + 's')}" for word, n in counts.items())


def compare(
    typed: typer.Context,
    what: Whats = None,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    option: Options = None,
    costs: CostsSaid = "",
    svg: Svg = None,
    png: Png = None,
    replicated: Replicated = False,
) -> None:
    """Put schedules side by side: time, memory, lower bound.

    \b
    makespan  from the first start to the last end, in seconds
    span      the longest any rank takes from its first op to its last
    bubble    the idle share of each
    peak      the most microbatches held on a rank (a whole rank's share is 1)
    bound     no order in this placement and memory takes less time
    above     how far above that this one is
    ranks, microbatches: said where they differ, as those of a file may
    \b
    Examples:
      python -m fpipe compare gpipe one_f_one_b chimera --ranks 4 --microbatches 8
      python -m fpipe compare --costs F=10,B=12,W=8,c=0.5
      python -m fpipe compare one_f_one_b my_table.csv --svg both.svg
    """
    only_of_names(typed, what or ())
    refused: list[str] = []
    rows: list[tuple[str, ...]] = []
    kept: dict[str, Program] = {}
    for each in what or names():
        try:
            program = program_of(each, ranks, microbatches, None, option, costs, replicated)
        except (ProgramError, ValueError) as error:
            refused.append(f"{each}: {str(error).removeprefix(f'{each}: ')}")
            continue
        kept[each] = program
        rows.append((each, *_numbers(program, costs.of(program))))
    columns = ("schedule", "makespan", "span", "bubble", "bubble of span", "peak", "bound", "above")
    counts = [(str(program.ranks), str(program.microbatches)) for program in kept.values()]
    if len(set(counts)) > 1:  # a file has its own
        columns = (columns[0], "ranks", "microbatches", *columns[1:])
        rows = [(row[0], *count, *row[1:]) for row, count in zip(rows, counts, strict=True)]
    if rows:
        table(columns, rows)
    for file in (svg, png):
        if file is not None and kept:
            timelines = [simulate(program, costs.of(program)) for program in kept.values()]
            print(f"wrote {plot(*timelines, file=file, names=list(kept))}")
    for sentence in refused:
        print_error(sentence)
    if refused and what:
        raise typer.Exit(1)


def _numbers(program: Program, costs: Costs) -> tuple[str, ...]:
    found, least = simulate(program, costs), bounds(program, costs)
    bubbles = (f"{found.bubble:.1%}", f"{found.bubble_span:.1%}")
    floor = (number(least.makespan), f"{least.gap(found):.1%}")
    return (number(found.makespan), number(found.span), *bubbles, number(max(found.peak)), *floor)
