"""Clusters: read from a text, and simulated as a small event simulation written here says."""

from __future__ import annotations

import heapq
import itertools
import re
from collections import deque
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.timing.cluster import Link

SIZES = {"y": 3.0, "dx": 2.0}
COSTS = fpipe.Costs([1.03, 2.11, 1.57, 0.71], [1.31, 0.57, 2.03, 1.13], 0.9, bytes=lambda v: SIZES.get(v.name, 0))


def by_events(program: fpipe.Program, costs: Any, cluster: fpipe.Cluster) -> tuple[dict[str, float], list[Any]]:
    """When each cell ends and each transfer asks, leaves and arrives: one event after the other, for a chain."""
    rows = [deque(row) for row in program.table()]
    rank_of = {cell: rank for rank, row in enumerate(program.table()) for cell in row}
    wires: dict[Any, deque[Any]] = {}
    busy: set[Any] = set()
    have: list[set[str]] = [set() for _ in rows]
    running, ends, moved = [False] * len(rows), dict[str, float](), list[Any]()
    events: list[Any] = []
    number = itertools.count()

    def at(time: float, act: Any) -> None:
        heapq.heappush(events, (time, next(number), act))

    def try_rank(rank: int, now: float) -> None:
        if running[rank] or not rows[rank]:
            return
        stage, kind, index = re.fullmatch(r"(\d+)(\w)(\d+)", rows[rank][0]).groups()  # type: ignore[union-attr]
        before, last = int(stage) + (-1 if kind == "F" else 1), program.stages
        needs = f"{'y' if kind == 'F' else 'dx'}{before}.{index}"
        if kind != "W" and 0 <= before < last and needs not in have[rank]:
            return
        cell = rows[rank].popleft()
        running[rank] = True
        took = {
            "F": costs.forward[int(stage)],
            "B": costs.backward_input[int(stage)] + costs.backward_weight,
            "I": costs.backward_input[int(stage)],
            "W": costs.backward_weight,
        }[kind]
        at(now + took / cluster.speed[rank], lambda now: done(rank, cell, stage, kind, index, now))

    def done(rank: int, cell: str, stage: str, kind: str, index: str, now: float) -> None:
        running[rank], ends[cell] = False, now
        if kind != "W":
            name = "y" if kind == "F" else "dx"
            after = int(stage) + (1 if kind == "F" else -1)
            target = next((where for other, where in rank_of.items() if re.match(rf"{after}[{kind}]", other)), rank)
            if target == rank:
                have[rank].add(f"{name}{stage}.{index}")
            else:
                shared = cluster.link(rank, target).shared
                wire = (rank // cluster.ranks, target // cluster.ranks, "hosts") if shared else (rank, target)
                wires.setdefault(wire, deque()).append((name, stage, index, rank, target))
                serve(wire, now)
        try_rank(rank, now)

    def serve(wire: Any, now: float) -> None:
        if wire in busy or not wires[wire]:
            return
        name, stage, index, source, target = wires[wire].popleft()
        link = cluster.link(source, target)
        taken = SIZES[name] / link.bandwidth
        busy.add(wire)

        def released(now: float) -> None:
            busy.discard(wire)
            serve(wire, now)

        def arrived(now: float) -> None:
            have[target].add(f"{name}{stage}.{index}")
            try_rank(target, now)

        moved.append((name, int(stage), int(index), source, target, now))
        at(now + taken, released)
        at(now + taken + link.latency, arrived)

    for rank in range(len(rows)):
        at(0.0, lambda now, rank=rank: try_rank(rank, now))
    while events:
        now, _, act = heapq.heappop(events)
        act(now)
    return ends, moved


@given(
    st.sampled_from(["one_f_one_b", "zb_h1", "gpipe", "zbv", "interleaved", "eager_1f1b"]),
    st.sampled_from([(2, 2), (4, 1), (1, 4)]),
    st.lists(st.sampled_from([0.013, 0.11, 0.737, 2.9]), min_size=4, max_size=4),
    st.tuples(st.booleans(), st.booleans()),
    st.lists(st.sampled_from([1.0, 0.83, 1.7]), min_size=4, max_size=4),
)
def test_times_are_those_of_an_event_simulation(
    name: str, size: tuple[int, int], numbers: list[float], shared: tuple[bool, bool], speed: list[float]
):
    known = fpipe.schedules.about(name)
    program = known.program(4, 8, known.wants(4, {}))
    links = Link(numbers[0], 1 / numbers[1], shared[0]), Link(numbers[2], 1 / numbers[3], shared[1])
    cluster = fpipe.Cluster(*size, *links, tuple(speed), (float("inf"),) * 4)
    costs = replace(COSTS, forward=[1.03, 2.11, 1.57, 0.71] * 2, backward_input=[1.31, 0.57, 2.03, 1.13] * 2)
    told = fpipe.simulate(program, costs, cluster=cluster)
    ends, moved = by_events(program, costs, cluster)
    assert {op.cell: end for op, _, end in told.events if op.kind in "FBIW"} == pytest.approx(ends)
    sent = {(v.name, v.stage, v.microbatch, source, to): start for v, source, to, start, _ in told.transfers}
    assert {key: start for key, start in sent.items() if key[0] in SIZES} == pytest.approx(
        {key[:5]: key[5] for key in moved}
    )
    path = told.critical_path
    assert (path[0].start, path[-1].end) == (0, told.makespan)
    assert all(one.end == pytest.approx(other.start) for one, other in itertools.pairwise(path))


@given(st.sampled_from(["one_f_one_b", "zb_h1", "dualpipe", "bpipe"]), st.sampled_from([0, 0.5, 3]))
def test_equal_links_are_a_transfer_and_a_bandwidth(name: str, latency: float):
    program = fpipe.schedules.about(name).program(4, 8)
    flat = Link(latency, 4.0)
    cluster = fpipe.Cluster(2, 2, flat, flat, (1.0,) * 4, (float("inf"),) * 4)
    said = fpipe.Costs(transfer=latency, bandwidth=4.0, bytes=COSTS.bytes)
    one, other = (
        fpipe.simulate(program, replace(COSTS, forward=1, backward_input=1, backward_weight=1), cluster=cluster),
        fpipe.simulate(program, said),
    )
    assert (one.starts, one.ends, one.transfers, one.peak) == (other.starts, other.ends, other.transfers, other.peak)


def test_who_shares_a_link_waits_and_who_is_slow_takes_longer():
    """In 1F1B forwards and backwards travel at once: on one bus they wait for each other."""
    program = fpipe.schedules.about("one_f_one_b").program(4, 8)
    costs = fpipe.Costs(bytes=lambda value: 1e9 if value.name in ("y", "dx", "res") else 0)
    text = "4 ranks; inside 20us 2GB/s"
    alone, shared, slow = (
        fpipe.simulate(program, costs, cluster=text + more).makespan for more in ("", " shared", "; rank 3 speed 0.5")
    )
    assert alone < shared
    assert alone < slow
    found = fpipe.Cluster.parse(text + "; each rank memory 3GB; rank 2 memory 80GiB speed 1.5")
    assert found.speed == (1, 1, 1.5, 1)
    assert found.memory == (3e9, 3e9, 80 * 2**30, 3e9)
    held = fpipe.simulate(program, costs, cluster=found)
    assert held.lacking == {rank: held.peak[rank] - 3e9 for rank in (0, 1, 3) if held.peak[rank] > 3e9} != {}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a cluster says at least how many ranks there are, as in"),
        ("4 hosts", "a cluster begins with its sizes, '2 hosts x 4 ranks' or '4 ranks', at '4 hosts' (character 1 of"),
        ("4 ranks; within 5us", "begins with inside, between, rank, ranks or each, at 'within 5us' (character 10"),
        ("4 ranks; inside 5", "expected a latency (5us), a bandwidth (200GB/s) in ns, us, ms, s, at '5' (character 17"),
        ("4 ranks; inside 5us 6us", "a second latency of one link, at '6us' (character 21 of the text)"),
        ("4 ranks; inside 5us 2Gb/s", "in B, KB, KiB, MB, MiB, GB, GiB, TB, TiB, at '2Gb/s' (character 21"),
        ("4 ranks; inside 5us shared", "a shared link has a bandwidth, for which its transfers wait"),
        ("4 ranks; rank 4 speed 1", "ranks are 0..3, one (3) or several (0-3), at '4' (character 15"),
        ("4 ranks; rank 3 speed", "ranks have a speed, a memory or both, as in"),
        ("4 ranks; rank 3 speed 0", "a speed is more than 0, at '0' (character 23"),
        ("4 ranks; inside 1us; inside 2us", "inside is said twice, at 'inside 2us' (character 22"),
        ("2 ranks", "the program has 4 ranks, and the cluster 2."),
        ("4 ranks; inside 1GB/s", "a cluster's bandwidths need the bytes of values; say Costs(bytes=...) too."),
    ],
)
def test_a_text_that_is_none_is_refused_with_its_place(text: str, expected: str):
    program = fpipe.schedules.about("one_f_one_b").program(4, 8)
    with pytest.raises(ValueError, match=re.escape(expected)):
        fpipe.simulate(program, cluster=text)


