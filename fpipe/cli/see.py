"""Look at schedules: the list of them, one of them, several side by side."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Annotated, Any

import typer

from fpipe.cli.options import (
    ClusterSaid,
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
from fpipe.cli.output import columns_of_terminal, number, table
from fpipe.cli.programs import is_file, read
from fpipe.cli.style import parse as parse_style
from fpipe.pictures.plot import plot
from fpipe.pictures.style import PLAIN
from fpipe.program import Program
from fpipe.schedules import about, names
from fpipe.schedules.compare import Comparison
from fpipe.schedules.compare import compare as compare_schedules
from fpipe.schedules.named import parse
from fpipe.timing.bounds import bounds
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
        parser=usage(parse_style),
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
    cluster: ClusterSaid = None,
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
    costs = costs.on(cluster)
    program = program_of(what, ranks, microbatches, stages, option, costs, replicated)
    seconds = costs.of(program)
    if not is_file(what) and parse(what).schedule.title:
        print(f"{parse(what).schedule.title}: {parse(what).schedule.source}")
    print(sizes(program))
    width = columns_of_terminal()
    print(plot(program, costs=seconds if costs.said else None, width=width and max(width, 40)))
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
    costs: CostsSaid = "",
    cluster: ClusterSaid = None,
    svg: Svg = None,
    png: Png = None,
    html: Html = None,
    replicated: Replicated = False,
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
    One that does not serve the sizes says why, below the table.
    \b
    Examples:
      python -m fpipe compare gpipe one_f_one_b chimera --ranks 4 --microbatches 8
      python -m fpipe compare hanayo:waves=2 interleaved:stages=12 zbv
      python -m fpipe compare zb_h1 zb_h2 zbv --costs F=10,B=12,W=8,c=0.5
      python -m fpipe compare one_f_one_b my_table.csv --html both.html
    """
    only_of_names(typed, what or ())
    entries = [(one, read(one, replicated=replicated)) if is_file(one) else one for one in what or names()]
    costs = costs.on(cluster)
    found = compare_schedules(entries, ranks, microbatches, costs.given if costs.said else None)
    print(found)
    served = [row for row in found if row.timeline is not None]
    if not served:
        raise typer.Exit(1)
    timelines = [row.timeline for row in served if row.timeline is not None]
    for file in (svg, png, html):
        if file is not None:
            plot(*timelines, file=file, names=[row.name for row in served])
            if file is html:
                _put_above(file, found)
            print(f"wrote {file}")


def _put_above(page: Path, found: Comparison) -> None:
    """The table above the pictures of a page."""
    rows = [
        [f"<t{'dh'[not at]}>{escape(cell)}</t{'dh'[not at]}>" for cell in row] for at, row in enumerate(found.cells)
    ]
    table = "\n".join(f"<tr>{''.join(row)}</tr>" for row in rows)
    refused = "".join(f"<p>{escape(row.name)}: {escape(row.refused)}</p>\n" for row in found if row.refused)
    style = "th, td { padding: 2px 12px; text-align: right } :is(th, td):first-child { text-align: left }"
    head, body, rest = page.read_text(encoding="utf-8").partition("<body>\n")
    above = f"<style>{style}</style>\n<table>\n{table}\n</table>\n{refused}"
    page.write_text(head + body + above + rest, encoding="utf-8")
