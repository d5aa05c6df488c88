"""Simulate a program under costs: when each op runs, and how much each rank holds.

    program, costs --> only main lanes matter?  yes --> main_lane_times      0.5 us an op
                                                no  --> lanes.run_lanes      lanes, links, queues, several iterations

`lanes.py` is the definition, and looks at each read and notes each transfer. `main_lane_times` looks facts up once for
each of a few thousand groups of ops, and takes 1/11 to 1/17 of the time (26,000 ops): less than a second for a million
ops, in place of 5 s. Both give the same times, which property_tests/test_time_laws.py compares.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

from fpipe.limits import check_whole_number
from fpipe.program import Program, building, lane_of
from fpipe.timing.amounts import has_varying_cost
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs, Messages, checked_costs
from fpipe.timing.lanes import (
    OpGroups,
    group_ops,
    is_work,
    posts_receives_ahead,
    run_lanes,
    simulate_iterations,
    times_of_program,
    with_timed_transfers,
)
from fpipe.timing.lengths import CostsOfLengths, costs_at_lengths
from fpipe.timing.memory import bytes_held, microbatches_held
from fpipe.timing.timeline import Timeline


def simulate(
    program: Program,
    costs: Costs | CostsOfLengths | None = None,
    *,
    lengths: Sequence[float] | None = None,
    iterations: int = 1,
    cluster: Cluster | str | None = None,
    messages: Messages | None = None,
) -> Timeline:
    """Simulate a program: each rank runs its ops in order, each as soon as all its reads have arrived.

    Args:
        program: any program; transfers need not be ops: a value read on another rank travels there by itself, once.
        costs: seconds per op; by default one for each F, I, W and R, and so two for B.
        lengths: of the microbatches, one for each, of costs that `fpipe.fit_lengths` made.
        iterations: how many training steps in a row. A rank goes on with the next one when it is done with its part of
            this one, and a stage's parameters are new when its gradient is there, so that `Timeline.steady` is less
            than the makespan of one step where the end of one overlaps with the start of the next.
        cluster: what it runs on, a `Cluster` or its text: links, and the speed of ranks, in place of `Costs(transfer=,
            bandwidth=)`. One with shared links is simulated for one iteration.
        messages: in place of `Costs(messages=)`. "eager" (the default) as buffered sends, gloo's among them;
            "rendezvous" as `torch.distributed.send` of what no buffer holds; "nccl" as one communicator of all ranks
            does, in which what is queued first holds up what follows, whoever the other rank is (`batch_isend_irecv`);
            "nccl_pairs" as one for each two ranks, made at its first use (`isend`, `irecv`); "nccl_directions" as one
            for each direction, which is what `build` makes on NCCL. Ranks come to SENDs and RECVs as the program has
            them; where it has none, to RECVs in the order of the SENDs of all ranks, as what `build` makes does.

    Returns:
        A `Timeline`.

    Raises:
        ValueError: a cost that is missing: of a stage, a link, a kind of op, or the bytes of a value that travels; a
            cluster that cannot be read or has too few ranks, or shares links under a rule of messages.
        ProgramError: under this rule of messages ranks wait for one another.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.one_f_one_b(2))(fpipe.program(2))
    >>> timeline = fpipe.simulate(program)
    >>> timeline.makespan, timeline.bubble, timeline.peak
    (15.0, 0.2, (2.0, 1.0))
    >>> [fpipe.simulate(program, fpipe.Costs(transfer=0.5), messages=rule).makespan for rule in ("eager", "nccl")]
    [17.0, 18.0]
    """
    # Options replace fields of costs one by one, so that each new value is checked where it enters.
    if lengths is not None:
        costs = costs_at_lengths(program, costs, lengths)
    costs = checked_costs(costs)
    if cluster is not None:
        costs = replace(costs, cluster=cluster)
    if messages is not None:
        costs = replace(costs, messages=messages)
    costs = checked_costs(costs, program)
    check_whole_number("iterations", iterations)
    if iterations > 1 and costs.cluster is not None and costs.cluster.has_queues:
        raise ValueError(f"shared links are simulated for one iteration, found iterations={iterations}.")
    if costs.messages != "eager" and costs.cluster is not None and costs.cluster.has_queues:
        raise ValueError(f'on shared links messages are "eager"; found messages={costs.messages!r}.')
    with building():
        groups = group_ops(program.ops)
        if iterations == 1 and needs_only_main_lanes(groups, costs):
            return _simulate_main_lanes(program, costs, groups)
        return _simulate_lanes(program, costs, groups, iterations)


def needs_only_main_lanes(groups: OpGroups, costs: Costs) -> bool:
    """Whether only main lanes and one latency for all links matter, and all ops of a group cost the same."""
    # A bandwidth needs no check of its own: it comes with bytes.
    has_one_latency = isinstance(costs.transfer, int | float) and costs.cluster is None
    is_plain = not (costs.occupies_ranks or costs.vary_by_microbatch) and costs.bytes is None
    is_alike = all(lane_of(op) == "main" and not has_varying_cost(op.kind) for op in groups.samples)
    return has_one_latency and is_plain and is_alike


def _simulate_main_lanes(program: Program, costs: Costs, groups: OpGroups) -> Timeline:
    transfer = costs.transfer
    assert isinstance(transfer, int | float)
    starts, ends = main_lane_times(program, costs, transfer, groups)
    # Transfers are only needed, and so only simulated, where residuals leave their rank.
    peaks = microbatches_held(
        program, starts, ends, lambda: next(simulate_iterations(program, costs)).transfers, groups
    )
    return Timeline(program.ops, tuple(starts), tuple(ends), program.ranks, *peaks, program=program, costs=costs)


def _simulate_lanes(program: Program, costs: Costs, groups: OpGroups, iterations: int) -> Timeline:
    """Simulate transfers, shared links and copy lanes, which the fast path cannot."""
    timed_program = with_timed_transfers(program, costs)
    timed_rounds = list(run_lanes(timed_program, costs, iterations, posts_receives_ahead(program)))
    rounds = [times_of_program(program, timed_program, iteration) for iteration in timed_rounds]
    # Memory is that of the first iteration. Bytes count copies that are in transit too, so they need the transfers.
    changes = None
    if costs.bytes is not None:
        starts, ends = timed_rounds[0].starts, timed_rounds[0].ends
        peak, changes = bytes_held(timed_program, costs.storages, costs.hoisted_values, starts, ends)
        peaks = peak, peak
    else:
        peaks = microbatches_held(program, rounds[0].starts, rounds[0].ends, lambda: rounds[0].transfers, groups)
    starts = tuple(chain.from_iterable(iteration.starts for iteration in rounds))
    ends = tuple(chain.from_iterable(iteration.ends for iteration in rounds))
    transfers = tuple(tuple(iteration.transfers) for iteration in rounds)
    optional_fields = (iterations, program, costs, transfers, changes, rounds[-1].results)
    return Timeline(program.ops * iterations, starts, ends, program.ranks, *peaks, *optional_fields)


def main_lane_times(
    program: Program, costs: Costs, transfer: float, groups: OpGroups
) -> tuple[list[float], list[float]]:
    """Return the starts and ends of ops where only main lanes matter: `needs_only_main_lanes`.

    One pass down the list is enough: an op starts when its lane is free and the last value that it reads has arrived.
    """
    # 1. Spread the facts of groups over ops. Lane -1 is that of ops that occupy no lane.
    ops, group_seconds = program.ops, [costs.seconds(op) for op in groups.samples]
    seconds, ranks = groups.spread(group_seconds), groups.spread(op.rank for op in groups.samples)
    pairs = zip(groups.samples, group_seconds, strict=True)
    lanes = groups.spread(op.rank if is_work(op, cost) else -1 for op, cost in pairs)
    free_at = [0.0] * program.ranks
    starts: list[float] = []
    ends = [0.0] * (len(ops) + 1)  # inputs have position -1, and so the last of these ends
    append_start = starts.append
    rows = enumerate(zip(program.sources, lanes, seconds, strict=True))
    # 2. Walk the list. The loops use locals and no `max`, and one without latency stands apart: this is the hot path.
    if not transfer:
        for position, (sources, lane, cost) in rows:
            start = free_at[lane] if lane >= 0 else 0.0
            for source in sources:
                ready = ends[source]
                if ready > start:
                    start = ready
            append_start(start)
            ends[position] = end = start + cost
            if lane >= 0:
                free_at[lane] = end
    else:
        homes_by_input = {end.value: end.homes for end in program.inputs if len(end.homes) < program.ranks}
        for position, (sources, lane, cost) in rows:
            rank = ranks[position]
            start = free_at[lane] if lane >= 0 else 0.0
            for source in sources:
                ready = ends[source]
                if source >= 0 and ranks[source] != rank:
                    ready += transfer
                if ready > start:
                    start = ready
            # An input that is not at home on this rank arrives after one latency; index 5 of an op is its reads.
            if start < transfer and any(rank not in homes_by_input.get(value, (rank,)) for value in ops[position][5]):
                start = transfer
            append_start(start)
            ends[position] = end = start + cost
            if lane >= 0:
                free_at[lane] = end
    ends.pop()
    return starts, ends
