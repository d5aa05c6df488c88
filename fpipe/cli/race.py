"""Race schedules on processes of this machine, for the table and the figure of a paper."""

from __future__ import annotations

import csv
import os
import warnings
from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fpipe.cli import options
from fpipe.cli.output import progress, table
from fpipe.cli.sweep import HEADS, Entrants, Sweep, read_entrants
from fpipe.pictures.dots import DotPair, DotRow, draw_dots
from fpipe.pictures.plot import plot, write_drawing
from fpipe.pictures.style import PLAIN

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

    from fpipe.cli.measure import RaceRow

STEP_SECONDS = 300
"""The longest that a rank waits for another before it gives up."""


def _picture(text: str) -> Path:
    if Path(text).suffix not in (".svg", ".png", ".pdf", ".html", ".json"):
        raise ValueError(f"--timelines writes .svg, .png, .pdf, .html or .json, found {text!r}.")
    return Path(text)


def _caps(text: str) -> list[float]:
    try:
        caps = [float(part) for part in text.split("/")]
    except ValueError:
        caps = []
    if not caps or not all(0 < cap < float("inf") for cap in caps):
        raise ValueError(f"memory caps are microbatches that a rank may hold, 2/4, found {text!r}.")
    return caps


Names = Annotated[
    list[str],
    options.parsed_by(
        read_entrants,
        metavar="NAME|FILE.py",
        help="Schedules, with options behind a colon; files that register some; torch:1F1B and others of torch's.",
    ),
]
Ranks = Annotated[
    int | None, options.whole_number("--ranks", "-p", help="Processes; by default 2, or those that torchrun started.")
]
Lengths = Annotated[
    Any, options.parsed_by(options.numbers, "--length", metavar="LIST", help="Tokens of a row to try: 64/128.")
]
Caps = Annotated[
    Any,
    options.parsed_by(
        _caps,
        "--memory-cap",
        metavar="LIST",
        help="Microbatches that a rank may hold, to try: 2/4. Schedules with a memory_cap or cap get it; others must "
        "stay below it.",
    ),
]
Rounds = Annotated[int, options.whole_number("--rounds", help="How often each schedule is timed.")]
OfModel = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODULE:FUNCTION",
        help="A function of any of stages, microbatches and length. It returns (nn.Sequential, loss, batch), which "
        "torch's classes run too; or as elsewhere (model, params, batch).",
    ),
]
Width = Annotated[int, options.whole_number("--width", help="Of the GPT that runs without --model.")]
Rows = Annotated[int, options.whole_number("--rows", help="Of its microbatches.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", metavar="FOLDER", help="Write race.csv, race.md and the figure race.svg, with matplotlib .pdf."
    ),
]
Timelines = Annotated[
    Path | None,
    options.parsed_by(
        _picture, "--timelines", metavar="FILE", help="Draw simulated and measured on one time axis, of one setting."
    ),
]


