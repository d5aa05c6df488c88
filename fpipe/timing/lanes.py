"""Simulate a program with lanes, links and transfers: each rank does its ops in order, each as soon as it can start.

    main   |0F0|0F1|0F2|            |0B0|       F, B, I, W, R: one after the other, in the order of the program
    copy       |OFFLOAD(res)|   |LOAD(res)|     beside it; starts no earlier than the main op before it in the list
    exchange        |1F0|  |1F1|  |1B0|         so do stages that are a collective
    wire            |GATHER(params)|SCATTER|    collectives over replicas: no earlier than that main op ends
    link 0>1   |y[0,0]|y[0,1]|                  what travels from rank 0 to rank 1, one after the other

A SEND and a RECV that take time are on the main lane too; how they wait for each other is said in `messages.py`.

An op that takes no time and that no schedule names (ADD, SPLIT, ..) is on no lane: it is done when its data are there.

This is the definition of the simulated time of any program; `simulate.main_lane_times` equals it where only main lanes
matter, and so does whatever plays an order: property_tests/test_order_laws.py compares them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from heapq import heappop, heappush
from itertools import count, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from fpipe.order import fixed_kinds
from fpipe.program import Op, Program, Value, kind_of, lane_of
from fpipe.timing.amounts import sent_value
from fpipe.timing.costs import Costs
from fpipe.timing.messages import MESSAGE_RULES, order_messages
from fpipe.transforms.communicate import with_adjacent_transfers, with_transfers, without_frees

_Fact = TypeVar("_Fact")


class Transfer(NamedTuple):
    """A value on its way: from which rank to which, and the seconds when it left and arrived."""

    value: Value
    source: int
    target: int
    start: float
    end: float


class Iteration(NamedTuple):
    """One iteration: start and end of every op, what travelled, when each result was at each of its homes."""

    starts: list[float]
    ends: list[float]
    transfers: list[Transfer]
    results: dict[tuple[Value, int], float]


def simulate_iterations(program: Program, costs: Costs, iterations: int = 1) -> Iterator[Iteration]:
    """Simulate iterations in a row, and yield the times of each.

    A rank goes on with the next iteration when it is done with its part of this one; what reads parameters (or the
    state) of a stage waits for the stage's gradient (its new state), which is when they are updated.
    """
    timed_program = with_timed_transfers(program, costs)
    for iteration in run_lanes(timed_program, costs, iterations, posts_receives_ahead(program)):
        yield times_of_program(program, timed_program, iteration)


def run_lanes(program: Program, costs: Costs, iterations: int, receives_are_posted_ahead: bool) -> Iterator[Iteration]:
    """Yield the iterations of a program that `with_timed_transfers` has prepared."""
    lanes = _Lanes(program, costs, receives_are_posted_ahead)
    ready_by_input: dict[Value, float] = {}
    updates = updates_by_input(program)
    for _ in range(iterations):
        iteration = lanes.run(ready_by_input)
        yield iteration
        arrival = iteration.results.__getitem__
        ready_by_input = {value: max(map(arrival, results), default=0.0) for value, results in updates.items()}


def updates_by_input(program: Program) -> dict[Value, list[tuple[Value, int]]]:
    """Map each input that changes between iterations to the results it waits for, with their homes."""
    results: defaultdict[tuple[str, int | None], list[tuple[Value, int]]] = defaultdict(list)
    for output in program.outputs:
        results[output.name.name, output.name.stage] += [(output.value, home) for home in output.homes]
    # An optimizer that is no op of the program updates parameters once their gradients are home.
    awaited_by_input = {"params": "grads", "shard": "grads", "state": "state"}
    inputs = [end.value for end in program.inputs if end.value.name in awaited_by_input]
    return {value: results[awaited_by_input[value.name], value.stage] for value in inputs}


def is_scheduled(kind: str) -> bool:
    """Whether an op of this kind waits for its turn on the main lane, even where it takes no time."""
    op_kind = kind_of(kind)
    return bool(op_kind.time) or op_kind.position == "table"


def is_work(op: Op, seconds: float) -> bool:
    """Whether an op occupies the main lane: a schedule names its kind, or it takes time there."""
    return lane_of(op) == "main" and (is_scheduled(op.kind) or seconds > 0)


class OpGroups(NamedTuple):
    """The number of every op's group, and a sample of each group: ops of one kind, stage, rank, parts and `options`."""

    numbers: list[int]
    samples: list[Op]

    def spread(self, facts: Iterable[_Fact]) -> list[_Fact]:
        """Return a fact for every op, given one for each group."""
        return list(map(list(facts).__getitem__, self.numbers))


