"""Clusters are parsed from text; links and speeds equal costs, except that shared links queue transfers."""

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
def test_links_and_speeds_equal_costs_of_transfers_and_stages(
    name: str, size: tuple[int, int], numbers: list[float], speed: list[float]
):
    program = fpipe.schedules.about(name).program(4, 8)
    inside, across = Link(numbers[0], 1 / numbers[1], False), Link(numbers[2], 1 / numbers[3], False)
    cluster = fpipe.Cluster(*size, inside, across, tuple(speed), (float("inf"),) * 4)

    def link(source: int, target: int) -> Link:
        return inside if source // size[1] == target // size[1] else across

    parts = COSTS.forward, COSTS.backward_input, [COSTS.backward_weight] * 4
    stage_costs = [[seconds / rank_speed for seconds, rank_speed in zip(part, speed, strict=True)] for part in parts]  # type: ignore[arg-type]
    links: dict[str, Any] = {
        "transfer": lambda a, b: link(a, b).latency,
        "bandwidth": lambda a, b: link(a, b).bandwidth,
    }
    cluster_timeline, costs_timeline = (
        fpipe.simulate(program, COSTS, cluster=cluster),
        fpipe.simulate(program, fpipe.Costs(*stage_costs, bytes=COSTS.bytes, **links)),
    )
    assert (cluster_timeline.ends, cluster_timeline.peak) == (pytest.approx(costs_timeline.ends), costs_timeline.peak)
    assert [transfer[:3] for transfer in cluster_timeline.transfers] == [
        transfer[:3] for transfer in costs_timeline.transfers
    ]


@given(
    st.sampled_from(["one_f_one_b", "zb_h1", "gpipe", "zbv", "interleaved", "eager_1f1b"]),
    st.sampled_from([(2, 2), (4, 1)]),
    st.sampled_from([0.013, 0.11, 0.737, 2.9]),
    st.sampled_from([0, 0.3]),
)
def test_shared_links_carry_transfers_in_order_of_request(
    name: str, size: tuple[int, int], seconds: float, latency: float
):
    program = fpipe.schedules.about(name).program(4, 8)
    cluster = fpipe.Cluster(
        *size, Link(0, math.inf, False), Link(latency, 1 / seconds, True), (1.0,) * 4, (math.inf,) * 4
    )
    costs = fpipe.Costs(1.03, 1.31, 0.9, bytes=COSTS.bytes)
    timeline = fpipe.simulate(program, costs, cluster=cluster)
    written_at = {value: end for op, _, end in timeline.events for value in op.writes}
    queues: dict[tuple[int, int], list[tuple[float, float, float]]] = {}
    for value, source, target, start, end in timeline.transfers:
        hosts = source // size[1], target // size[1]
        if hosts[0] != hosts[1] and value.name in SIZES:
            queues.setdefault(hosts, []).append((start, written_at[value], end))
            assert end - start == pytest.approx(SIZES[value.name] * seconds + latency)
    for link_transfers in queues.values():
        free_at = 0.0
        for start, requested, end in sorted(link_transfers):
            assert start == pytest.approx(max(free_at, requested))
            free_at = end - latency
        assert [requested for _, requested, _ in sorted(link_transfers)] == sorted(
            requested for _, requested, _ in link_transfers
        )


@given(
    st.sampled_from(["one_f_one_b", "zb_h1", "zbv", "interleaved"]),
    st.sampled_from([fpipe.data_parallel(), *(fpipe.shard(gather=gather) for gather in ("step", "run", "use"))]),
    st.integers(1, 5),
    st.sampled_from([0.0, 0.3]),
    st.sampled_from([0.0, 1.5]),
)
def test_ring_bytes_equal_seconds_of_collectives(
    name: str, collectives: Any, replicas: int, latency: float, fixed: float
):
    """A ring passes n - 1 of n parts, twice for a REDUCE; summing a single number takes latencies alone."""
    program = collectives(fpipe.schedules.about(name).program(2, 4))
    costs = fpipe.Costs(1.03, 1.31, 0.9, bytes=lambda value: {"params": 6, "loss": 0}.get(value.name, 9))
    cluster = fpipe.Cluster.parse(f"2 ranks; replicas {replicas} {latency * 1000:g}ms 3B/s")
    # Parameters of 6 bytes and gradients of 9 take 2 and 3 seconds at 3 B/s.
    latency_seconds = (replicas - 1) * latency
    share = (replicas - 1) / replicas
    seconds_by_kind = {
        "gather": latency_seconds + share * 2,
        "scatter": latency_seconds + share * 3,
        "reduce": 2 * (latency_seconds + share * 3),
    }
    cluster_costs = replace(costs, gather=fixed, scatter=fixed, reduce=fixed, cluster=cluster)
    exchanges = [op for op in program.ops if op.kind.lower() in seconds_by_kind and op.reads[0].name != "loss"]
    assert [cluster_costs.seconds(op) for op in exchanges] == pytest.approx(
        [fixed + seconds_by_kind[op.kind.lower()] for op in exchanges]
    )
    ring_without_bandwidth = fpipe.Cluster.parse(f"2 ranks; replicas {replicas} {latency * 1000:g}ms")
    seconds_on_ring = {
        kind: fixed + seconds - latency_seconds * (1 + (kind == "reduce")) for kind, seconds in seconds_by_kind.items()
    }
    explicit_costs = replace(costs, **seconds_on_ring, cluster=ring_without_bandwidth)
    cluster_timeline, explicit_timeline = (
        fpipe.simulate(program, variant) for variant in (cluster_costs, explicit_costs)
    )
    assert cluster_timeline.starts == pytest.approx(explicit_timeline.starts)
    assert cluster_timeline.delivered == pytest.approx(explicit_timeline.delivered)
    assert cluster_timeline.delivered >= fpipe.simulate(program, costs).delivered + (replicas > 1) * share


