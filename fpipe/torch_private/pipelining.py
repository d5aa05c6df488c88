"""Torch's own pipeline runtime: the class that carries out a table, and how it is handed one."""

from __future__ import annotations

import csv
import io
from typing import Any

from torch.distributed.pipelining.schedules import (
    _Action,  # pyright: ignore[reportPrivateUsage]
    _PipelineScheduleRuntime,  # pyright: ignore[reportPrivateUsage]
)

TableRuntime = _PipelineScheduleRuntime
"""The runtime, to be handed tables (2.11, 2.13, 2.15)."""


def hand_tables(runtime: Any, compute: str, comms: str) -> None:
    """Let a runtime carry out a table with transfers, of which it also wants the computation alone (2.11, 2.13, 2.15:
    `pipeline_order`, `_prepare_schedule_with_comms`)."""
    runtime.pipeline_order = _actions(compute)
    runtime._prepare_schedule_with_comms(_actions(comms), format="compute_comms")


def _actions(table: str) -> dict[int, list[Any]]:
    return {rank: [*map(_Action.from_str, row)] for rank, row in enumerate(csv.reader(io.StringIO(table)))}