def group_ops(ops: Sequence[Op]) -> OpGroups:
    """Group ops that differ only in microbatch, slice, reads and writes.

    A program of a million ops has a few thousand groups. What depends on the group alone, such as seconds and lanes, is
    computed once for each.
    """
    # Iterators in C: ops lie scattered in memory, and a Python loop that looks at each takes 0.1 us an op. The indices
    # are kind, stage, rank, parts and options of an `Op`.
    number_by_facts = defaultdict[Any, int](count().__next__)
    numbers = list(map(number_by_facts.__getitem__, map(itemgetter(0, 1, 4, 7, 8), ops)))
    # Numbers are given in the order of first occurrence, so each search starts where the one before ended.
    samples: list[Op] = []
    position = 0
    for number in range(len(number_by_facts)):
        position = numbers.index(number, position)
        samples.append(ops[position])
    return OpGroups(numbers, samples)


def with_timed_transfers(program: Program, costs: Costs) -> Program:
    """Make transfers ops if their order matters to time or memory, and drop FREE, which takes no time."""
    # Under a rule of messages, ranks that post receives ahead do so in the order of all SENDs: see `messages.py`.
    if costs.messages != "eager":
        sending = with_transfers(program)
        return with_adjacent_transfers(sending) if posts_receives_ahead(program) else sending
    # With bytes there are bandwidths, for which transfers queue on their link, and copies that count as memory.
    if costs.bytes is not None or costs.occupies_ranks:
        return with_transfers(program)
    return without_frees(program)


def posts_receives_ahead(program: Program) -> bool:
    """Whether ranks post receives ahead of their reader, as `build` does for a program without SEND and RECV."""
    return all(op.kind != "SEND" for op in program.ops)


def times_of_program(program: Program, timed_program: Program, iteration: Iteration) -> Iteration:
    """Return the times of a program's ops, given an iteration of its `with_timed_transfers`."""
    if timed_program is program:
        return iteration
    # Each value has one writer, so what an op writes identifies it in both programs, wherever transfers were inserted.
    position_by_writes = {op.writes: position for position, op in enumerate(timed_program.ops)}
    starts: list[float] = []
    ends: list[float] = []
    for op, sources in zip(program.ops, program.sources, strict=True):
        if op.writes in position_by_writes and op.writes:
            position = position_by_writes[op.writes]
            starts.append(iteration.starts[position])
            ends.append(iteration.ends[position])
        else:  # FREE writes nothing, and was dropped: it happens once its values are there
            starts.append(max((ends[source] for source in sources if source >= 0), default=0.0))
            ends.append(starts[-1])
    value_by_name = {output.name: output.value for output in program.outputs}
    pairs = [(output, home) for output in timed_program.outputs for home in output.homes]
    results = {(value_by_name[output.name], home): iteration.results[output.value, home] for output, home in pairs}
    return Iteration(starts, ends, iteration.transfers, results)


