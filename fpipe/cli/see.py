"""Look at schedules: the list of them, one of them, or several side by side."""

from __future__ import annotations

from html import escape
from pathlib import Path

import typer

from fpipe.cli import options
from fpipe.cli.output import number, print_program, table, write_pictures
from fpipe.cli.programs import is_file, read
from fpipe.pictures.style import PLAIN
from fpipe.program import Program
from fpipe.schedules import about, names
from fpipe.schedules.compare import Comparison
from fpipe.schedules.compare import compare as compare_schedules
from fpipe.schedules.named import parse
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
    found = [about(name) for name in names()]
    columns = ("name", "title", "source", "accepts", "idle", "peak")
    table(columns, [(s.name, s.title or "-", s.source or "-", s.accepts, s.idle or "-", s.peak or "-") for s in found])


def show(
    typed: typer.Context,
    what: options.What,
    ranks: options.Ranks = 4,
    microbatches: options.Microbatches = 8,
    stages: options.Stages = None,
    option: options.Options = None,
    costs: options.Costs = "",
    cluster: options.OnCluster = None,
    svg: options.Svg = None,
    png: options.Png = None,
    pdf: options.Pdf = None,
    html: options.Html = None,
    perfetto: options.Perfetto = None,
    style: options.Style = None,
    replicated: options.Replicated = False,
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
    options.only_of_names(typed, [what])
    files = (svg, png, pdf, html, perfetto)
    if style is not None and not any(files):
        raise typer.BadParameter("--style is of a file: add --svg, --png, --pdf, --html or --perfetto.", ctx=typed)
    costs = costs.on(cluster)
    program = options.program_of(what, ranks, microbatches, stages, option, costs, replicated)
    seconds = costs.of(program)
    if not is_file(what) and parse(what).schedule.title:
        print(f"{parse(what).schedule.title}: {parse(what).schedule.source}")
    print(sizes(program))
    print_program(program, seconds if costs.said else None)
    found, least = simulate(program, seconds), bounds(program, seconds)
    print(found)
    print(f"at least {number(least.makespan)} ({least.binding.name}), this is {least.gap(found):.1%} above")
    write_pictures(files, program, costs=seconds, names=[what], style=style or PLAIN)


def sizes(program: Program) -> str:
    """How large a program is."""
    words = (("stage", "stages"), ("microbatch", "microbatches"), ("rank", "ranks"), ("op", "ops"))
    counts = (program.stages, program.microbatches, program.ranks, len(program.ops))
    return ", ".join(f"{n} {word[n != 1]}" for word, n in zip(words, counts, strict=True))


def compare(
    typed: typer.Context,
    what: options.Whats = None,
    ranks: options.Ranks = 4,
    microbatches: options.Microbatches = 8,
    costs: options.Costs = "",
    cluster: options.OnCluster = None,
    svg: options.Svg = None,
    png: options.Png = None,
    html: options.Html = None,
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
    One that does not serve the sizes says why, below the table.
    \b
    Examples:
      python -m fpipe compare gpipe one_f_one_b chimera --ranks 4 --microbatches 8
      python -m fpipe compare hanayo:waves=2 interleaved:stages=12 zbv
      python -m fpipe compare zb_h1 zb_h2 zbv --costs F=10,B=12,W=8,c=0.5
      python -m fpipe compare one_f_one_b my_table.csv --html both.html
    """
    options.only_of_names(typed, what or ())
    entries = [(one, read(one, replicated=replicated)) if is_file(one) else one for one in what or names()]
    costs = costs.on(cluster)
    found = compare_schedules(entries, ranks, microbatches, costs.given if costs.said else None)
    print(found)
    served = [row for row in found if row.timeline is not None]
    if not served:
        raise typer.Exit(1)
    write_pictures((svg, png, html), *(row.timeline for row in served), names=[row.name for row in served])
    if html is not None:
        _put_above(html, found)


def _put_above(page: Path, found: Comparison) -> None:
    """Write the table above the pictures of a page."""
    head, body, rest = page.read_text(encoding="utf-8").partition("<body>\n")
    page.write_text(f"{head}{body}<pre>{escape(str(found))}</pre>\n{rest}", encoding="utf-8")
