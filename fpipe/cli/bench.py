"""Race schedules on this machine, simulated and measured, or runtimes against each other."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from itertools import permutations
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fpipe.cli import options
from fpipe.cli.output import progress, table
from fpipe.pictures.plot import plot

if TYPE_CHECKING:
    from fpipe.cli.measure import Measurement, Workload

Runtime = Literal["threads", "distributed"]
Device = Literal["cpu", "cuda"]
RIVALS = ("eager", "compile", "torch", "fsdp2")
NETS = ("gpt", "gpt-wide", "llama", "mlp", "moe")


def _picture(text: str) -> Path:
    if Path(text).suffix not in (".svg", ".png", ".pdf", ".html", ".json"):
        raise ValueError(f"--file writes .svg, .png, .pdf, .html or .json, found {text!r}.")
    return Path(text)


def _list_parser(choices: tuple[str, ...]) -> Callable[[str], str]:

    def check_names(text: str) -> str:
        for name in text.split(","):
            if name not in choices:
                raise ValueError(f"{name!r} is none of {', '.join(choices)}.")
        return text

    return check_names


Names = Annotated[
    list[str] | None,
    options.parsed_by(options.schedule_name, metavar="NAME...", help="Schedules, with options behind a colon."),
]
Ranks = Annotated[
    int | None, typer.Option("--ranks", "-p", min=1, help="Ranks; by default 2, or as many as torchrun started.")
]
OfRuntime = Annotated[Runtime, typer.Option("--runtime", "-r", help="threads, or distributed (under torchrun).")]
Rounds = Annotated[int, typer.Option(min=1, help="How often each schedule runs.")]
Width = Annotated[int, typer.Option(min=1, help="Of the layers.")]
Rows = Annotated[int, typer.Option(min=1, help="Of a microbatch.")]
Picture = Annotated[
    Path | None,
    options.parsed_by(
        _picture,
        "--file",
        metavar="FILE",
        help="Draw simulated and measured on one time axis: .svg, .png, .pdf, .html, or .json for ui.perfetto.dev.",
    ),
]
Against = Annotated[
    str | None,
    options.parsed_by(
        _list_parser(RIVALS), "--against", metavar="LIST", help=f"Race runtimes, of {','.join(RIVALS)}, with fpipe."
    ),
]
OfNets = Annotated[
    str | None,
    options.parsed_by(_list_parser(NETS), "--nets", metavar="LIST", help=f"Nets of that race, of {','.join(NETS)}."),
]
OfDevice = Annotated[Device, typer.Option(help="Of that race.")]
Quick = Annotated[bool, typer.Option("--quick", help="That race on small nets.")]
Budget = Annotated[
    float | None,
    typer.Option(
        min=1, help="Seconds that it may take, by default an hour, or 110 with --quick; then rows are left out."
    ),
]
Html = Annotated[Path | None, typer.Option(help="Write its table, with hardware, versions and date.")]
Json = Annotated[Path | None, typer.Option(help="Write its rows too, each as soon as it is measured.")]


def bench(
    typed: typer.Context,
    schedules: Names = None,
    ranks: Ranks = None,
    microbatches: options.Microbatches = 8,
    runtime: OfRuntime = "threads",
    rounds: Rounds = 10,
    model: options.OfModel = None,
    width: Width = 512,
    rows: Rows = 128,
    file: Picture = None,
    against: Against = None,
    nets: OfNets = None,
    device: OfDevice = "cpu",
    quick: Quick = False,
    budget: Budget = None,
    html: Html = None,
    json: Json = None,
) -> None:
    """Profile, simulate and run schedules here, or race fpipe against other runtimes.

    Costs are those of 1F1B with as many stages, its ranks running together
    (fpipe.profile). A round runs each schedule once. A --model serves schedules
    with as many stages; without one, linear layers with ReLU run, at least 8.

    \b
    simulated  makespan in ms, of fpipe.simulate with these costs
    measured   the median over rounds; least: the shortest round
    off        how far simulated is from measured
    bubble     idle share, simulated and measured
    MiB        the most that a rank holds, predicted and measured
    \b
    With --against, in turn with an eager loop over 8 microbatches, 4 stages on one device:
    ms         the shortest step; of eager: as a share of the loop's between its rounds
    MFU        share of the device's peak; kernels: their ms alone, and how many
    us an op   until the call returns, for each F and B; MiB: reserved by the step
    bits       gradients, or updated parameters, against the eager loop's
    \b
    Examples:
      python -m fpipe bench one_f_one_b zb_h1 --ranks 2 --microbatches 4 --rounds 2 --width 64
      python -m fpipe bench gpipe interleaved --rounds 2 --width 64 --rows 8 --file both.svg
      torchrun --standalone --nproc-per-node 2 -m fpipe bench zbv --runtime distributed
      python -m fpipe bench --against eager,torch --quick --nets mlp --rounds 2
      python -m fpipe bench --device cuda --against eager,compile,torch,fsdp2 > race.txt
    """
    for option in ("nets", "device", "quick", "budget", "html", "json"):
        if against is None and options.is_typed(typed, option):
            raise typer.BadParameter(f"--{option} is of a race of runtimes: add --against eager,torch.", ctx=typed)
    if (schedules is None) == (against is None):
        raise typer.BadParameter("name schedules to race, or say --against eager,torch to race runtimes.", ctx=typed)
    if against is not None:
        for option in ("ranks", "microbatches", "runtime", "model", "width", "rows", "file"):
            if options.is_typed(typed, option):
                raise typer.BadParameter(f"--{option} is of a race of schedules, without --against.", ctx=typed)
        names = nets.split(",") if nets else NETS
        _race_runtimes(against.split(","), names, device, quick, rounds, budget or (110 if quick else 3600), html, json)
        return
    assert schedules is not None
    if model is not None and any(options.is_typed(typed, option) for option in ("width", "rows")):
        raise typer.BadParameter("--width and --rows are of the layers that run without --model.", ctx=typed)
    if file is not None and not file.parent.is_dir():
        raise FileNotFoundError(f"{str(file.parent)!r} is not a folder: create it first.")
    # torch is imported by this: the other commands start without it, in a third of the time.
    from fpipe.cli.measure import measure, perceptron, stages_of

    # 1) Make the model: a user's, or layers that every schedule's number of stages divides. Then measure.
    with _all_ranks(runtime, ranks) as (rank, count), progress("profile and run", is_shown=rank == 0) as bar:
        if model is None:
            workload = perceptron([stages_of(name, count) for name in schedules], microbatches, width, rows)
        else:
            workload = _for_any_stages(options.call_model(model))

        def show(done: int, total: int) -> None:
            bar(completed=done, total=total)

        measured = measure(
            schedules, workload, ranks=count, microbatches=microbatches, runtime=runtime, rounds=rounds, progress=show
        )
    # 2) The first rank prints and draws.
    if rank == 0:
        _print_table(measured)
        if file is not None:
            timelines = [timeline for row in measured for timeline in (row.simulated, row.median)]
            names = [f"{row.name}, {kind}" for row in measured for kind in ("simulated", "measured")]
            print(f"wrote {plot(*timelines, file=file, names=names)}")


def _for_any_stages(workload: Workload) -> Callable[[int], Workload]:
    """Return a function that gives this model for its number of stages; raise ValueError for another number."""

    def for_stages(stages: int) -> Workload:
        count = len(workload[0].stages)
        if stages != count:
            raise ValueError(
                f"--model returns a model of {count} stages, and a schedule wants {stages}. Say "
                f"NAME:stages={count}, or leave it out."
            )
        return workload

    return for_stages


@contextmanager
def _all_ranks(runtime: Runtime, ranks: int | None) -> Generator[tuple[int, int]]:
    """Yield this process's rank and the number of ranks, each with its share of the cores."""
    import torch

    # Threads of one process share its cores: each rank gets its part, as in a process of its own.
    old_threads = torch.get_num_threads()
    if runtime == "threads":
        count = ranks or 2
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
        try:
            yield 0, count
        finally:
            torch.set_num_threads(old_threads)
        return
    if "WORLD_SIZE" not in os.environ:
        raise ValueError(
            "--runtime distributed is for processes that torchrun starts: torchrun --standalone --nproc-per-node "
            f"{ranks or 2} -m fpipe bench NAME --runtime distributed."
        )
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        if ranks not in (None, dist.get_world_size()):
            raise ValueError(f"torchrun started {dist.get_world_size()} processes, and --ranks says {ranks}.")
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def _print_table(rows: Sequence[Measurement]) -> None:
    columns = ("schedule", "simulated", "measured", "least", "off", "bubble", "measured", "MiB", "held")
    cells: list[tuple[str, ...]] = []
    for row in rows:
        simulated, median = row.simulated, row.median
        seconds = [f"{1e3 * value:.2f}" for value in (simulated.makespan, median.makespan, row.shortest)]
        bubbles = [f"{timeline.bubble:.1%}" for timeline in (simulated, median)]
        bytes_held = [f"{value / 2**20:.1f}" for value in (row.predicted_peak, max(median.peak))]
        cells.append((row.name, *seconds, f"{row.error:+.1%}", *bubbles, *bytes_held))
    table(columns, cells)
    # Report pairs that measured times order otherwise than simulated ones, by more than 5 %.
    for fast, slow in permutations(rows, 2):
        if fast.median.makespan * 1.05 < slow.median.makespan and fast.simulated.makespan > slow.simulated.makespan:
            print(f"{slow.name} was simulated to be shorter than {fast.name}, and took longer.")


def _race_runtimes(
    against: Sequence[str],
    nets: Sequence[str],
    device: Device,
    is_quick: bool,
    rounds: int,
    budget: float,
    html: Path | None,
    json_file: Path | None,
) -> None:
    import torch

    from fpipe.cli.race import Row, Setting, jobs_of, race
    from fpipe.cli.race_report import as_text, write_html, write_json

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --device cpu --quick races small nets.")
    jobs, rows = jobs_of(nets, against), list[Row]()
    with progress("race") as bar:
        for row in race(jobs, Setting(device, is_quick, rounds), budget):
            rows.append(row)
            bar(completed=len(rows), total=len(jobs))
            # Written after each row, so that a run that is killed leaves what it has measured.
            if json_file is not None:
                write_json(json_file, rows)
    print(as_text(rows))
    if html is not None:
        write_html(html, rows)
    for file in (html, json_file):
        if file is not None:
            print(f"wrote {file}")
