"""Clusters: read from a text; their links and speeds are costs, but that a shared link has a queue."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fpipe
from fpipe.timing.cluster import Link
from tests.refusals import refusals

SIZES = {"y": 3.0, "dx": 2.0}
COSTS = fpipe.Costs([1.03, 2.11, 1.57, 0.71], [1.31, 0.57, 2.03, 1.13], 0.9, bytes=lambda v: SIZES.get(v.name, 0))


@given(
    st.sampled_from(["one_f_one_b", "zb_h1", "gpipe", "eager_1f1b", "bpipe"]),
    st.sampled_from([(2, 2), (4, 1), (1, 4)]),
    st.lists(st.sampled_from([0.013, 0.11, 0.737, 2.9]), min_size=4, max_size=4),
    st.lists(st.sampled_from([1.0, 0.83, 1.7]), min_size=4, max_size=4),
)
def test_links_and_speeds_are_costs_of_links_and_stages(
    name: str, size: tuple[int, int], numbers: list[float], speed: list[float]
):
    program = fpipe.schedules.about(name).program(4, 8)
    inside, between = Link(numbers[0], 1 / numbers[1], False), Link(numbers[2], 1 / numbers[3], False)
    cluster = fpipe.Cluster(*size, inside, between, tuple(speed), (float("inf"),) * 4)

    def link(source: int, target: int) -> Link:
        return inside if source // size[1] == target // size[1] else between

    parts = COSTS.forward, COSTS.backward_input, [COSTS.backward_weight] * 4
    slowed = [[seconds / by for seconds, by in zip(part, speed, strict=True)] for part in parts]  # type: ignore[arg-type]
    ways: dict[str, Any] = {"transfer": lambda a, b: link(a, b).latency, "bandwidth": lambda a, b: link(a, b).bandwidth}
    one, other = (
        fpipe.simulate(program, COSTS, cluster=cluster),
        fpipe.simulate(program, fpipe.Costs(*slowed, bytes=COSTS.bytes, **ways)),
    )
    assert (one.ends, one.peak) == (pytest.approx(other.ends), other.peak)
    assert [trip[:3] for trip in one.transfers] == [trip[:3] for trip in other.transfers]


@given(
    st.sampled_from(["one_f_one_b", "zb_h1", "gpipe", "zbv", "interleaved", "eager_1f1b"]),
    st.sampled_from([(2, 2), (4, 1)]),
    st.sampled_from([0.013, 0.11, 0.737, 2.9]),
    st.sampled_from([0, 0.3]),
)
def test_a_shared_link_carries_what_is_asked_first_as_soon_as_it_is_free(
    name: str, size: tuple[int, int], seconds: float, latency: float
):
    program = fpipe.schedules.about(name).program(4, 8)
    cluster = fpipe.Cluster(
        *size, Link(0, math.inf, False), Link(latency, 1 / seconds, True), (1.0,) * 4, (math.inf,) * 4
    )
    costs = fpipe.Costs(1.03, 1.31, 0.9, bytes=COSTS.bytes)
    told = fpipe.simulate(program, costs, cluster=cluster)
    made = {value: end for op, _, end in told.events for value in op.writes}
    queues: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for value, source, target, start, end in told.transfers:
        hosts = source // size[1], target // size[1]
        if hosts[0] != hosts[1] and value.name in SIZES:
            queues.setdefault(hosts, []).append((start, made[value], end))
            assert end - start == pytest.approx(SIZES[value.name] * seconds + latency)
    for row in queues.values():
        free = 0.0
        for start, asked, end in sorted(row):
            assert start == pytest.approx(max(free, asked))
            free = end - latency
        assert [asked for _, asked, _ in sorted(row)] == sorted(asked for _, asked, _ in row)


@given(
    st.sampled_from(["one_f_one_b", "zb_h1", "zbv", "interleaved"]),
    st.sampled_from([fpipe.data_parallel(), *(fpipe.shard(gather=gather) for gather in ("step", "run", "use"))]),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 1.5]),
)
def test_bytes_around_the_ring_of_replicas_are_seconds_of_collectives(
    name: str, last: Any, replicas: int, latency: float, fixed: float
):
    """A replica hands on n - 1 of n parts, twice for a REDUCE; other clocks see what seconds of each kind would do. The
    sum of a number takes latencies alone."""
    program = last(fpipe.schedules.about(name).program(2, 4))
    known = fpipe.Costs(1.03, 1.31, 0.9, bytes=lambda value: {"params": 6, "loss": 0}.get(value.name, 9))
    cluster = fpipe.Cluster.parse(f"2 ranks; replicas {replicas} {latency * 1000:g}ms 3B/s")
    once = (replicas - 1) * latency
    part = (replicas - 1) / replicas
    said = {"gather": once + part * 2, "scatter": once + part * 3, "reduce": 2 * (once + part * 3)}
    own = replace(known, gather=fixed, scatter=fixed, reduce=fixed, cluster=cluster)
    exchanges = [op for op in program.ops if op.kind.lower() in said and op.reads[0].name != "loss"]
    assert [own.seconds(op) for op in exchanges] == pytest.approx([fixed + said[op.kind.lower()] for op in exchanges])
    ring = fpipe.Cluster.parse(f"2 ranks; replicas {replicas} {latency * 1000:g}ms")
    after = {word: fixed + seconds - once * (1 + (word == "reduce")) for word, seconds in said.items()}
    other = replace(known, **after, cluster=ring)
    around, told = (fpipe.simulate(program, costs) for costs in (own, other))
    assert around.starts == pytest.approx(told.starts)
    assert around.delivered == pytest.approx(told.delivered)
    assert around.delivered >= fpipe.simulate(program, known).delivered + (replicas > 1) * part


def test_a_rank_lacks_what_it_holds_beyond_its_memory():
    program = fpipe.schedules.about("one_f_one_b").program(4, 8)
    costs = fpipe.Costs(bytes=lambda value: 1e9 if value.name in ("y", "dx", "res") else 0)
    found = fpipe.Cluster.parse("4 ranks; each rank memory 3GB; rank 2 memory 80GiB speed 1.5")
    assert (found.speed, found.memory) == ((1, 1, 1.5, 1), (3e9, 3e9, 80 * 2**30, 3e9))
    held = fpipe.simulate(program, costs, cluster=found)
    assert held.lacking == {rank: held.peak[rank] - 3e9 for rank in (0, 1, 3) if held.peak[rank] > 3e9} != {}


def on(text: str) -> fpipe.Timeline:
    return fpipe.simulate(fpipe.schedules.about("one_f_one_b").program(4, 8), cluster=text)


test_a_text_that_is_none_is_refused_with_its_place = refusals(
    globals(),
    """
