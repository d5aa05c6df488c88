"""Read a program as time: when does each op start, what waits, and how much is held.

Where nothing but the main lanes matters, `walk_plain` looks facts up once for each of a few thousand groups of ops. It
stands beside `lanes.walk`, which looks at each read and notes each transfer and takes 11-17 times as long (26,000 ops):
a million ops would take 5 s instead of less than one.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from fpipe.limits import whole
from fpipe.program import Program, building, lane_of, the_program
from fpipe.timing.amounts import varies
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs, Messages, the_costs
from fpipe.timing.lanes import OpGroups, as_before, is_work, op_groups, posts_ahead, program_of_lanes, run_lanes, walk
from fpipe.timing.memory import bytes_held, units_held
from fpipe.timing.timeline import Timeline


def simulate(
    program: Program,
    costs: Costs | None = None,
    *,
    iterations: int = 1,
    cluster: Cluster | str | None = None,
    messages: Messages | None = None,
) -> Timeline:
    """Run a program against costs: each rank does its ops in order, each as soon as what it reads is there.

    Args:
        program: any program; transfers need not be ops: a value read on another rank travels there by itself, once.
        costs: seconds per op; by default one for each F, I, W and R, and so two for B.
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
    program = the_program(program)
    costs = the_costs(costs)
    if cluster is not None:
        costs = replace(costs, cluster=cluster)
    if messages is not None:
        costs = replace(costs, messages=messages)
    costs = the_costs(costs, program)
    whole("iterations", iterations)
    if iterations > 1 and costs.cluster is not None and costs.cluster.has_queues:
        raise ValueError(f"a cluster with shared links is simulated for one iteration, found iterations={iterations}.")
    if costs.messages != "eager" and costs.cluster is not None and costs.cluster.has_queues:
        raise ValueError(f'on shared links messages are "eager"; found messages={costs.messages!r}.')
    with building():
        groups = op_groups(program.ops)
        if iterations == 1 and is_plain(groups, costs):
            return _simulate_plain(program, costs, groups)
        return _simulate_lanes(program, costs, groups, iterations)


def is_plain(groups: OpGroups, costs: Costs) -> bool:
    """Whether only main lanes and one latency for all links matter, and all ops of a group cost the same."""
    constant = isinstance(costs.transfer, int | float) and not costs.busies and costs.bytes is None
    constant = constant and costs.cluster is None  # a bandwidth has bytes
    return constant and all(lane_of(op) == "main" and not varies(op.kind) for op in groups.samples)


def _simulate_plain(program: Program, costs: Costs, groups: OpGroups) -> Timeline:
    transfer = costs.transfer
    assert isinstance(transfer, int | float)
    starts, ends = walk_plain(program, costs, transfer, groups)
    peaks = units_held(program, starts, ends, lambda: next(walk(program, costs)).transfers, groups)
    return Timeline(program.ops, tuple(starts), tuple(ends), program.ranks, *peaks, program=program, costs=costs)


def _simulate_lanes(program: Program, costs: Costs, groups: OpGroups, iterations: int) -> Timeline:
    """Simulate transfers, shared links and copy lanes, which the fast path cannot."""
    with_moves = program_of_lanes(program, costs)
    walked = list(run_lanes(with_moves, costs, iterations, posts_ahead(program)))
    rounds = [as_before(program, with_moves, iteration) for iteration in walked]
    steps = None
    if costs.bytes is not None:
        peak, steps = bytes_held(with_moves, costs.storages, walked[0].starts, walked[0].ends)
        peaks = peak, peak
    else:
        peaks = units_held(program, rounds[0].starts, rounds[0].ends, lambda: rounds[0].transfers, groups)
    starts = tuple(chain.from_iterable(iteration.starts for iteration in rounds))
    ends = tuple(chain.from_iterable(iteration.ends for iteration in rounds))
    transfers = tuple(tuple(iteration.transfers) for iteration in rounds)
    more = (iterations, program, costs, transfers, steps, rounds[-1].results)
    return Timeline(program.ops * iterations, starts, ends, program.ranks, *peaks, *more)


def walk_plain(program: Program, costs: Costs, transfer: float, groups: OpGroups) -> tuple[list[float], list[float]]:
    """The starts and ends of ops where `is_plain` says so: what `lanes.walk` gives, in 0.5 us an op."""
    ops, seconds_of_groups = program.ops, [costs.seconds(op) for op in groups.samples]
    seconds, ranks = groups.spread(seconds_of_groups), groups.spread(op.rank for op in groups.samples)
    pairs = zip(groups.samples, seconds_of_groups, strict=True)
    lanes = groups.spread(op.rank if is_work(op, cost) else -1 for op, cost in pairs)
    free = [0.0] * program.ranks
    starts: list[float] = []
    ends = [0.0] * (len(ops) + 1)  # the last is for inputs, which are at -1
    note = starts.append
    rows = enumerate(zip(program.sources, lanes, seconds, strict=True))
    if not transfer:
        for position, (sources, lane, cost) in rows:
            start = free[lane] if lane >= 0 else 0.0
            for source in sources:
                ready = ends[source]
                if ready > start:
                    start = ready
            note(start)
            ends[position] = end = start + cost
            if lane >= 0:
                free[lane] = end
    else:
        homes_of_inputs = {end.value: end.homes for end in program.inputs if len(end.homes) < program.ranks}
        for position, (sources, lane, cost) in rows:
            rank = ranks[position]
            start = free[lane] if lane >= 0 else 0.0
            for source in sources:
                ready = ends[source]
                if source >= 0 and ranks[source] != rank:
                    ready += transfer
                if ready > start:
                    start = ready
            if start < transfer and any(rank not in homes_of_inputs.get(value, (rank,)) for value in ops[position][5]):
                start = transfer
            note(start)
            ends[position] = end = start + cost
            if lane >= 0:
                free[lane] = end
    ends.pop()
    return starts, ends
