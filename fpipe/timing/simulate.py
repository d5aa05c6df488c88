"""Read a program as time: when does each op start, what waits, and how much is held."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from fpipe.limits import whole
from fpipe.program import Program, building, the_program
from fpipe.timing.cluster import Cluster
from fpipe.timing.columns import OpGroups, is_plain, op_groups, walk_plain
from fpipe.timing.costs import Costs, Messages, the_costs
from fpipe.timing.lanes import as_before, posts_ahead, program_of_lanes, run_lanes, walk
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
        known = op_groups(program.ops)
        if iterations == 1 and is_plain(known, costs):
            return _plainly(program, costs, known)
        return _by_lanes(program, costs, known, iterations)


def _plainly(program: Program, costs: Costs, known: OpGroups) -> Timeline:
    """Where nothing but the main lanes matters."""
    transfer = costs.transfer
    assert isinstance(transfer, int | float)
    starts, ends = walk_plain(program, costs, transfer, known)
    peaks = units_held(program, starts, ends, lambda: next(walk(program, costs)).transfers, known)
    return Timeline(program.ops, tuple(starts), tuple(ends), program.ranks, *peaks, program=program, costs=costs)


def _by_lanes(program: Program, costs: Costs, known: OpGroups, iterations: int) -> Timeline:
    """Everything else."""
    whole = program_of_lanes(program, costs)
    in_whole = list(run_lanes(whole, costs, iterations, posts_ahead(program)))
    rounds = [as_before(program, whole, made) for made in in_whole]
    steps = None
    if costs.bytes is not None:
        peak, steps = bytes_held(whole, costs.storages, in_whole[0].starts, in_whole[0].ends)
        peaks = peak, peak
    else:
        peaks = units_held(program, rounds[0].starts, rounds[0].ends, lambda: rounds[0].transfers, known)
    starts = tuple(chain.from_iterable(made.starts for made in rounds))
    ends = tuple(chain.from_iterable(made.ends for made in rounds))
    moved = tuple(tuple(made.transfers) for made in rounds)
    more = (iterations, program, costs, moved, steps, rounds[-1].results)
    return Timeline(program.ops * iterations, starts, ends, program.ranks, *peaks, *more)
