"""Read the schedules of a race, by name, from a file or of torch's own, and the settings of its sweep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from fpipe.cli.options import load_module, schedule_name
from fpipe.schedules import names
from fpipe.schedules.notations import NamedSchedule, parse

TORCH = "torch:"
HEADS = 4
"""Of the GPT that races without a --model."""
# The classes of torch.distributed.pipelining, as its `get_schedule_class` calls them, and schedules in the same order.
SCHEDULE_BY_CLASS = {
    "GPipe": "gpipe",
    "1F1B": "one_f_one_b",
    "Interleaved1F1B": "interleaved",
    "LoopedBFS": "looped_bfs",
    "InterleavedZeroBubble": "interleaved_zb",
    "ZBVZeroBubble": "zbv",
    "DualPipeV": "dualpipev",
}


@dataclass(frozen=True)
class Sweep:
    """Schedules and settings of a race, in plain types, as its processes get it.

    Attributes:
        names: schedules, with options behind a colon; `torch:1F1B` is a class of torch's.
        microbatches, lengths, memory_caps: what to try, in all combinations; a cap in microbatches of a rank, or None.
        rounds: how often each schedule is timed.
        model: MODULE:FUNCTION, or None for blocks of a GPT.
        width, rows: of these blocks, and of a microbatch.
    """

    names: Sequence[str]
    microbatches: Sequence[int]
    lengths: Sequence[int]
    memory_caps: Sequence[float | None]
    rounds: int
    model: str | None
    width: int
    rows: int


class Entrants(NamedTuple):
    """The schedules of an argument, and the file that registers them, if it is one."""

    names: Sequence[str]
    file: str | None = None


def read_entrants(text: str) -> Entrants:
    """Read the name of a schedule or of a class of torch's, or run a .py file that registers schedules."""
    if text.startswith(TORCH):
        parse_entrant(text)
        return Entrants([text])
    if not text.endswith(".py"):
        return Entrants([schedule_name(text)])
    known_names = {*names()}
    load_module(text)
    new_names = [name for name in names() if name not in known_names]
    if not new_names:
        raise ValueError(f"{text} registers no schedule: call fpipe.schedules.register(name, f) in it.")
    return Entrants(new_names, text)


def parse_entrant(name: str) -> tuple[NamedSchedule, str | None]:
    """Return a schedule, and the class of torch's that runs it if its name says `torch:`.

    >>> parse_entrant("torch:zbvzerobubble")[1]
    'ZBVZeroBubble'
    """
    if not name.startswith(TORCH):
        return parse(name), None
    classes = {torch_class.lower(): torch_class for torch_class in SCHEDULE_BY_CLASS}
    torch_class = classes.get(name.removeprefix(TORCH).lower())
    if torch_class is None:
        raise ValueError(f"torch has no schedule {name.removeprefix(TORCH)!r}; it has {', '.join(SCHEDULE_BY_CLASS)}.")
    return parse(SCHEDULE_BY_CLASS[torch_class]), torch_class
