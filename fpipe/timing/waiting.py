"""Who waits for whom: what holds each op back, the chain that makes a step as long as it is, and the idle times."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Literal, NamedTuple

from fpipe.program import Op, Program, Value, lane_of
from fpipe.timing.amounts import carried
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import Transfer, is_work
from fpipe.timing.messages import RULES, MessageRule

Why = Literal["start", "data", "rank", "lane", "link", "queue", "receiver"]


class Event(NamedTuple):
    """An op with its start and end, in seconds from the first op of the program."""

    op: Op
    start: float
    end: float


class PathStep(NamedTuple):
    """A piece of the critical path: what ran from start to end, and why not earlier.

    `why`: "start" (nothing held it back), "data" (it needed what the step before made), "rank" (its rank was busy with
    the step before), "lane" (so was another lane of its rank), "link" (so was its link), "queue" (it came behind it
    in the queue of a communicator), "receiver" (the other rank was busy with it, and had not come to its RECV).
    """

    what: Op | Transfer
    start: float
    end: float
    why: Why

    def __str__(self) -> str:
        return f"{self.start:10g} {self.end:10g}  {_name(self.what):24} {_REASONS[self.why]}".rstrip()


_REASONS: dict[Why, str] = {
    "start": "",
    "data": "needs it",
    "rank": "same rank",
    "lane": "same lane",
    "link": "same link",
    "queue": "same queue",
    "receiver": "its receiver",
}


class Wait(NamedTuple):
    """A rank that does nothing from start to end, before `op`, which waits for what `on` makes on rank `source`.

    At the end there is no `op`; where an op waits for what the caller hands in, there is no `on`.
    """

    rank: int
    start: float
    end: float
    op: Op | None
    on: Op | None
    source: int | None


class _Cause(NamedTuple):
    """The last thing that an event or transfer waited for: when it let go, what it is, and how it held it back."""

    time: float
    node: int | Transfer | None
    why: Why


class Waiting:
    """Finds the cause that held an event or a transfer back: the latest of all it needed. Events are numbers."""

    def __init__(
        self,
        events: Sequence[Event],
        transfers: Sequence[Sequence[Transfer]],
        updates: Mapping[Value, Sequence[tuple[Value, int]]],
        costs: Costs,
    ) -> None:
        self.events, self.updates, self.wire = events, updates, costs.wire
        self.busy, self.send, self.receive = costs.sender == "busy", costs.send, costs.receive
        self.seconds_by_kind = {"SEND": self.send, "RECV": self.receive}
        self.rule = RULES.get(costs.messages)
        self.sender_waits = self.busy or (self.rule is not None and self.rule.blocking)
        self.rounds = max(len(transfers), 1)
        self.size = len(events) // self.rounds or 1
        self.writer = {value: place for place, event in enumerate(events[: self.size]) for value in event.op.writes}
        self.round_of = {id(sent): number for number, of_round in enumerate(transfers) for sent in of_round}
        self.received: dict[int, Transfer] = {}  # by the event of a RECV
        self.senders: dict[int, int] = {}  # the event of the SEND, by the id of its transfer
        self.before_on_lane: list[tuple[int, Why] | None] = []
        self.working: dict[tuple[int, float], int] = {}  # by rank and end
        self.before_on_link: dict[int, Transfer] = {}  # by the id of a transfer
        self.sent: dict[tuple[int, float], Transfer] = {}  # by rank and end
        self.queued: dict[tuple[int, Hashable, float], Transfer] = {}  # by rank, communicator and end
        self.arrivals = [defaultdict[tuple[Value, int], list[Transfer]](list) for _ in range(self.rounds)]
        for number, of_round in enumerate(transfers):
            for sent in of_round:
                self.arrivals[number][sent.value, sent.target].append(sent)
        self._look_back_on_lanes()
        self._look_back_on_links([sent for of_round in transfers for sent in of_round])

    def _look_back_on_lanes(self) -> None:
        """Find for each event what its lane did before, and for each RECV its transfer."""
        last: dict[tuple[str, int], int] = {}
        begun: dict[int, int] = {}
        for at, (op, start, end) in enumerate(self.events):
            lane = lane_of(op)
            self.before_on_lane.append(None)
            if op.kind == "RECV":
                sender = self._event_of(self.writer[op.reads[0]], at)
                arrivals = self.arrivals[at // self.size].get((self.events[sender].op.reads[0], op.rank), ())
                sent = max((sent for sent in arrivals if sent.end <= end), key=lambda sent: sent.end, default=None)
                if sent is not None:
                    self.received[at], self.senders[id(sent)] = sent, sender
            if self.seconds_by_kind[op.kind] > 0 if op.kind in self.seconds_by_kind else is_work(op, end - start):
                if ("main", op.rank) in last:
                    self.before_on_lane[at] = (last["main", op.rank], "rank")
                last["main", op.rank] = begun[op.rank] = at
                if end > start:
                    self.working[op.rank, end] = at
            elif lane != "main" and op.kind not in self.seconds_by_kind:
                if end > start:
                    if (lane, op.rank) in last:
                        self.before_on_lane[at] = (last[lane, op.rank], "lane")
                    last[lane, op.rank] = at
                main = begun.get(op.rank)
                if main is not None and (self.before_on_lane[at] is None or self._let_start(main, lane) == start):
                    self.before_on_lane[at] = (main, "lane")

    def _look_back_on_links(self, transfers: Sequence[Transfer]) -> None:
        """Find for each transfer what its link did before."""
        last: dict[Hashable, Transfer] = {}
        for sent in sorted(transfers, key=lambda sent: (sent.start, sent.end)):
            link = self.wire(sent.source, sent.target)
            if link in last:
                self.before_on_link[id(sent)] = last[link]
            last[link] = self.sent[sent.source, sent.end] = sent
            if self.rule is not None and sent.end > sent.start:
                for rank in (sent.source, sent.target):
                    self.queued[rank, self.rule.communicator(sent.source, sent.target), sent.end] = sent
                if self.rule.blocking:
                    self.sent[sent.target, sent.end] = sent

    def _let_start(self, at: int, lane: str) -> float:
        """When a main op lets those behind it start that run on another lane."""
        return self.events[at].end if lane == "wire" else self.events[at].start

    def _event_of(self, position: int, event: int) -> int:
        """The event of an op of the program in the same iteration as another event."""
        return event - event % self.size + position

    def arrival(self, value: Value, rank: int, number: int) -> _Cause:
        """Where a value that a rank reads in an iteration comes from."""
        if (value, rank) in self.arrivals[number]:
            sent = self.arrivals[number][value, rank][-1]
            return _Cause(sent.end, sent, "data")
        if value in self.writer:
            at = number * self.size + self.writer[value]
            if at in self.received and not self.receive:
                return _Cause(self.received[at].end, self.received[at], "data")
            return _Cause(self.events[at].end, at, "data")
        return self.update(value, number)

    def update(self, value: Value, number: int) -> _Cause:
        """Where an input comes from: the start, or the stage's gradient of the iteration before."""
        updates = self.updates.get(value, ()) if number else ()
        causes = [self.arrival(gradient, home, number - 1) for gradient, home in updates]
        return max(causes, key=lambda cause: cause.time, default=_Cause(0.0, None, "start"))

    def cause(self, node: int | Transfer) -> _Cause:
        """The cause that held an event or a transfer back."""
        if isinstance(node, Transfer):
            return self._cause_of_transfer(node)
        op, start, _ = self.events[node]
        causes = [self.arrival(value, op.rank, node // self.size) for value in op.reads]
        if node in self.received:
            causes = [_Cause(self.received[node].end, self.received[node], "data")]
        cause = max(causes, key=lambda cause: cause.time, default=_Cause(0.0, None, "start"))
        before = self.before_on_lane[node]
        if before is None:
            return cause
        at, why = before
        is_behind_main = why == "lane" and lane_of(self.events[at].op) == "main"
        free = self._let_start(at, lane_of(op)) if is_behind_main else min(self.events[at].end, start)
        if self.sender_waits and why == "rank" and (op.rank, start) in self.sent and free < start > cause.time:
            return _Cause(start, self.sent[op.rank, start], "rank")
        return _Cause(free, at, why) if free >= cause.time else cause

    def _cause_of_transfer(self, node: Transfer) -> _Cause:
        number, start = self.round_of[id(node)], node.start
        is_written = node.value in self.writer
        cause = self.arrival(node.value, node.source, number) if is_written else self.update(node.value, number)
        if self.send:
            sender = self.senders[id(node)]
            cause = _Cause(self.events[sender].start + self.send, sender, "data")
        if cause.time >= start:
            return cause
        if self.rule is not None:
            return self._cause_of_meeting(node, self.rule) or cause
        if self.busy and not self.send:
            if (node.source, start) in self.sent:
                return _Cause(start, self.sent[node.source, start], "rank")
            for at, (op, _, end) in enumerate(self.events):
                if op.rank == node.source and end == start and lane_of(op) == "main":
                    return _Cause(start, at, "rank")
        return self._cause_of_link(node) or cause

    def _cause_of_link(self, node: Transfer) -> _Cause | None:
        before = self.before_on_link.get(id(node))
        return None if before is None else _Cause(node.start, before, "link")

    def _cause_of_meeting(self, node: Transfer, rule: MessageRule) -> _Cause | None:
        """The cause of a transfer that began later than its value was there."""
        communicator = rule.communicator(node.source, node.target)
        for rank in (node.source, node.target):
            before = self.queued.get((rank, communicator, node.start))
            if before is not None:
                return _Cause(node.start, before, "queue")
        sides: tuple[tuple[int, Why], ...] = ((node.source, "rank"), (node.target, "receiver"))
        for rank, why in sides:
            if (rank, node.start) in self.working:
                return _Cause(node.start, self.working[rank, node.start], why)
        return self._cause_of_link(node)

    def path(self) -> tuple[PathStep, ...]:
        """The chain of causes that ends last, from the start on."""
        work = [at for at, (op, start, end) in enumerate(self.events) if is_work(op, end - start)]
        if not work:
            return ()
        current: int | Transfer | None = max(work, key=lambda at: self.events[at].end)
        end = self.events[current].end
        steps: list[PathStep] = []
        while current is not None:
            cause = self.cause(current)
            what = current if isinstance(current, Transfer) else self.events[current].op
            start = current.start if isinstance(current, Transfer) else self.events[current].start
            steps.append(PathStep(what, start, end, cause.why if cause.node is not None else "start"))
            end, current = start, cause.node
        return tuple(reversed(steps))

    def waits(self, ranks: int, makespan: float) -> tuple[Wait, ...]:
        """Each time that a rank's main lane does nothing, rank by rank."""
        rows: list[list[tuple[float, float, int | None]]] = [[] for _ in range(ranks)]
        for at, (op, start, end) in enumerate(self.events):
            if is_work(op, end - start):
                rows[op.rank].append((start, end, at))
        for at, (op, start, end) in enumerate(self.events):
            if start < makespan and self.seconds_by_kind.get(op.kind):
                rows[op.rank].append((start, start + self.send if op.kind == "SEND" and not self.busy else end, at))
        if self.sender_waits and not self.send:
            for (rank, _), sent in self.sent.items():
                rows[rank].append((sent.start, sent.end, None))
        waits: list[Wait] = []
        for rank, row in enumerate(rows):
            free = 0.0
            for start, end, at in sorted(row, key=lambda work: work[:2]):
                if start > free:
                    waits.append(Wait(rank, free, start, *self._waiter_and_writer(at)))
                free = max(free, end)
            if makespan > free:
                waits.append(Wait(rank, free, makespan, None, None, None))
        return tuple(waits)

    def _waiter_and_writer(self, at: int | None) -> tuple[Op | None, Op | None, int | None]:
        if at is None:
            return None, None, None
        waiter, (_, node, why) = self.events[at].op, self.cause(at)
        while why == "rank" and isinstance(node, int):  # an op that took no time waited in its place
            _, node, why = self.cause(node)
        # A measured timeline has SEND and RECV but no transfers: it is what they carry that is waited for.
        while isinstance(node, int) and self.events[node].op.kind in ("RECV", "SEND"):
            node = self.writer.get(self.events[node].op.reads[0])
        source = node.source if isinstance(node, Transfer) else None
        node = self.writer.get(node.value) if isinstance(node, Transfer) else node
        if node is None:
            return waiter, None, source
        return waiter, self.events[node].op, self.events[node].op.rank if source is None else source


def _name(what: Op | Transfer) -> str:
    return what.cell if isinstance(what, Op) else f"{what.value} {what.source} > {what.target}"


def in_order(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Transfers in their one order: by time, then link, then value."""
    return tuple(sorted(transfers, key=lambda sent: (sent.start, sent.end, sent.source, sent.target, str(sent.value))))


# Longest paths through a program's data, whatever the order of its ranks.

Waits = Sequence[tuple[int, float]]
"""The ops that an op reads from, each with the seconds on the way; -1 is the caller."""


def way(costs: Costs, value: Value, source: int, target: int) -> float:
    """Seconds that a value takes from one rank to another, alone on its link."""
    return costs.latency(source, target) + costs.carrying(value, source, target) if source != target else 0.0


def waits_of(program: Program, costs: Costs) -> list[list[tuple[int, float]]]:
    """For each op its sources; inputs that are on its rank from the start are left out."""
    homes = {end.value: end.homes for end in program.inputs}

    def waits(op: Op, sources: Sequence[int]) -> Iterator[tuple[int, float]]:
        for value, source in zip(op.reads, sources, strict=True):
            if op.kind == "RECV":
                sender = program.ops[source]
                yield source, way(costs, carried(sender), sender.rank, op.rank)
                continue
            ranks = homes[value] if source < 0 else (program.ops[source].rank,)
            seconds = 0.0 if op.rank in ranks else way(costs, value, min(ranks), op.rank)
            if source >= 0 or seconds:
                yield source, seconds

    pairs = zip(program.ops, program.sources, strict=True)
    return [[] if op.kind == "FREE" else [*waits(op, sources)] for op, sources in pairs]


def named_waits(
    program: Program, costs: Costs, named: Callable[[Op], bool]
) -> tuple[list[int], list[dict[int, float]]]:
    """The positions of the named ops, and for each the named ops that it waits for, through all others."""
    number_by_position: dict[int, int] = {}
    waits_through: dict[int, dict[int, float]] = {-1: {-1: 0.0}}
    waits_of_named: list[dict[int, float]] = []
    for position, (op, sources) in enumerate(zip(program.ops, waits_of(program, costs), strict=True)):
        waits: dict[int, float] = {}
        for source, way in sources:
            is_named = source in number_by_position
            before = {number_by_position[source]: 0.0} if is_named else waits_through[source]
            for number, seconds in before.items():
                waits[number] = max(waits.get(number, 0.0), seconds + way)
        if named(op):
            number_by_position[position] = len(number_by_position)
            waits_of_named.append(waits)
        else:
            waits_through[position] = waits
    return [*number_by_position], waits_of_named


def heads_of(waits: Sequence[Waits], seconds: Sequence[float]) -> list[float]:
    """The earliest start of each op."""
    starts: list[float] = []
    for waits_of_op in waits:
        ready = (way + (starts[source] + seconds[source] if source >= 0 else 0.0) for source, way in waits_of_op)
        starts.append(max(ready, default=0.0))
    return starts


def tails_of(waits: Sequence[Waits], seconds: Sequence[float], works: Sequence[bool]) -> list[float]:
    """Seconds from the end of each op to the end of the last work that needs it, at the least."""
    tails = [float("-inf")] * len(seconds)  # no work needs it
    for at in reversed(range(len(seconds))):
        left = max(tails[at], 0.0) if works[at] else tails[at]
        for source, way in waits[at]:
            if source >= 0:
                tails[source] = max(tails[source], way + seconds[at] + left)
    return [max(tail, 0.0) for tail in tails]


class DataGraph:
    """The ops of a program with what they cost and how long data are on their way, whatever the order of ranks."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.ops = program.ops
        self.seconds = [0.0 if op.kind in ("SEND", "RECV", "FREE") else costs.seconds(op) for op in self.ops]
        self.needs = waits_of(program, costs)
        works = [is_work(op, seconds) for op, seconds in zip(self.ops, self.seconds, strict=True)]
        self.starts, self.tails = heads_of(self.needs, self.seconds), tails_of(self.needs, self.seconds, works)
        self.rows: defaultdict[int, list[int]] = defaultdict(list)
        for at in compress(range(len(self.ops)), works):
            self.rows[self.ops[at].rank].append(at)

    def window(self, rank: int, without_weights: bool = False) -> tuple[float, float, float]:
        """The earliest start, the work and the shortest tail of a rank's ops."""
        row = [at for at in self.rows[rank] if not (without_weights and self.ops[at].kind == "W")]
        if not row:
            return 0.0, 0.0, 0.0
        work = sum(self.seconds[at] for at in row)
        if work:  # any of its ops have a window; the narrower, the better
            row = [at for at in row if self.seconds[at]]
        return min(self.starts[at] for at in row), work, min(self.tails[at] for at in row)

    def around(self, rank: int) -> float:
        """Seconds before the first and after the last of all a rank's ops, those of no time too."""
        row = self.rows[rank]
        return min((self.starts[at] for at in row), default=0.0) + min((self.tails[at] for at in row), default=0.0)
