"""Write docs/schedules.md from the registry: `make docs`. A test compares the page with this text."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import fpipe
from fpipe.schedules import Schedule
from fpipe.schedules.notations import parse as schedule_of

PAGE = Path(__file__).with_suffix(".md")
DRAWN = ((3, 4), (4, 4), (2, 4), (4, 8))
MEASURED = (4, 8)

HEAD = """# Schedules

*Reference.* Every schedule that has a name, with its source, sizes, idle time and memory. `make docs` writes this page
from the registry.

    fpipe.schedules.zb_h1(ranks=4)                       a transform, for programs of your own
    fpipe.schedules.about("zb_h1").program(4, 8)         a program of a plain chain, 4 ranks, 8 microbatches
    python -m fpipe show zb_h1 --ranks 4 --microbatches 8

| letter | meaning |
|---|---|
| p, m, r | number of ranks, number of microbatches, a rank from 0 |
| v, Q | stages of a rank, also called chunks; slices of a sequence |
| F, B, W | seconds of a forward, an input gradient, a weight gradient of a microbatch on a rank; T = F + B + W |
| c | latency of a transfer |
| idle | makespan less mT |
| peak | microbatches that a rank holds; one microbatch of all its stages counts 1 |

Options, and how a schedule is built, are in the [reference](reference/schedules.md). Grids have p = 3 and m = 4 unless
they say otherwise. `(0F3;3B1)` overlaps two ops.

## Side by side
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


def page() -> str:
    """Return the page's text, from the registry."""
    schedules = [fpipe.schedules.about(name) for name in fpipe.schedules.names()]
    sections = (line for schedule in schedules for line in _section(schedule))
    return "\n".join([HEAD, *_side_by_side(), *sections])


def _side_by_side() -> list[str]:
    ranks, microbatches = MEASURED
    comparison = fpipe.compare(fpipe.schedules.names(), ranks=ranks, microbatches=microbatches)
    return [
        f"Simulated with F = B = W = 1, so mT is {3 * microbatches}. The bound is the least makespan of any order in "
        "the same placement and memory (`fpipe.bounds`). The peak is the largest of all ranks.",
        "",
        "```",
        f">>> print(fpipe.compare(fpipe.schedules.names(), ranks={ranks}, microbatches={microbatches}))",
        *str(comparison).splitlines(),
        "```",
        "",
    ]


def _section(schedule: Schedule) -> list[str]:
    lines = [f"## {schedule.name}", ""]
    if schedule.title:
        lines += [f"{schedule.title}. {schedule.source}.", ""]
    lines += [" ".join((inspect.getdoc(schedule.factory) or "").split("\n\n")[0].split()), ""]
    facts = {"Accepts": schedule.accepts, "Idle": schedule.idle, "Peak": schedule.peak}
    lines += [f"- {label}: {fact}" for label, fact in facts.items() if fact]
    program = _program_of(schedule, DRAWN)
    if program is None:
        return [*lines, ""]
    size = (program.ranks, program.microbatches)
    caption = [] if size == DRAWN[0] else ["", f"Drawn with p = {size[0]}, m = {size[1]}:"]
    return [*lines, *caption, "", "```", str(fpipe.plot(program)), "```", ""]


def _program_of(schedule: Schedule, sizes: Sequence[tuple[int, int]]) -> fpipe.Program | None:
    """Return the schedule's program of the first of these sizes that it accepts."""
    for ranks, microbatches in sizes:
        if schedule.refuses(ranks, ranks * schedule.stages_per_rank, microbatches) is None:
            return schedule_of(schedule.name).program(ranks, microbatches)
    return None


if __name__ == "__main__":
    main()
