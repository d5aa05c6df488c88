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
    """Finds what held an event or a transfer back: the latest of all it needed. Events are numbers, by their place."""

    def __init__(
        self,
        events: Sequence[Event],
        transfers: Sequence[Sequence[Transfer]],
        updates: Mapping[Value, Sequence[tuple[Value, int]]],
        costs: Costs,
    ) -> None:
        self.events, self.updates, self.wire = events, updates, costs.wire
        self.busy, self.send, self.receive = costs.sender == "busy", costs.send, costs.receive
        self.takes = {"SEND": self.send, "RECV": self.receive}
        self.rule = RULES.get(costs.messages)
        self.stays = self.busy or (self.rule is not None and self.rule.blocking)
        self.working: dict[tuple[int, float], int] = {}
        self.queued: dict[tuple[int, Hashable, float], Transfer] = {}
        self.rounds = max(len(transfers), 1)
        self.size = len(events) // self.rounds or 1
        self.writer = {value: at for at, event in enumerate(events[: self.size]) for value in event.op.writes}
        self.moved = [{(one.value, one.target): one for one in each} for each in transfers] or [{}]
        self.round_of = {id(one): number for number, each in enumerate(transfers) for one in each}
        self.received: dict[int, Transfer] = {}
        self.senders: dict[int, int] = {}
        self.lanes: list[tuple[int, Why] | None] = []
        self.before_link: dict[int, Transfer] = {}
        self.sent: dict[tuple[int, float], Transfer] = {}
        self._look_back(transfers)

    def _look_back(self, transfers: Sequence[Sequence[Transfer]]) -> None:
        """For each event what its lane did before, for each transfer what its link did, for each RECV its transfer."""
        last: dict[tuple[str, int], int] = {}
        begun: dict[int, int] = {}
        by_value = [defaultdict[tuple[Value, int], list[Transfer]](list) for _ in range(self.rounds)]
        for number, each in enumerate(transfers):
            for one in each:
                by_value[number][one.value, one.target].append(one)
        for at, (op, start, end) in enumerate(self.events):
            lane = lane_of(op)
            self.lanes.append(None)
            if op.kind == "RECV":
                sender = self.events[self._at(self.writer[op.reads[0]], at)].op
                found = by_value[at // self.size].get((sender.reads[0], op.rank), ())
                sent = max((one for one in found if one.end <= end), key=lambda one: one.end, default=None)
                if sent is not None:
                    self.received[at] = sent
                    self.senders[id(sent)] = self._at(self.writer[op.reads[0]], at)
            if self.takes[op.kind] > 0 if op.kind in self.takes else is_work(op, end - start):
                if ("main", op.rank) in last:
                    self.lanes[at] = (last["main", op.rank], "rank")
                last["main", op.rank] = begun[op.rank] = at
                if end > start:
                    self.working[op.rank, end] = at
            elif lane != "main" and op.kind not in self.takes:
                if end > start:
                    if (lane, op.rank) in last:
                        self.lanes[at] = (last[lane, op.rank], "lane")
                    last[lane, op.rank] = at
                if op.rank in begun and (self.lanes[at] is None or self._let_start(begun[op.rank], lane) == start):
                    self.lanes[at] = (begun[op.rank], "lane")
        links: dict[Hashable, Transfer] = {}
        for one in sorted((one for each in transfers for one in each), key=lambda one: (one.start, one.end)):
            link = self.wire(one.source, one.target)
            if link in links:
                self.before_link[id(one)] = links[link]
            links[link] = one
            self.sent[one.source, one.end] = one
            if self.rule is not None and one.end > one.start:
                for side in (one.source, one.target):
                    self.queued[side, self.rule.communicator(one.source, one.target), one.end] = one
                if self.rule.blocking:
                    self.sent[one.target, one.end] = one

    def _let_start(self, at: int, lane: str) -> float:
        """When a main op lets those behind it start that run on another lane."""
        return self.events[at].end if lane == "wire" else self.events[at].start

    def _at(self, position: int, event: int) -> int:
        """The event of an op of the program in the same iteration as another event."""
        return event - event % self.size + position

    def made(self, value: Value, rank: int, number: int) -> _Cause:
        """Where a value that a rank reads in an iteration comes from."""
        moved = self.moved[number].get((value, rank))
        if moved is not None:
            return _Cause(moved.end, moved, "data")
        if value in self.writer:
            at = number * self.size + self.writer[value]
            if at in self.received and not self.receive:
                return _Cause(self.received[at].end, self.received[at], "data")
            return _Cause(self.events[at].end, at, "data")
        return self.updated(value, number)

    def updated(self, value: Value, number: int) -> _Cause:
        """An input of the program: there from the start, or since the iteration before had the stage's gradient."""
        found = [self.made(made, home, number - 1) for made, home in self.updates.get(value, ())] if number else []
        return max(found, key=lambda cause: cause.time, default=_Cause(0.0, None, "start"))

    def cause(self, node: int | Transfer) -> _Cause:
        """The cause that held an event or a transfer back."""
        if isinstance(node, Transfer):
            return self._cause_of_transfer(node)
        op, start, _ = self.events[node]
        needed = [self.made(value, op.rank, node // self.size) for value in op.reads]
        if node in self.received:
            needed = [_Cause(self.received[node].end, self.received[node], "data")]
        cause = max(needed, key=lambda one: one.time, default=_Cause(0.0, None, "start"))
        before = self.lanes[node]
        if before is None:
            return cause
        at, why = before
        beside = why == "lane" and lane_of(self.events[at].op) == "main"
        of_lane = self._let_start(at, lane_of(op)) if beside else min(self.events[at].end, start)
        if self.stays and why == "rank" and (op.rank, start) in self.sent and of_lane < start > cause.time:
            return _Cause(start, self.sent[op.rank, start], "rank")
        return _Cause(of_lane, at, why) if of_lane >= cause.time else cause

    def _cause_of_transfer(self, node: Transfer) -> _Cause:
        number = self.round_of[id(node)]
        at = self.writer.get(node.value)
        cause = self.made(node.value, node.source, number) if at is not None else self.updated(node.value, number)
        if self.send:
            sender = self.senders[id(node)]
            cause = _Cause(self.events[sender].start + self.send, sender, "data")
        if cause.time >= node.start:
            return cause
        if self.rule is not None:
            return self._cause_of_meeting(node, self.rule) or cause
        if self.busy and not self.send:
            if (node.source, node.start) in self.sent:
                return _Cause(node.start, self.sent[node.source, node.start], "rank")
            ending = (n for n, (op, _, end) in enumerate(self.events) if op.rank == node.source and end == node.start)
            found = next((n for n in ending if lane_of(self.events[n].op) == "main"), None)
            if found is not None:
                return _Cause(node.start, found, "rank")
        before = self.before_link.get(id(node))
        return cause if before is None else _Cause(node.start, before, "link")

    def _cause_of_meeting(self, node: Transfer, rule: MessageRule) -> _Cause | None:
        """The cause of a transfer that began later than its value was there."""
        made = rule.communicator(node.source, node.target)
        for side in (node.source, node.target):
            before = self.queued.get((side, made, node.start))
            if before is not None:
                return _Cause(node.start, before, "queue")
        if (node.source, node.start) in self.working:
            return _Cause(node.start, self.working[node.source, node.start], "rank")
        if (node.target, node.start) in self.working:
            return _Cause(node.start, self.working[node.target, node.start], "receiver")
        before = self.before_link.get(id(node))
        return None if before is None else _Cause(node.start, before, "link")

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
            if start < makespan and self.takes.get(op.kind):
                rows[op.rank].append((start, start + self.send if op.kind == "SEND" and not self.busy else end, at))
        if self.stays and not self.send:
            for (rank, _), one in self.sent.items():
                rows[rank].append((one.start, one.end, None))
        found: list[Wait] = []
        for rank, row in enumerate(rows):
            free = 0.0
            for start, end, at in sorted(row, key=lambda one: one[:2]):
                if start > free:
                    found.append(Wait(rank, free, start, *self._whom(at)))
                free = max(free, end)
            if makespan > free:
                found.append(Wait(rank, free, makespan, None, None, None))
        return tuple(found)

    def _whom(self, at: int | None) -> tuple[Op | None, Op | None, int | None]:
        if at is None:
            return None, None, None
        op, (_, node, why) = self.events[at].op, self.cause(at)
        while why == "rank" and isinstance(node, int):  # an op that took no time waited in its place
            _, node, why = self.cause(node)
        # A measured timeline has SEND and RECV but no transfers: it is what they carry that is waited for.
        while isinstance(node, int) and self.events[node].op.kind in ("RECV", "SEND"):
            node = self.writer.get(self.events[node].op.reads[0])
        if isinstance(node, Transfer):
            made = self.writer.get(node.value)
            return op, None if made is None else self.events[made].op, node.source
        return op, None if node is None else self.events[node].op, None if node is None else self.events[node].op.rank


def _name(what: Op | Transfer) -> str:
    return what.cell if isinstance(what, Op) else f"{what.value} {what.source} > {what.target}"


def in_order(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Transfers in their one order: by time, then link, then value."""
    return tuple(sorted(transfers, key=lambda one: (one.start, one.end, one.source, one.target, str(one.value))))


# Longest paths through a program's data, whatever the order of its ranks.

Waits = Sequence[tuple[int, float]]
"""The ops that an op reads from, each with the seconds on the way; -1 is the caller."""


def way(costs: Costs, value: Value, source: int, target: int) -> float:
    """Seconds that a value takes from one rank to another, alone on its link."""
    return costs.latency(source, target) + costs.carrying(value, source, target) if source != target else 0.0


def waits_of(program: Program, costs: Costs) -> list[list[tuple[int, float]]]:
    """For each op what it reads; what the caller has on its rank is there from the start, and left out."""
    homes = {end.value: end.homes for end in program.inputs}

    def waits(op: Op, sources: Sequence[int]) -> Iterator[tuple[int, float]]:
        for value, source in zip(op.reads, sources, strict=True):
            if op.kind == "RECV":
                sender = program.ops[source]
                yield source, way(costs, carried(sender), sender.rank, op.rank)
                continue
            where = homes[value] if source < 0 else (program.ops[source].rank,)
            taken = 0.0 if op.rank in where else way(costs, value, min(where), op.rank)
            if source >= 0 or taken:
                yield source, taken

    pairs = zip(program.ops, program.sources, strict=True)
    return [[] if op.kind == "FREE" else [*waits(op, sources)] for op, sources in pairs]


def named_waits(
    program: Program, costs: Costs, named: Callable[[Op], bool]
) -> tuple[list[int], list[dict[int, float]]]:
    """The places of the named ops, and for each the named ops that it waits for, through all others."""
    number: dict[int, int] = {}
    through: dict[int, dict[int, float]] = {-1: {-1: 0.0}}
    found: list[dict[int, float]] = []
    for at, (op, waits) in enumerate(zip(program.ops, waits_of(program, costs), strict=True)):
        own: dict[int, float] = {}
        for source, way in waits:
            for one, more in ({number[source]: 0.0} if source in number else through[source]).items():
                own[one] = max(own.get(one, 0.0), more + way)
        if named(op):
            number[at] = len(number)
            found.append(own)
        else:
            through[at] = own
    return [*number], found


def heads_of(waits: Sequence[Waits], seconds: Sequence[float]) -> list[float]:
    """When each op can start at the earliest."""
    starts: list[float] = []
    for own in waits:
        ready = (way + (starts[at] + seconds[at] if at >= 0 else 0.0) for at, way in own)
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