def test_excess_bytes_are_the_peak_beyond_a_ranks_memory():
    program = fpipe.schedules.about("one_f_one_b").program(4, 8)
    costs = fpipe.Costs(bytes=lambda value: 1e9 if value.name in ("y", "dx", "res") else 0)
    cluster = fpipe.Cluster.parse("4 ranks; each rank memory 3GB; rank 2 memory 80GiB speed 1.5")
    assert (cluster.speed, cluster.memory) == ((1, 1, 1.5, 1), (3e9, 3e9, 80 * 2**30, 3e9))
    timeline = fpipe.simulate(program, costs, cluster=cluster)
    assert (
        timeline.excess_bytes
        == {rank: timeline.peak[rank] - 3e9 for rank in (0, 1, 3) if timeline.peak[rank] > 3e9}
        != {}
    )


def simulate_on(text: str) -> fpipe.Timeline:
    return fpipe.simulate(fpipe.schedules.about("one_f_one_b").program(4, 8), cluster=text)


test_invalid_cluster_texts_are_refused_with_their_position = refusals(
    globals(),
    """
simulate_on('')
    ValueError: a cluster says how many ranks it has, as in
simulate_on('4 hosts')
    ValueError: a cluster begins with its sizes, '2 hosts x 4 ranks' or '4 ranks', at '4 hosts' (character 1 of
simulate_on('4 ranks; within 5us')
    ValueError: begins with inside, between, replicas, rank, ranks or each, at 'within 5us' (character 10
simulate_on('4 ranks; inside 5')
    ValueError: expected a latency (5us), a bandwidth (200GB/s) in ns, us, ms, s, at '5' (character 17
simulate_on('4 ranks; inside 5us 6us')
    ValueError: a second latency of one link, at '6us' (character 21 of the text)
simulate_on('4 ranks; inside 5us 2Gb/s')
    ValueError: in B, KB, KiB, MB, MiB, GB, GiB, TB, TiB, at '2Gb/s' (character 21
simulate_on('4 ranks; inside 5us shared')
    ValueError: a shared link has a bandwidth that transfers wait for
simulate_on('4 ranks; rank 4 speed 1')
    ValueError: ranks are 0..3, one (3) or several (0-3), at '4' (character 15
simulate_on('4 ranks; rank 3 speed')
    ValueError: ranks have a speed, a memory or both, as in
simulate_on('4 ranks; rank 3 speed 0')
    ValueError: a speed is more than 0, at '0' (character 23
simulate_on('4 ranks; inside 1us; inside 2us')
    ValueError: inside is said twice, at 'inside 2us' (character 22
simulate_on('4 ranks; replicas 0 1us')
    ValueError: replicas are a number, at least 1, as in 'replicas 4 20us 25GB/s', at 'replicas 0 1us'
simulate_on('4 ranks; replicas 2')
    ValueError: a link has latency (5us), bandwidth (200GB/s) or both, at 'replicas 2'
simulate_on('4 ranks; replicas 2 1GB/s shared')
    ValueError: replicas have links of their own, which are not shared
simulate_on('4 ranks; replicas 2 1GB/s')
    ValueError: a cluster's bandwidths need bytes of values: say Costs(bytes=...).
simulate_on('2 ranks')
    ValueError: the program has 4 ranks, and the cluster 2.
fpipe.Costs(cluster=4)
    TypeError: a cluster is an fpipe.Cluster or its text, found 4.
""",
)


def test_search_on_a_cluster_beats_named_schedules():
    """Its makespan equals `simulate`, with queues of links and slow ranks."""
    sizes = {"y": 1.0, "dx": 1.0, "res": 10.0, "wres": 5.0}
    text = "2 hosts x 2 ranks; inside 1s 2B/s; between 2s 1B/s shared; rank 3 speed 0.5"
    costs = fpipe.Costs(5, 6, 4, bytes=lambda value: sizes.get(value.name, 0.0), cluster=text)  # type: ignore[arg-type]
    search_result = fpipe.search(4, costs, ranks=4, microbatches=6, seconds=0.1, solver="local", memory_cap=55)
    assert search_result.timeline.makespan == fpipe.simulate(search_result.program, costs).makespan
    assert search_result.bound <= search_result.timeline.makespan <= search_result.beat[1]  # type: ignore[index]
    named = fpipe.schedules.about("one_f_one_b").program(4, 6)
    row = next(row for row in search_result.named if row.name == "one_f_one_b")
    expected = fpipe.simulate(named, replace(costs, cluster=None), cluster=text).makespan
    assert row.makespan <= fpipe.simulate(named, costs).makespan == expected  # a search may split its backwards


def test_search_bounds_count_rank_speeds_once():
    """Used to count speeds twice if backwards may be split, so the bound was above the makespan."""
    options: dict[str, Any] = {"ranks": 3, "microbatches": 5, "placement": "linear", "memory_cap": 2, "seconds": 0.04}
    slow_costs = fpipe.Costs(5, 6, 4, backward=8, cluster="3 ranks; each rank speed 0.5")
    slow_result = fpipe.search(3, slow_costs, solver="local", **options)
    long_result = fpipe.search(3, fpipe.Costs(10, 12, 8, backward=16), solver="local", **options)
    assert slow_result.bound == long_result.bound <= slow_result.timeline.makespan
