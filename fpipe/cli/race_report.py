"""Write the rows of a race as text, HTML and JSON, with hardware, versions and date."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.metadata import PackageNotFoundError, version
from itertools import groupby
from pathlib import Path

import torch

from fpipe.cli.race_runtimes import Row
from fpipe.timing.amounts import align_columns

COLUMNS = ("runtime", "ms", "of eager", "tokens/s", "TFLOP/s", "MFU", "kernels", "number", "us an op", "MiB", "bits")


def describe(devices: Iterable[str]) -> dict[str, str]:
    """Return hardware, versions and the date of a race."""
    return {
        "hardware": " and ".join(dict.fromkeys(filter(None, devices))),
        "fpipe": _version(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }


def headline(devices: Iterable[str]) -> str:
    """Return hardware, versions and the date of a race in a line.

    >>> headline(["CPU, 2 cores"]).partition(" fpipe")[0]
    'CPU, 2 cores;'
    """
    facts = describe(devices)
    return f"{facts['hardware']}; fpipe {facts['fpipe']}, torch {facts['torch']}, {facts['date']}"


def _version() -> str:
    # A GPU's machine often has a checkout on its path, and no installed package.
    try:
        return version("fpipe-torch")
    except PackageNotFoundError:
        return "from a checkout"


def as_text(rows: Sequence[Row]) -> str:
    """Return a table for each net; below it the rows that could not run, with the reason."""
    lines = [headline(row.device for row in rows)]
    for net, net_rows in groupby(rows, lambda row: row.net):
        measured: list[tuple[str, ...]] = []
        names_by_reason: dict[str, list[str]] = {}
        for row in net_rows:
            name = f"{row.racer}, AdamW" if row.has_update else row.racer
            if row.reason:
                names_by_reason.setdefault(row.reason, []).append(name)
            else:
                measured.append((name, *_cells(row)))
        lines += ["", net]
        if measured:
            # A column that this device or kind of net has no numbers for is left out.
            columns = [cells for cells in zip(COLUMNS, *measured, strict=True) if {*cells[1:]} != {"-"}]
            is_left = [cells[0] in ("runtime", "bits") for cells in columns]
            lines += align_columns([*zip(*columns, strict=True)], is_left)
        lines += [f"{'; '.join(names)}: {reason}" for reason, names in names_by_reason.items()]
    return "\n".join(lines)


def _cells(row: Row) -> tuple[str, ...]:
    share = None if row.ms is None or row.eager_ms is None else row.ms / row.eager_ms
    numbers = (
        (row.ms, ".2f"),
        (share, ".2f"),
        (row.tokens_per_second, ".0f"),
        (row.tflops, ".4g"),
        (row.mfu, ".1%"),
        (row.kernel_ms, ".2f"),
        (row.kernels, "d"),
        (row.host_us, ".0f"),
        (row.peak_mib, ".0f"),
    )
    return (*("-" if value is None else format(value, style) for value, style in numbers), row.bits)


def write_html(file: Path, rows: Sequence[Row]) -> None:
    """Write the tables as a page."""
    head = '<!doctype html><meta charset="utf-8"><title>A race of runtimes</title>'
    file.write_text(f"{head}<pre>{escape(as_text(rows))}</pre>\n", encoding="utf-8")


def write_json(file: Path, rows: Sequence[Row]) -> None:
    """Write the rows with what follows from them; a reader never sees half a file."""
    derived = ("tokens_per_second", "tflops", "mfu")
    lines = [asdict(row) | {name: getattr(row, name) for name in derived} for row in rows]
    # A rename is atomic, so that a run that is killed leaves the rows before.
    partial_file = file.with_name(f"{file.name}.part")
    partial_file.write_text(
        json.dumps(describe(row.device for row in rows) | {"rows": lines}, indent=1), encoding="utf-8"
    )
    partial_file.replace(file)
