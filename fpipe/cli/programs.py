"""From what is typed to a program: the name of a schedule and sizes, or a file, whatever it holds."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from fpipe.interop import from_json, torch_pipelining
from fpipe.program import Program, ProgramError
from fpipe.schedules import names
from fpipe.schedules.tables import from_table
from fpipe.training import program as base_program
from fpipe.transforms.cells import keys_of, read_table, sizes_of, text_of
from fpipe.transforms.chain import chain
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.merge import merge
from fpipe.transforms.split import split

_TORCH = re.compile(r"OVERLAP_F_B|[0-9](SEND_|RECV_|UNSHARD|RESHARD|REDUCE_)")


def is_file(what: str) -> bool:
    """Whether this is meant as a file: "-" (standard input), a path that is there, or looks like one."""
    return what.partition(":")[0] not in names() and (what == "-" or Path(what).is_file() or "/" in what or "." in what)


def read(file: str, *, replicated: bool = False) -> Program:
    """The program in a file: a program's text, JSON, a table (grid or CSV), or a table of torch's."""
    return program_of(sys.stdin.read() if file == "-" else text_of(Path(file)), replicated=replicated)


def program_of(text: str, *, replicated: bool = False) -> Program:
    """The program that a text says, whatever it is written as.

    >>> program_of("0F0 0F1 0B0 0B1\\n1F0 1F1 1B0 1B1")
    <Program: 2 stages, 2 microbatches, 2 ranks, 15 ops>
    """
    if not text.strip():
        raise ProgramError("there is nothing in it; write a program, a table, CSV or JSON.")
    if text.lstrip().startswith("{") and '"' in text.partition("\n")[0]:
        return from_json(text)
    if " = " in text and " @ " in text:
        return Program.parse(text)
    if _TORCH.search(text):
        return torch_pipelining.from_csv(text)
    rows = read_table(text)
    keys = [key for row in rows for cell in row for key in keys_of(cell)]
    if not keys:
        raise ProgramError("the table names no F, B, I or W.")
    stages, microbatches, slices = sizes_of(keys)
    again = {(key[1], key[2]) for key in keys if key[0] == "R"}
    steps = (
        split(microbatches, slices=slices),
        checkpoint(lambda stage, microbatch: (stage, microbatch) in again),
        from_table(rows, replicated=replicated),
        merge(),
    )
    return chain(*steps)(base_program(stages))
