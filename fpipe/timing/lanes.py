"""Simulate a program with lanes, links and transfers: each rank does its ops in order, each as soon as it can start.

    main   |0F0|0F1|0F2|            |0B0|       F, B, I, W, R: one after the other, in the order of the program
    copy       |OFFLOAD(res)|   |LOAD(res)|     beside it; starts no earlier than the main op before it in the list
    exchange        |1F0|  |1F1|  |1B0|         so do stages that are a collective
    wire            |GATHER(params)|SCATTER|    collectives over replicas: no earlier than that main op ends
    link 0>1   |y[0,0]|y[0,1]|                  what travels from rank 0 to rank 1, one after the other

A SEND and a RECV that take time are on the main lane too; how they wait for each other is said in `messages.py`.

An op that takes no time and that no schedule names (ADD, SPLIT, ..) is on no lane: it is done when its data are there.

This is the definition of the simulated time of any program; `simulate.walk_plain` equals it where only main lanes
matter, and so does whatever plays an order: property_tests/test_order_laws.py compares them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from heapq import heappop, heappush
from itertools import count, repeat
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from fpipe.order import held_kinds
from fpipe.program import Op, Program, Value, kind_of, lane_of
from fpipe.timing.amounts import carried
from fpipe.timing.costs import Costs
from fpipe.timing.messages import RULES, met_order
from fpipe.transforms.communicate import received_as_sent, with_transfers, without_frees

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


def walk(program: Program, costs: Costs, iterations: int = 1) -> Iterator[Iteration]:
    """One iteration after the other.

    A rank goes on with the next iteration when it is done with its part of this one; what reads parameters (or the
    state) of a stage waits for the stage's gradient (its new state), which is when they are updated.
    """
    whole = program_of_lanes(program, costs)
    for iteration in run_lanes(whole, costs, iterations, posts_ahead(program)):
        yield as_before(program, whole, iteration)


def run_lanes(program: Program, costs: Costs, iterations: int, ahead: bool) -> Iterator[Iteration]:
    """Walk a program that `program_of_lanes` made of one that `posts_ahead` or not."""
    lanes = _Lanes(program, costs, ahead)
    ready: dict[Value, float] = {}
    updates = updated_by(program)
    for _ in range(iterations):
        iteration = lanes.run(ready)
        yield iteration
        times = iteration.results
        ready = {value: max(map(times.__getitem__, results), default=0.0) for value, results in updates.items()}


def updated_by(program: Program) -> dict[Value, list[tuple[Value, int]]]:
    """For each input that changes from iteration to iteration the results that it waits for, with their homes."""
    results: defaultdict[tuple[str, int | None], list[tuple[Value, int]]] = defaultdict(list)
    for end in program.outputs:
        results[end.name.name, end.name.stage] += [(end.value, home) for home in end.homes]
    word = {"params": "grads", "shard": "grads", "state": "state"}
    return {
        end.value: results[word[end.value.name], end.value.stage] for end in program.inputs if end.value.name in word
    }


def is_scheduled(kind: str) -> bool:
    """Whether an op of this kind waits for its turn on the main lane, even where it takes no time."""
    known = kind_of(kind)
    return bool(known.time) or known.place == "table"


def is_work(op: Op, seconds: float) -> bool:
    """Whether an op is work of its rank: what a schedule names, and what else takes time on the main lane."""
    return lane_of(op) == "main" and (is_scheduled(op.kind) or seconds > 0)


class OpGroups(NamedTuple):
    """The number of every op's group, and a sample of each group: ops of one kind, stage, rank, parts and `how`."""

    numbers: list[int]
    samples: list[Op]

    def spread(self, facts: Iterable[_Fact]) -> list[_Fact]:
        """A fact for every op, from one for each group."""
        return list(map(list(facts).__getitem__, self.numbers))


def op_groups(ops: Sequence[Op]) -> OpGroups:
    """Group ops by iterators of C: they lie scattered in memory, and a look at each takes 0.1 us."""
    number_by_facts = defaultdict[Any, int](count().__next__)
    numbers = list(map(number_by_facts.__getitem__, map(itemgetter(0, 1, 4, 7, 8), ops)))
    samples: list[Op] = []
    first = 0
    for number in range(len(number_by_facts)):
        first = numbers.index(number, first)
        samples.append(ops[first])
    return OpGroups(numbers, samples)


def program_of_lanes(program: Program, costs: Costs) -> Program:
    """Where transfers wait for each other, or ranks for them, or copies count, they are made ops, so that their order
    is known. FREE takes no time anywhere."""
    if costs.messages != "eager":
        whole = with_transfers(program)
        return received_as_sent(whole) if posts_ahead(program) else whole
    if costs.bytes is not None or costs.busies:
        return with_transfers(program)
    return without_frees(program)


