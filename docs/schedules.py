"""Write docs/schedules.md from the registry: `make docs`. A test holds the page to what this writes."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import fpipe
from fpipe.cli.costs import parse
from fpipe.schedules import Schedule
from fpipe.schedules.named import parse as schedule_of

PAGE = Path(__file__).with_suffix(".md")
DRAWN = ((3, 4), (4, 4), (2, 4), (4, 8))
MEASURED = (4, 8)
UNIT = parse("")  # a second each, and nobody is told: schedules are drawn as they were published

HEAD = """# Schedules

For whoever looks for a schedule: every one that has a name (`fpipe.schedules.names()`), drawn, with its source, sizes,
idle time and memory. This page is generated (`make docs`), and a test holds it to the registry.

    fpipe.schedules.zb_h1(ranks=4)                       a transform, for programs of your own
    fpipe.schedules.about("zb_h1").program(4, 8)         a program of a plain chain, 4 ranks, 8 microbatches
    python -m fpipe show zb_h1 --ranks 4 --microbatches 8

In formulas p is the number of ranks, m of microbatches, v of stages a rank, Q of slices of a sequence, r a rank from 0;
F, B and W are the seconds of a forward, an input gradient and a weight gradient of one microbatch on a whole rank's
share of the model, T = F + B + W; c is the latency of a transfer. Idle is the makespan less mT. A peak counts
microbatches that a rank holds, one microbatch of all its stages being 1.

In grids `2F0` is stage 2, forward, microbatch 0; `B` full backward, `I` input gradient, `W` weight gradient, `R`
recompute; `(0F3;3B1)` overlaps two; `.` is idle; each op takes a column.

## Side by side
"""


def main() -> None:
    """Write the page."""
    PAGE.write_text(page())
    print(f"wrote {PAGE}")


def page() -> str:
    """The page, from what is registered now."""
    found = [fpipe.schedules.about(name) for name in fpipe.schedules.names()]
    return "\n".join([HEAD, *_side_by_side(found), *(line for schedule in found for line in _section(schedule))])


def _side_by_side(found: list[Schedule]) -> list[str]:
    ranks, microbatches = MEASURED
    lines = [
        f"Measured by `fpipe.simulate`: {ranks} ranks, {microbatches} microbatches, F = B = W = 1, so mT is "
        f"{3 * microbatches}. The lower bound (`fpipe.bounds`) is of any order in the same placement and memory.",
        "",
        "| schedule | stages a rank | makespan | span | bubble | bubble of span | lower bound | peak, rank by rank |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for schedule in found:
        program = _served(schedule, [MEASURED])
        if program is None:
            lines.append(f"| [{schedule.name}](#{schedule.name}) | does not serve this size |")
            continue
        time = fpipe.simulate(program, UNIT.of(program))
        least = fpipe.bounds(program, UNIT.of(program)).makespan
        peaks = ", ".join(f"{peak:.4g}" for peak in time.peak)
        lines.append(
            f"| [{schedule.name}](#{schedule.name}) | {program.stages / ranks:g} | {time.makespan:.6g} | "
            f"{time.span:.6g} | {time.bubble:.1%} | {time.bubble_span:.1%} | {least:.6g} | {peaks} |"
        )
    return [*lines, ""]


def _section(schedule: Schedule) -> list[str]:
    lines = [f"## {schedule.name}", ""]
    if schedule.title:
        lines += [f"{schedule.title}. {schedule.source}.", ""]
    lines += [_said(schedule), ""]
    options = list(inspect.signature(schedule.factory).parameters)[1:]
    facts = {
        "Accepts": schedule.accepts,
        "Idle": schedule.idle,
        "Peak": schedule.peak,
        "Options": ", ".join(f"`{word}=`" for word in options),
    }
    lines += [f"- {word}: {fact}" for word, fact in facts.items() if fact]
    program = _served(schedule, DRAWN)
    if program is None:
        return [*lines, ""]
    sizes = f"{program.ranks} ranks, {program.microbatches} microbatches, {program.stages} stages"
    return [*lines, "", f"{sizes}:", "", "```", str(fpipe.plot(program)), "```", ""]


def _said(schedule: Schedule) -> str:
    """The docstring up to its arguments, without its drawings."""
    text = inspect.getdoc(schedule.factory) or ""
    paragraphs: list[str] = []
    for paragraph in text.split("\n\n"):
        if paragraph.startswith((">>>", "Args:", "Returns:", "Raises:", "Source:")):
            break
        if not paragraph.startswith(" "):
            paragraphs.append(" ".join(paragraph.split()))
    return "\n\n".join(paragraphs)


def _served(schedule: Schedule, sizes: Sequence[tuple[int, int]]) -> fpipe.Program | None:
    """The first size that the schedule serves."""
    for ranks, microbatches in sizes:
        if schedule.refuses(ranks, ranks * schedule.stages_per_rank, microbatches) is None:
            return schedule_of(schedule.name).program(ranks, microbatches)
    return None


if __name__ == "__main__":
    main()