class _Lanes:
    """State of all lanes, links and queues: when each is free; one iteration hands it to the next."""

    def __init__(self, program: Program, costs: Costs, receives_are_posted_ahead: bool) -> None:
        self.program, self.costs, self.receives_are_posted_ahead = program, costs, receives_are_posted_ahead
        self.free_at = [0.0] * program.ranks  # of main lanes
        self.last_start = [0.0] * program.ranks  # of the last op on each main lane
        self.lane_free_at: defaultdict[tuple[str, int], float] = defaultdict(float)  # of lanes next to the main one
        self.link_free_at: defaultdict[Hashable, float] = defaultdict(float)
        self.homes_by_input = {end.value: end.homes for end in program.inputs}
        sources, ops = program.sources, program.ops
        self.recv_by_send = {sources[position][0]: position for position, op in enumerate(ops) if op.kind == "RECV"}
        # A table that names SENDs fixes their place among the rank's ops; other SENDs leave as soon as they can.
        self.sends_are_placed = bool(self.recv_by_send) and "SEND" in fixed_kinds(program)
        self.seconds = [costs.seconds(op) for op in program.ops]
        self.rule = MESSAGE_RULES.get(costs.messages)
        self.queue_free_at: defaultdict[tuple[int, Hashable], float] = defaultdict(float)
        self.latency = cache(costs.latency)

    def run(self, inputs_ready: Mapping[Value, float]) -> Iteration:
        """Simulate one iteration; inputs are there at 0, or when `inputs_ready` says."""
        program, free, last_start = self.program, self.free_at, self.last_start
        ops = program.ops
        starts, ends = [0.0] * len(ops), [0.0] * len(ops)
        arrived: dict[tuple[Value, int], float] = {}
        transfers: list[Transfer] = []
        transfer_by_send: dict[int, Transfer] = {}  # by the position of the SEND

        def ready_at(value: Value, source: int, rank: int) -> float:
            """Return when a rank has a value; one that is read elsewhere, without a SEND, travels at its first read."""
            written_at = ends[source] if source >= 0 else inputs_ready.get(value, 0.0)
            homes = (ops[source].rank,) if source >= 0 else self.homes_by_input[value]
            if rank in homes:
                return written_at
            if (value, rank) not in arrived:
                arrived[value, rank] = written_at + self.latency(min(homes), rank)
                transfers.append(Transfer(value, min(homes), rank, written_at, arrived[value, rank]))
            return arrived[value, rank]

        def request_time(position: int) -> float:
            op, (source,) = ops[position], program.sources[position]
            ready = ready_at(op.reads[0], source, op.rank)
            return max(ready, last_start[op.rank]) if self.sends_are_placed else ready

        def note_arrival(position: int) -> None:
            """Note when a rank reaches a SEND or a RECV: its main lane is done with all before it."""
            op, (source,) = ops[position], program.sources[position]
            ready = ready_at(op.reads[0], source, op.rank) if op.kind == "SEND" else 0.0
            starts[position] = max(ready, free[op.rank])

        if self.rule is None:
            positions = self._simulation_order(request_time)
        else:
            positions = order_messages(program, self.costs.messages, note_arrival, self.receives_are_posted_ahead)
        for position in positions:
            op, sources, seconds = ops[position], program.sources[position], self.seconds[position]
            kind, rank, lane = op.kind, op.rank, lane_of(op)
            if kind == "RECV":
                transfers.append(transfer_by_send[sources[0]])
            # 1. Under a rule of messages `note_arrival` has set the start, and both ranks end with the transfer.
            if self.rule is not None and kind in ("SEND", "RECV"):
                is_send = kind == "SEND"
                end = self._run_meeting(op, starts, transfer_by_send, position) if is_send else ends[sources[0]]
                ends[position] = end
                continue
            # 2. The op can start when all that it reads is on its rank.
            if kind == "RECV":
                start = transfer_by_send[sources[0]].end
            else:
                start = max(map(ready_at, op.reads, sources, repeat(rank)), default=0.0)
            # 3. It waits for its lane, and occupies it.
            if kind == "SEND":
                start, end = self._run_send(op, start, transfer_by_send, position)
            elif lane != "main" and kind != "RECV":
                # The main lane launches what other lanes run: REDUCE, GATHER and SCATTER (wire) between two of its ops,
                # a copy or an exchange during one.
                launch = free[rank] if lane == "wire" else last_start[rank]
                start = max(start, launch, self.lane_free_at[lane, rank] if seconds else 0.0)
                end = start + seconds
                if seconds:
                    self.lane_free_at[lane, rank] = end
            elif seconds or (kind != "RECV" and is_scheduled(kind)):  # a main op, or a RECV that takes time
                start = last_start[rank] = max(start, free[rank])
                end = free[rank] = start + seconds
            else:
                end = start
            starts[position], ends[position] = start, end
        pairs = ((output.value, home) for output in program.outputs for home in output.homes)
        results = {(value, home): ready_at(value, program.writer[value], home) for value, home in pairs}
        return Iteration(starts, ends, transfers, results)

    def _simulation_order(self, request_time: Callable[[int], float]) -> Iterator[int]:
        """Order the ops to simulate: as the program lists them, or, if links are shared, SENDs by their time.

        Which transfer a shared link serves first follows from time, not from the order of the program. So each rank
        runs as far as it can without a link, and then the SEND that asks earliest is served. Whatever follows from it
        asks no earlier, so a link never serves a later request first.
        """
        ops, sources = self.program.ops, self.program.sources
        if self.costs.cluster is None or not self.costs.cluster.has_queues:
            yield from range(len(ops))
            return
        # A rank that must wait for an op is woken by it: `ranks_waiting_for` maps ops to the ranks that sleep on them.
        rank_ops: list[deque[int]] = [deque() for _ in range(self.program.ranks)]
        for position, op in enumerate(ops):
            rank_ops[op.rank].append(position)
        is_done, ranks_waiting_for = [False] * len(ops), defaultdict[int, list[int]](list)
        requests: list[tuple[float, int]] = []
        runnable_ranks = list(range(len(rank_ops)))
        while runnable_ranks or requests:
            while runnable_ranks:
                ops_left = rank_ops[runnable_ranks.pop()]
                while ops_left:
                    position = ops_left[0]
                    rank = ops[position].rank
                    missing = (source for source in sources[position] if source >= 0 and not is_done[source])
                    first_missing = next(missing, None)
                    if first_missing is not None:
                        ranks_waiting_for[first_missing].append(rank)
                        break
                    ops_left.popleft()
                    if ops[position].kind == "SEND":
                        heappush(requests, (request_time(position), position))
                        if self.costs.occupies_ranks:  # the rank goes on only when its SEND is served
                            ranks_waiting_for[position].append(rank)
                            break
                        continue
                    yield position
                    is_done[position] = True
                    runnable_ranks += ranks_waiting_for.pop(position, ())
            if requests:
                _, position = heappop(requests)
                yield position
                is_done[position] = True
                runnable_ranks += ranks_waiting_for.pop(position, ())

    def _run_meeting(self, op: Op, reached_at: list[float], transfer_by_send: dict[int, Transfer], send: int) -> float:
        """Run the transfer of a SEND that both ranks have reached, and return when it arrives."""
        assert self.rule is not None
        recv_position = self.recv_by_send[send]
        rank, target = op.rank, self.program.ops[recv_position].rank
        # A communicator runs one message of a rank at a time, so the transfer waits for the queues of both ranks.
        queues = [(end_rank, self.rule.communicator(rank, target)) for end_rank in (rank, target)]
        queues_free_at = max(self.queue_free_at[queue] for queue in queues)
        departure = max(reached_at[send], reached_at[recv_position], queues_free_at)
        departure, link_free_at = self._occupy_link(op, target, departure)
        arrival = link_free_at + self.latency(rank, target)
        self.queue_free_at.update(dict.fromkeys(queues, arrival))
        if self.rule.is_blocking:  # both ranks stay until the value has arrived
            for end_rank in (rank, target):
                self.last_start[end_rank] = self.free_at[end_rank] = arrival
        transfer_by_send[send] = Transfer(op.reads[0], rank, target, departure, arrival)
        return arrival

    def _run_send(self, op: Op, ready: float, transfer_by_send: dict[int, Transfer], send: int) -> tuple[float, float]:
        """Run the transfer of a SEND that waits for nobody, and return the start and end of the SEND."""
        rank, target, value = op.rank, self.program.ops[self.recv_by_send[send]].rank, op.reads[0]
        seconds, is_busy = self.seconds[send], self.costs.sender == "busy"
        start = max(ready, self.last_start[rank]) if self.sends_are_placed else ready
        # A SEND that takes time, or whose sender is busy until it arrives, is work of the main lane.
        if seconds or is_busy:
            start = max(start, self.free_at[rank])
        departure, end = self._occupy_link(op, target, start + seconds)
        arrival = end + self.latency(rank, target)
        if not seconds:
            start = departure
        if seconds or is_busy:
            self.last_start[rank], self.free_at[rank] = start, arrival if is_busy else start + seconds
        transfer_by_send[send] = Transfer(value, rank, target, departure, arrival)
        return start, arrival if is_busy else end

    def _occupy_link(self, op: Op, target: int, ready: float) -> tuple[float, float]:
        """Occupy the link of a SEND, and return when its value leaves and when the link is free again."""
        seconds, link = self.costs.link_seconds(sent_value(op), op.rank, target), self.costs.wire(op.rank, target)
        if not seconds:
            return ready, ready
        departure = max(ready, self.link_free_at[link])
        self.link_free_at[link] = departure + seconds
        return departure, departure + seconds
