"""Torch's own pipeline runtime: the class that runs a table, and how it takes one."""

from __future__ import annotations

import csv
import io
from typing import Any

from torch.distributed.pipelining.schedules import (
    _Action,  # pyright: ignore[reportPrivateUsage]
    _PipelineScheduleRuntime,  # pyright: ignore[reportPrivateUsage]
)

TableRuntime = _PipelineScheduleRuntime
"""The runtime that runs tables (2.11, 2.13, 2.15)."""


def load_tables(runtime: Any, compute: str, comms: str) -> None:
    """Let a runtime run a table with transfers, `comms`; it also wants the table without them (2.11, 2.13, 2.15)."""
    runtime.pipeline_order = _actions(compute)
    runtime._prepare_schedule_with_comms(_actions(comms), format="compute_comms")


def _actions(table: str) -> dict[int, list[Any]]:
    return {rank: [*map(_Action.from_str, row)] for rank, row in enumerate(csv.reader(io.StringIO(table)))}