on('')
    ValueError: a cluster says how many ranks it has, as in
on('4 hosts')
    ValueError: a cluster begins with its sizes, '2 hosts x 4 ranks' or '4 ranks', at '4 hosts' (character 1 of
on('4 ranks; within 5us')
    ValueError: begins with inside, between, replicas, rank, ranks or each, at 'within 5us' (character 10
on('4 ranks; inside 5')
    ValueError: expected a latency (5us), a bandwidth (200GB/s) in ns, us, ms, s, at '5' (character 17
on('4 ranks; inside 5us 6us')
    ValueError: a second latency of one link, at '6us' (character 21 of the text)
on('4 ranks; inside 5us 2Gb/s')
    ValueError: in B, KB, KiB, MB, MiB, GB, GiB, TB, TiB, at '2Gb/s' (character 21
on('4 ranks; inside 5us shared')
    ValueError: a shared link has a bandwidth, for which its transfers wait
on('4 ranks; rank 4 speed 1')
    ValueError: ranks are 0..3, one (3) or several (0-3), at '4' (character 15
on('4 ranks; rank 3 speed')
    ValueError: ranks have a speed, a memory or both, as in
on('4 ranks; rank 3 speed 0')
    ValueError: a speed is more than 0, at '0' (character 23
on('4 ranks; inside 1us; inside 2us')
    ValueError: inside is said twice, at 'inside 2us' (character 22
on('4 ranks; replicas 0 1us')
    ValueError: replicas are a number, at least 1, as in 'replicas 4 20us 25GB/s', at 'replicas 0 1us'
on('4 ranks; replicas 2')
    ValueError: a link has a latency (5us), a bandwidth (200GB/s) or both, at 'replicas 2'
on('4 ranks; replicas 2 1GB/s shared')
    ValueError: replicas have links of their own, which are not shared
on('4 ranks; replicas 2 1GB/s')
    ValueError: a cluster's bandwidths need bytes of values: say Costs(bytes=...).
on('2 ranks')
    ValueError: the program has 4 ranks, and the cluster 2.
fpipe.Costs(cluster=4)
    TypeError: a cluster is an fpipe.Cluster or its text, found 4.
""",
)


def test_a_search_on_a_cluster_is_never_beaten_by_a_name():
    """What it finds is what `simulate` says of it, links that queue and slow ranks too."""
    sizes = {"y": 1.0, "dx": 1.0, "res": 10.0, "wres": 5.0}
    text = "2 hosts x 2 ranks; inside 1s 2B/s; between 2s 1B/s shared; rank 3 speed 0.5"
    costs = fpipe.Costs(5, 6, 4, bytes=lambda value: sizes.get(value.name, 0.0), cluster=text)  # type: ignore[arg-type]
    found = fpipe.search(4, costs, ranks=4, microbatches=6, seconds=0.1, solver="local", memory_cap=55)
    assert found.timeline.makespan == fpipe.simulate(found.program, costs).makespan
    assert found.bound <= found.timeline.makespan <= found.beat[1]  # type: ignore[index]
    named = fpipe.schedules.about("one_f_one_b").program(4, 6)
    row = next(row for row in found.named if row.name == "one_f_one_b")
    told = fpipe.simulate(named, replace(costs, cluster=None), cluster=text).makespan
    assert row.makespan <= fpipe.simulate(named, costs).makespan == told  # a search may split its backwards


def test_slow_ranks_are_slow_once_in_the_bound_of_a_search():
    """A rank's speed counted twice where halves may be chosen: the bound was above the makespan, and a false proof."""
    words: dict[str, Any] = {"ranks": 3, "microbatches": 5, "placement": "linear", "memory_cap": 2, "seconds": 0.04}
    slow = fpipe.Costs(5, 6, 4, backward=8, cluster="3 ranks; each rank speed 0.5")
    found = fpipe.search(3, slow, solver="local", **words)
    other = fpipe.search(3, fpipe.Costs(10, 12, 8, backward=16), solver="local", **words)
    assert found.bound == other.bound <= found.timeline.makespan