def posts_ahead(program: Program) -> bool:
    """Whether ranks post receives ahead, as `build` does: not where a program says itself when they come to each."""
    return all(op.kind != "SEND" for op in program.ops)


def as_before(program: Program, whole: Program, iteration: Iteration) -> Iteration:
    """The times of a program, from those of its `program_of_lanes`."""
    if whole is program:
        return iteration
    position_by_writes = {op.writes: position for position, op in enumerate(whole.ops)}
    starts: list[float] = []
    ends: list[float] = []
    for op, sources in zip(program.ops, program.sources, strict=True):
        if op.writes in position_by_writes and op.writes:
            position = position_by_writes[op.writes]
            starts.append(iteration.starts[position])
            ends.append(iteration.ends[position])
        else:  # FREE
            starts.append(max((ends[source] for source in sources if source >= 0), default=0.0))
            ends.append(starts[-1])
    value_by_name = {end.name: end.value for end in program.outputs}
    times = iteration.results
    results = {(value_by_name[end.name], home): times[end.value, home] for end in whole.outputs for home in end.homes}
    return Iteration(starts, ends, iteration.transfers, results)


class _Lanes:
    """The state of all lanes, from iteration to iteration."""

    def __init__(self, program: Program, costs: Costs, ahead: bool) -> None:
        self.program, self.costs, self.ahead = program, costs, ahead
        self.free = [0.0] * program.ranks  # when a main lane is free
        self.last_start = [0.0] * program.ranks  # of the last main op
        self.free_of_lane: defaultdict[tuple[str, int], float] = defaultdict(float)  # of lanes next to the main one
        self.links: defaultdict[Hashable, float] = defaultdict(float)
        self.homes = {end.value: end.homes for end in program.inputs}
        sources, ops = program.sources, program.ops
        self.receives = {sources[position][0]: position for position, op in enumerate(ops) if op.kind == "RECV"}
        self.sends_are_placed = bool(self.receives) and "SEND" in held_kinds(program)
        self.seconds = [costs.seconds(op) for op in program.ops]
        self.rule = RULES.get(costs.messages)
        self.queued: defaultdict[tuple[int, Hashable], float] = defaultdict(float)
        self.latency = cache(costs.latency)

    def run(self, inputs_ready: Mapping[Value, float]) -> Iteration:
        """Simulate one iteration, with the times at which its inputs are there, 0 by default."""
        program, free, last_start = self.program, self.free, self.last_start
        ops = program.ops
        starts, ends = [0.0] * len(ops), [0.0] * len(ops)
        arrived: dict[tuple[Value, int], float] = {}
        transfers: list[Transfer] = []
        sent: dict[int, Transfer] = {}  # by the SEND

        def ready_at(value: Value, source: int, rank: int) -> float:
            """When a rank has a value."""
            written = ends[source] if source >= 0 else inputs_ready.get(value, 0.0)
            homes = (ops[source].rank,) if source >= 0 else self.homes[value]
            if rank in homes:
                return written
            if (value, rank) not in arrived:
                arrived[value, rank] = written + self.latency(min(homes), rank)
                transfers.append(Transfer(value, min(homes), rank, written, arrived[value, rank]))
            return arrived[value, rank]

        def asks(position: int) -> float:
            """When a SEND asks for its link."""
            op, (source,) = ops[position], program.sources[position]
            ready = ready_at(op.reads[0], source, op.rank)
            return max(ready, last_start[op.rank]) if self.sends_are_placed else ready

        def comes(position: int) -> None:
            """A rank comes to a SEND or a RECV of a queue."""
            op, (source,) = ops[position], program.sources[position]
            ready = ready_at(op.reads[0], source, op.rank) if op.kind == "SEND" else 0.0
            starts[position] = max(ready, free[op.rank])

        met = partial(met_order, program, self.costs.messages, comes, self.ahead)
        for position in self._order(asks) if self.rule is None else met():
            op, sources, cost = ops[position], program.sources[position], self.seconds[position]
            kind, rank, lane = op.kind, op.rank, lane_of(op)
            if kind == "RECV":
                transfers.append(sent[sources[0]])
            if self.rule is not None and kind in ("SEND", "RECV"):  # `comes` has set the start
                meets = kind == "SEND"
                ends[position] = self._meet(op, starts, sent, position) if meets else ends[sources[0]]
                continue
            if kind == "RECV":
                start = sent[sources[0]].end
            else:
                start = max(map(ready_at, op.reads, sources, repeat(rank)), default=0.0)
            if kind == "SEND":
                start, end = self._send(op, start, sent, position)
            elif lane != "main" and kind != "RECV":
                behind = free if lane == "wire" else last_start  # a rank hands out collectives between its ops
                start = max(start, behind[rank], self.free_of_lane[lane, rank] if cost else 0.0)
                end = start + cost
                if cost:
                    self.free_of_lane[lane, rank] = end
            elif cost or (kind != "RECV" and is_scheduled(kind)):
                start = last_start[rank] = max(start, free[rank])
                end = free[rank] = start + cost
            else:
                end = start
            starts[position], ends[position] = start, end
        results: dict[tuple[Value, int], float] = {}
        for end in program.outputs:
            for home in end.homes:
                results[end.value, home] = ready_at(end.value, program.writer[end.value], home)
        return Iteration(starts, ends, transfers, results)

    def _order(self, asks: Callable[[int], float]) -> Iterator[int]:
        """Order the ops to simulate: as they stand, but where links are shared, each SEND as it asks for its link.

        Each rank goes on as far as it can; then of all SENDs that wait for a link the first is served. Whatever follows
        from it asks later than it did.
        """
        ops, sources = self.program.ops, self.program.sources
        if self.costs.cluster is None or not self.costs.cluster.has_queues:
            yield from range(len(ops))
            return
        rows: list[deque[int]] = [deque() for _ in range(self.program.ranks)]
        for position, op in enumerate(ops):
            rows[op.rank].append(position)
        done, sleeping = [False] * len(ops), defaultdict[int, list[int]](list)
        asking: list[tuple[float, int]] = []
        todo = list(range(len(rows)))
        while todo or asking:
            while todo:
                row = rows[todo.pop()]
                while row:
                    position = row[0]
                    rank = ops[position].rank
                    missing = next((source for source in sources[position] if source >= 0 and not done[source]), None)
                    if missing is not None:
                        sleeping[missing].append(rank)
                        break
                    row.popleft()
                    if ops[position].kind == "SEND":
                        heappush(asking, (asks(position), position))
                        if self.costs.busies:
                            sleeping[position].append(rank)
                            break
                        continue
                    yield position
                    done[position] = True
                    todo += sleeping.pop(position, ())
            if asking:
                _, position = heappop(asking)
                yield position
                done[position] = True
                todo += sleeping.pop(position, ())

    def _meet(self, op: Op, came: list[float], sent: dict[int, Transfer], position: int) -> float:
        """Note the transfer of a SEND to which both ranks have come; return its end, and so that of its RECV."""
        assert self.rule is not None
        receive = self.receives[position]
        rank, target = op.rank, self.program.ops[receive].rank
        lanes = [(side, self.rule.communicator(rank, target)) for side in (rank, target)]
        leaves = max(came[position], came[receive], *(self.queued[lane] for lane in lanes))
        leaves, left = self._carry(op, target, leaves)
        arrival = left + self.latency(rank, target)
        self.queued.update(dict.fromkeys(lanes, arrival))
        if self.rule.blocking:
            for side in (rank, target):
                self.last_start[side] = self.free[side] = arrival
        sent[position] = Transfer(op.reads[0], rank, target, leaves, arrival)
        return arrival

    def _send(self, op: Op, ready: float, sent: dict[int, Transfer], position: int) -> tuple[float, float]:
        """Note the transfer of a SEND; return its start and end."""
        rank, target, value = op.rank, self.program.ops[self.receives[position]].rank, op.reads[0]
        seconds, is_busy = self.seconds[position], self.costs.sender == "busy"
        start = max(ready, self.last_start[rank]) if self.sends_are_placed else ready
        if seconds or is_busy:
            start = max(start, self.free[rank])
        leaves, end = self._carry(op, target, start + seconds)
        arrival = end + self.latency(rank, target)
        if not seconds:
            start = leaves
        if seconds or is_busy:
            self.last_start[rank], self.free[rank] = start, arrival if is_busy else start + seconds
        sent[position] = Transfer(value, rank, target, leaves, arrival)
        return start, arrival if is_busy else end

    def _carry(self, op: Op, target: int, ready: float) -> tuple[float, float]:
        """Occupy the link of a SEND; return when its value leaves and when the link is free again."""
        seconds, link = self.costs.carrying(carried(op), op.rank, target), self.costs.wire(op.rank, target)
        if not seconds:
            return ready, ready
        leaves = max(ready, self.links[link])
        self.links[link] = leaves + seconds
        return leaves, leaves + seconds
