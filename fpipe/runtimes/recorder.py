"""Record a step as it runs: when each op did, and the bytes of distinct storages on each rank, the caller's aside."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fpipe.program import Op, Program, Value
from fpipe.timing.memory import Account, HeldChanges
from fpipe.timing.timeline import Timeline

Storages = dict[Hashable, int]
"""Bytes of storages, each under what tells it from the others."""


class Recorder:
    """When each op of a program ran, and what each rank held.

    What runs is that program `with_transfers`, so that a copy counts on its rank whether its RECV is an op or not;
    SENDs and RECVs that it has not are not told.
    """

    def __init__(self, program: Program, given: Iterable[Any]) -> None:
        leaves = [leaf for leaf in given if isinstance(leaf, Tensor)]
        self.account = Account(program.ranks, storages(leaves))
        told = (*program.ops, *(part for op in program.ops for part in op.parts))
        self.told = {(op.kind, value): op for op in told for value in op.writes}
        self.devices = {leaf.device for leaf in leaves if leaf.device.type not in ("cpu", "meta")}
        self.ran: list[tuple[Op, float, float]] = []
        self.rows, self.lock = 0, threading.Lock()
        self.steps = HeldChanges()
        self.began = time.perf_counter()

    def note(
        self, ops: Sequence[Op], written: Iterable[tuple[Value, Iterable[Any]]], dead: Sequence[Value], started: float
    ) -> None:
        """What one op did, or several that ran as one, since it `started`."""
        for device in self.devices:  # an op is over when its work is
            torch.accelerator.synchronize(device)
        span = started - self.began, time.perf_counter() - self.began
        with self.lock:
            for op in ops:
                same = [self.told[op.kind, value] for value in op.writes if (op.kind, value) in self.told]
                self.ran += [(known, *span) for known in same[:1]]
            found = [(value, storages(leaves)) for value, leaves in written]
            self.rows += 1
            row = self.rows
            added, gone = self.account.note(ops[0].rank, found, dead)
            self.steps += [(span[0], row, where, size) for where, size in added]
            self.steps += [(span[1], row + 0.5, where, -size) for where, size in gone]

    def timeline(self) -> Timeline:
        """When each op ran, and the most bytes each rank held."""
        peak = tuple(map(float, self.account.peak))
        ops = tuple(op for op, _, _ in self.ran)
        starts, ends = (tuple(span[at] for _, *span in self.ran) for at in (0, 1))
        return Timeline(ops, starts, ends, len(peak), peak, peak, steps=self.steps)


def storages(leaves: Iterable[Any]) -> Storages:
    """The distinct storages of tensors.

    A storage is known by a weak reference to it, so that one that is made where another was is not taken for it.
    """
    found: Storages = {}
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.layout is torch.strided:
            storage = leaf.untyped_storage()
            found[StorageWeakRef(storage)] = storage.nbytes()
    return found