def race(
    typed: typer.Context,
    names: Names,
    ranks: Ranks = None,
    microbatches: options.Counts = "8",
    length: Lengths = "64",
    memory_cap: Caps = None,
    rounds: Rounds = 10,
    model: OfModel = None,
    width: Width = 64,
    rows: Rows = 2,
    output: Output = None,
    timelines: Timelines = None,
) -> None:
    """Race schedules on processes, simulated beside measured, for a paper.

    Starts a process for each rank (gloo, on the CPU), or joins those of torchrun.
    In each setting 1F1B is profiled once, and its costs predict every schedule.
    Then all run in turn, round after round, on blocks of a GPT or a --model.

    \b
    ms         the median step of the slowest rank; least: the shortest
    tokens/s   of the median step, and of the simulated one
    off        how far the simulated time is from the median
    bubble     idle share, measured and simulated; torch's runtime tells none
    MiB        the most that a rank holds, measured and predicted
    \b
    Examples:
      python -m fpipe race one_f_one_b zb_h1 torch:1F1B --ranks 2 --rounds 3
      python -m fpipe race mine.py zb_auto -m 8/16 --length 64/128 --memory-cap 2/4 --output results
      torchrun --standalone --nproc-per-node 2 -m fpipe race zbv --model mine.py:step
    """
    if model is not None:
        if any(options.is_typed(typed, option) for option in ("width", "rows")):
            raise typer.BadParameter("--width and --rows are of the layers that run without --model.", ctx=typed)
        options.function(model)
    if width % HEADS:
        raise typer.BadParameter(f"--width is a multiple of the {HEADS} heads, found {width}.", ctx=typed)
    settings = len(microbatches) * len(length) * len(memory_cap or [0])
    if timelines is not None and settings > 1:
        raise typer.BadParameter(f"--timelines draws one setting, found {settings}.", ctx=typed)
    for path in (timelines, output):
        if path is not None and not path.parent.is_dir():
            raise FileNotFoundError(f"{str(path.parent)!r} is not a folder: create it first.")
    entrants = cast("list[Entrants]", names)
    raced_names = [name for entrant in entrants for name in entrant.names]
    sweep = Sweep(raced_names, microbatches, length, memory_cap or [None], rounds, model, width, rows)
    imports = typed.parent.params.get("imports") if typed.parent else None
    modules = [*(imports or ()), *(entrant.file for entrant in entrants if entrant.file)]
    # The rows of a setting are printed and written at once, so that a run that is killed leaves what it has measured.
    race_rows: list[RaceRow] = []
    is_first_rank = int(os.environ.get("RANK", "0")) == 0
    with progress("race", is_shown=is_first_rank) as bar:
        for setting_rows in _race_on_ranks(sweep, modules, ranks, bar):
            race_rows += setting_rows
            _print_rows(setting_rows)
            if output is not None:
                write_files(output, race_rows)
    if race_rows and all(row.reason for row in race_rows):
        raise typer.Exit(1)
    if race_rows and output is not None:
        print(f"wrote {output / 'race.csv'}, race.md and race.svg")
    if race_rows and timelines is not None:
        drawn = {
            f"{row.schedule}, {kind}": timeline
            for row in race_rows
            for kind, timeline in (("simulated", row.simulated), ("measured", row.measured))
            if timeline is not None
        }
        print(f"wrote {plot(*drawn.values(), file=timelines, names=[*drawn])}")


def _race_on_ranks(
    sweep: Sweep, modules: Sequence[str], ranks: int | None, bar: Callable[..., None]
) -> Generator[list[RaceRow]]:
    """Yield the rows of each setting; in processes of torchrun on the first rank alone."""
    # These import torch, without which other commands start.
    from fpipe.cli.measure import race as measure_sweep
    from fpipe.cli.race_runtimes import start_workers

    def show(completed: int, total: int, task: str) -> None:
        bar(completed=completed, total=total, description=task)

    if "WORLD_SIZE" in os.environ:
        import torch.distributed as dist

        dist.init_process_group("gloo")
        try:
            if ranks not in (None, dist.get_world_size()):
                raise ValueError(f"torchrun started {dist.get_world_size()} processes, and --ranks says {ranks}.")
            for rows in measure_sweep(sweep, show):
                if dist.get_rank() == 0:
                    yield rows
        finally:
            dist.destroy_process_group()
        return
    with start_workers(_work, ranks or 2, sweep, modules) as receive:
        while (message := receive()) is not None:
            if isinstance(message, str):
                raise ValueError(f"a rank ended before its race: {message}")
            if isinstance(message, Exception):
                raise message
            if isinstance(message, tuple):
                show(*message)
            else:
                yield message