def test_what_a_cluster_says_is_not_said_twice():
    program = fpipe.schedules.about("one_f_one_b").program(4, 8)
    with pytest.raises(ValueError, match="leave out transfer= and bandwidth="):
        fpipe.simulate(program, fpipe.Costs(transfer=1), cluster="4 ranks; inside 1us")
    with pytest.raises(ValueError, match="shared links is simulated for one iteration, found iterations=2"):
        fpipe.simulate(program, COSTS, cluster="4 ranks; inside 1GB/s shared", iterations=2)
    with pytest.raises(ValueError, match="a timeline lacks memory on a cluster, in bytes"):
        _ = fpipe.simulate(program).lacking


def test_a_search_on_a_cluster_is_never_beaten_by_a_name():
    """What it finds is what `simulate` says of it, links that queue and slow ranks too."""
    sizes = {"y": 1.0, "dx": 1.0, "res": 10.0, "wres": 5.0}
    text = "2 hosts x 2 ranks; inside 1s 2B/s; between 2s 1B/s shared; rank 3 speed 0.5"
    costs = fpipe.Costs(5, 6, 4, bytes=lambda value: sizes.get(value.name, 0.0), cluster=text)  # type: ignore[arg-type]
    found = fpipe.search(4, costs, ranks=4, microbatches=6, seconds=0.3, solver="local", memory_cap=55)
    assert found.timeline.makespan == fpipe.simulate(found.program, costs).makespan
    assert found.bound <= found.timeline.makespan <= found.beat[1]  # type: ignore[index]
    named = fpipe.schedules.about("one_f_one_b").program(4, 6)
    row = next(row for row in found.named if row.name == "one_f_one_b")
    told = fpipe.simulate(named, replace(costs, cluster=None), cluster=text).makespan
    assert row.makespan <= fpipe.simulate(named, costs).makespan == told  # a search may split its backwards
    with pytest.raises(TypeError, match=re.escape("a cluster is an fpipe.Cluster or its text, found 4.")):
        fpipe.Costs(cluster=4)  # type: ignore[arg-type]


def test_slow_ranks_are_slow_once_in_the_bound_of_a_search():
    """A rank's speed counted twice where halves may be chosen: the bound was above the makespan, and a false proof."""
    words: dict[str, Any] = {"ranks": 3, "microbatches": 5, "placement": "linear", "memory_cap": 2, "seconds": 0.1}
    slow = fpipe.Costs(5, 6, 4, backward=8, cluster="3 ranks; each rank speed 0.5")
    found = fpipe.search(3, slow, solver="local", **words)
    other = fpipe.search(3, fpipe.Costs(10, 12, 8, backward=16), solver="local", **words)
    assert found.bound == other.bound <= found.timeline.makespan
