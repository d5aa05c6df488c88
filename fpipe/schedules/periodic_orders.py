"""The orders of schedules at any size, in runs: what `periodic` reads where a program would have too many ops."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from fpipe.orders.runs import Run, RunRow, Symbol, Track

Rows = list[list[Run]]


def taken_in_turn(
    chunks: Sequence[Sequence[int]],
    forwards: Sequence[tuple[int, int, int]],
    warm_up: int,
    lag: int | None = None,
) -> list[Run]:
    """The row of `in_turn.in_turn` for stretches of forwards: (chunk, first microbatch, how many)."""
    total = sum(count for _, _, count in forwards)
    kind, last = ("B" if lag is None else "I"), len(chunks) - 1

    def tracks(kind: str, begin: int) -> Iterator[tuple[int, int, list[Symbol]]]:
        for chunk, _, count in forwards:
            stages = chunks[chunk] if kind == "F" else chunks[last - chunk][::-1]
            yield begin, begin + count, [((kind, stage),) for stage in stages]
            begin += count

    streams = [list(tracks("F", -min(warm_up, total))), list(tracks(kind, 0))]
    if lag is not None:
        streams.append(list(tracks("W", lag)))
    cuts = sorted({turn for stream in streams for begin, end, _ in stream for turn in (begin, end)})
    row = RunRow()
    for begin, end in pairwise(cuts):
        met = [cells for stream in streams for first, last, cells in stream if first <= begin < last]
        row.add([cell for cells in met for cell in cells], end - begin)
    return row.runs


def _in_turn(
    chunks: int, warm_up: Callable[[int, int], int], lag: Callable[[int], int] | None = None
) -> Callable[[int, int], Rows]:
    """The rows of `in_turn`, of chunks in rounds of `ranks`; a warm-up is `f(ranks behind, size of a round)`."""

    def rows(ranks: int, microbatches: int) -> Rows:
        size = microbatches if chunks == 1 else ranks
        forwards = [(chunk, first, size) for first in range(0, microbatches, size) for chunk in range(chunks)]
        stages = [[[rank + chunk * ranks] for chunk in range(chunks)] for rank in range(ranks)]
        return [
            taken_in_turn(own, forwards, warm_up(ranks - 1 - rank, size), lag and lag(rank))
            for rank, own in enumerate(stages)
        ]

    return rows


def _zbv(ranks: int, microbatches: int) -> Rows:
    """ZB-V as published, for at least 2p-1 microbatches."""
    rows: Rows = []
    for rank in range(ranks):
        row, other = RunRow(), ranks - rank
        up = 2 * ranks - 1 - rank
        down_f, up_f, back, home = [("F", rank)], [("F", up)], [("I", up)], [("I", rank)]
        of_up, of_down = ("W", up), ("W", rank)
        row.add([down_f], 2 * other - 1)
        row.add([up_f, down_f], rank)
        row.add([up_f, back, [of_up]], other)
        row.add([down_f, home, [of_down], up_f, back, [of_up]], microbatches - 2 * ranks + rank + 1)
        row.add([home, [of_down], up_f, back, [of_up]], other - 1)
        row.add([home, back], rank)
        _drained(row, [of_down, of_up], 2 * rank, of_down, other, before=(("I", rank),))
        rows.append(row.runs)
    return rows


def _drained(
    row: RunRow, turns: list[Track], waiting: int, then: Track, count: int, before: Symbol = (), after: Symbol = ()
) -> None:
    """The last `count` I's of a rank, each with the W that has waited longest, and then the W that are left.

    First `waiting` of them alternate between two tracks; behind these are those of the I's themselves.
    """

    def weights(begin: int, end: int, before: Symbol, after: Symbol) -> None:
        own, turn = turns if begin % 2 == 0 else turns[::-1], min(max(begin, waiting), end)
        pairs, odd = divmod(turn - begin, 2)
        for tracks, times in ((own, pairs), (own[:1], odd), ([then], end - turn)):
            row.add([cell for track in tracks for cell in (before, (track,), after) if cell], times)

    weights(0, count, before, after)
    weights(count, waiting + count, (), ())


def _dualpipe(ranks: int, microbatches: int) -> Rows:
    """DualPipe with pairs: the turns of `two_ends.py`, phase by phase."""
    rows: Rows = []
    half, middle = microbatches // 2, ranks // 2
    for rank in range(ranks):
        outer = min(rank, ranks - 1 - rank)
        zero, one = outer, ranks - 1 - outer
        row, further = RunRow({zero: 0, one: half} if rank == outer else {zero: half, one: 0}), middle - 1 - outer
        ahead, back = [[("F", zero)], [("F", one)]], [[("B", zero)], [("B", one)]]
        inputs, weights = [("I", zero), ("I", one)], [("W", zero), ("W", one)]
        both = [[*ahead[0], *back[1]], [*ahead[1], *back[0]]]
        row.add([ahead[0]], 2 * further)
        row.add(ahead, outer + 1)
        row.add([[inputs[1]], [weights[1]], ahead[1]], further)
        rounds = half - ranks + outer + 1
        if not further:  # in the middle the backward is of the forward just before: not at once
            row.add([ahead[0], back[1], both[1]], 1)
        row.add(both, rounds - (not further))
        row.add([back[1], both[1]], further)
        row.add(back[::-1], (outer + 1) // 2)
        pairs, odd = divmod(outer + 1, 2)
        row.add([back[1]], odd)
        turns = (0, 1) if odd else (1, 0)
        row.add([[inputs[turn]] for turn in turns], pairs)
        row.add([[inputs[0]]], odd)
        _drained(row, [weights[turn] for turn in turns], outer + 1, weights[0], further, after=(inputs[0],))
        rows.append(row.runs)
    return rows


class PeriodicOrder(NamedTuple):
    """The rows of a schedule at any size, why it has no period at some, and how many stages a rank has."""

    rows: Callable[[int, int], Rows]
    refuses: Callable[[int, int], str | None] = lambda ranks, microbatches: None
    chunks: int = 1


def _whole_rounds(ranks: int, microbatches: int) -> str | None:
    if microbatches % ranks == 0:
        return None
    return (
        f"its rounds are of {ranks} microbatches, and {microbatches} leave a short one, which has no period; take "
        f"{-(-microbatches // ranks) * ranks}, or simulate a program."
    )


def _filled(ranks: int, microbatches: int) -> str | None:
    if microbatches >= 2 * ranks - 1:
        return None
    return (
        f"it repeats nothing before every rank is full; take {2 * ranks - 1} microbatches or more, found {microbatches}"
        ", or simulate a program."
    )


PERIODIC: dict[str, PeriodicOrder] = {
    "gpipe": PeriodicOrder(_in_turn(1, lambda later, microbatches: microbatches)),
    "one_f_one_b": PeriodicOrder(_in_turn(1, lambda later, microbatches: later)),
    "eager_1f1b": PeriodicOrder(_in_turn(1, lambda later, microbatches: 2 * later)),
    "zb_h1": PeriodicOrder(_in_turn(1, lambda later, microbatches: later, lambda rank: rank)),
    "zb_h2": PeriodicOrder(_in_turn(1, lambda later, microbatches: 2 * later, lambda rank: 2 * rank), _filled),
    "interleaved": PeriodicOrder(_in_turn(2, lambda later, size: 2 * later + size), _whole_rounds, 2),
    "kimi_k2": PeriodicOrder(_in_turn(2, lambda later, size: 2 * later + size + 1), _whole_rounds, 2),
    "interleaved_zb": PeriodicOrder(_in_turn(2, lambda later, size: later + size, lambda rank: rank), _whole_rounds, 2),
    "group_interleaved": PeriodicOrder(_in_turn(2, lambda later, size: later + size, lambda rank: 0), _whole_rounds, 2),
    "zbv": PeriodicOrder(_zbv, _filled, 2),
    "dualpipe": PeriodicOrder(_dualpipe),
}
"""Held to the programs of the schedules themselves, cell by cell, by property_tests/test_periodic_laws.py."""