def _work(rank: int, ranks: int, address: str, sweep: Sweep, modules: Sequence[str], sender: Connection) -> None:
    """Race on one rank; the first sends progress as tuples, rows as lists, then None or an error."""
    import torch
    import torch.distributed as dist

    from fpipe.cli.measure import race as measure_sweep

    def show(*progress: object) -> None:
        if rank == 0:
            sender.send(progress)

    # Each rank would repeat the warnings of torch and fpipe.
    warnings.simplefilter("ignore")
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    dist.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=ranks, timeout=timedelta(seconds=STEP_SECONDS)
    )
    message: Exception | None = None
    try:
        for module in modules:
            options.load_module(module)
        for rows in measure_sweep(sweep, show):
            if rank == 0:
                sender.send(rows)
    # An error of any rank reaches the first one, as a RankError or a timeout of gloo, and ends the race in a sentence.
    except Exception as error:
        message = error if isinstance(error, ValueError) else ValueError(f"{type(error).__name__}: {error}")
    if rank == 0:
        sender.send(message)


# Tables and files of what was measured.

_FORMATS = {
    "ms": ".2f",
    "least ms": ".2f",
    "simulated ms": ".2f",
    "tokens/s": ".0f",
    "simulated tokens/s": ".0f",
    "off": "+.1%",
    "bubble": ".1%",
    "simulated bubble": ".1%",
    "MiB": ".1f",
    "predicted MiB": ".1f",
}
_SETTING = {"microbatches": "m", "length": "length", "memory_cap": "cap"}


def _cells(rows: Sequence[RaceRow]) -> list[tuple[str, ...]]:
    """Return a table as text, heading first; a size that all rows share is left out."""
    sizes = {name: heading for name, heading in _SETTING.items() if len({getattr(row, name) for row in rows}) > 1}
    lines: list[tuple[str, ...]] = [("schedule", *sizes.values(), *_FORMATS)]
    for row in rows:
        if not row.reason:
            numbers = row.numbers()
            values = [(numbers[name], form) for name, form in _FORMATS.items()]
            texts = ("-" if value is None else format(value, form) for value, form in values)
            lines.append((row.schedule, *(f"{getattr(row, name):g}" for name in sizes), *texts))
    return lines


def _describe_setting(row: RaceRow) -> str:
    return f"{row.microbatches} microbatches, length {row.length}"


def _name(row: RaceRow) -> str:
    return row.schedule if row.memory_cap is None else f"{row.schedule}, cap {row.memory_cap:g}"


def _print_rows(rows: Sequence[RaceRow]) -> None:
    print(_describe_setting(rows[0]))
    heading, *lines = _cells(rows)
    if lines:
        table(heading, lines)
    for row in rows:
        if row.reason:
            print(f"{_name(row)}: {row.reason}")


def write_files(folder: Path, rows: Sequence[RaceRow]) -> None:
    """Write the rows as race.csv, with all digits, as race.md, and as the figure race.svg or .pdf."""
    from fpipe.cli.race_report import headline
    from fpipe.cli.race_runtimes import device_name

    folder.mkdir(exist_ok=True)
    with (folder / "race.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, ["schedule", *_SETTING, *_FORMATS, "reason"], lineterminator="\n")
        writer.writeheader()
        for row in rows:
            sizes = {name: getattr(row, name) for name in ("schedule", *_SETTING, "reason")}
            writer.writerow(sizes | row.numbers())
    heading, *lines = _cells(rows)
    rule = ("---", *["---:"] * (len(heading) - 1))
    markdown = [f"| {' | '.join(line)} |" for line in (heading, rule, *lines)]
    title = headline([device_name("cpu")])
    (folder / "race.md").write_text("\n".join([title, "", *markdown, ""]), encoding="utf-8")
    pairs = [("simulated tokens/s", "tokens/s"), ("simulated bubble", "bubble"), ("predicted MiB", "MiB")]
    dots: list[DotRow] = []
    for setting, group in groupby((row for row in rows if not row.reason), _describe_setting):
        dots.append(DotRow(setting))
        for row in group:
            numbers = row.numbers()
            dots.append(DotRow(_name(row), [DotPair(numbers[a], numbers[b]) for a, b in pairs]))
    if dots:
        drawing = draw_dots(["tokens/s", "bubble", "MiB of a rank"], dots, PLAIN)
        write_drawing(folder / "race.svg", drawing, title)
        if find_spec("matplotlib"):
            write_drawing(folder / "race.pdf", drawing, title)
