"""Race runtimes against each other on one machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import typer

from fpipe.cli import options
from fpipe.cli.output import progress

Device = Literal["cpu", "cuda"]
RIVALS = ("eager", "compile", "torch", "fsdp2")
NETS = ("gpt", "gpt-wide", "llama", "mlp", "moe")
ALL_NETS = ",".join(NETS)


def _list_parser(choices: tuple[str, ...]) -> Callable[[str], str]:

    def check_names(text: str) -> str:
        for name in text.split(","):
            if name not in choices:
                raise ValueError(f"{name!r} is none of {', '.join(choices)}.")
        return text

    return check_names


Rounds = Annotated[int, options.whole_number("--rounds", help="How often each runs.")]
Against = Annotated[
    str, options.parsed_by(_list_parser(RIVALS), "--against", metavar="LIST", help=f"Rivals, of {','.join(RIVALS)}.")
]
OfNets = Annotated[str, options.parsed_by(_list_parser(NETS), "--nets", metavar="LIST", help="What to train.")]
OfDevice = Annotated[Device, typer.Option(help="Where to train it.")]
Quick = Annotated[bool, typer.Option("--quick", help="On small nets.")]
Budget = Annotated[
    float | None,
    typer.Option(
        min=1, help="Seconds that it may take, by default an hour, or 110 with --quick; then rows are left out."
    ),
]
Html = Annotated[Path | None, typer.Option(help="Write its table, with hardware, versions and date.")]
Json = Annotated[Path | None, typer.Option(help="Write its rows too, each as soon as it is measured.")]


def bench(
    against: Against = "eager,torch",
    nets: OfNets = ALL_NETS,
    device: OfDevice = "cpu",
    quick: Quick = False,
    rounds: Rounds = 10,
    budget: Budget = None,
    html: Html = None,
    json: Json = None,
) -> None:
    """Race fpipe's step against other runtimes, on one device or by shards.

    Each runs in turn with an eager loop: 8 microbatches, 4 stages on one device.

    \b
    ms         the shortest step; of eager: as a share of the loop's between its rounds
    MFU        share of the device's peak; kernels: their ms alone, and how many
    us an op   until the call returns, for each F and B; MiB: reserved by the step
    bits       gradients, or updated parameters, against the eager loop's
    \b
    Examples:
      python -m fpipe bench --against eager,torch --quick --nets mlp --rounds 2
      python -m fpipe bench --device cuda --against eager,compile,torch,fsdp2 > race.txt
    """
    import torch

    from fpipe.cli.race_report import as_text, write_html, write_json
    from fpipe.cli.race_runtimes import Row, Setting, jobs_of, race

    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here; --device cpu --quick races small nets.")
    jobs, rows = jobs_of(nets.split(","), against.split(",")), list[Row]()
    with progress("race") as bar:
        for row in race(jobs, Setting(device, quick, rounds), budget or (110 if quick else 3600)):
            rows.append(row)
            bar(completed=len(rows), total=len(jobs))
            # Written after each row, so that a run that is killed leaves what it has measured.
            if json is not None:
                write_json(json, rows)
    print(as_text(rows))
    if html is not None:
        write_html(html, rows)
    for file in (html, json):
        if file is not None:
            print(f"wrote {file}")
