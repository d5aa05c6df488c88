"""Find what held each op back, the critical path that follows from it, and the idle times of ranks.

    event or transfer --find_cause--> the last of: what it reads, its lane, its link, its queue, the other rank
    last event --path--> cause of cause of .., back to the start       idle time --waits--> the cause of the op after it

Times alone decide: nothing is simulated again, so this serves measured timelines too. Below are longest paths through a
program's data, for bounds and priorities, where the order of ranks is still open.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import compress
from typing import Literal, NamedTuple

from fpipe.program import Op, Program, Value, lane_of
from fpipe.timing.amounts import sent_value
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import Transfer, is_work
from fpipe.timing.messages import MESSAGE_RULES, MessageRule

Reason = Literal["start", "data", "rank", "lane", "link", "queue", "receiver"]


class Event(NamedTuple):
    """An op with its start and end, in seconds from the first op of the program."""

    op: Op
    start: float
    end: float


class PathStep(NamedTuple):
    """A step of the critical path: an op or a transfer from start to end, and why it was not earlier.

    `reason`: "start" (nothing held it back), "data" (it needed what the step before made), "rank" (its rank was busy
    with the step before), "lane" (so was another lane of its rank), "link" (so was its link), "queue" (it came behind
    it in the queue of a communicator), "receiver" (the other rank was busy with it, and had not come to its RECV).
    """

    activity: Op | Transfer
    start: float
    end: float
    reason: Reason

    def __str__(self) -> str:
        return f"{self.start:10g} {self.end:10g}  {_describe(self.activity):24} {_TEXT_BY_REASON[self.reason]}".rstrip()


_TEXT_BY_REASON: dict[Reason, str] = {
    "start": "",
    "data": "needs it",
    "rank": "same rank",
    "lane": "same lane",
    "link": "same link",
    "queue": "same queue",
    "receiver": "its receiver",
}


class Wait(NamedTuple):
    """An idle time of a rank, before `op`, which waits for the result of op `writer` on rank `source`.

    At the end there is no `op`; where an op waits for what the caller hands in, there is no `writer`.
    """

    rank: int
    start: float
    end: float
    op: Op | None
    writer: Op | None
    source: int | None


class _Cause(NamedTuple):
    """The last event (by number) or transfer that another waited for, until when, and why."""

    time: float
    activity: int | Transfer | None
    reason: Reason


class CauseFinder:
    """Finder of causes: the last of all that an event or a transfer needed.

    Events are numbered through all iterations, and the op at a position of the program has one in each of them. Times
    are compared exactly: an op that waited starts at the very float at which its cause ended.
    """

    def __init__(
        self,
        events: Sequence[Event],
        transfers: Sequence[Sequence[Transfer]],
        updates: Mapping[Value, Sequence[tuple[Value, int]]],
        costs: Costs,
    ) -> None:
        self.events, self.updates, self.wire = events, updates, costs.wire
        self.sender_is_busy, self.send_seconds, self.receive_seconds = costs.sender == "busy", costs.send, costs.receive
        self.seconds_by_kind = {"SEND": self.send_seconds, "RECV": self.receive_seconds}
        self.rule = MESSAGE_RULES.get(costs.messages)
        self.sender_waits = self.sender_is_busy or (self.rule is not None and self.rule.is_blocking)
        self.rounds = max(len(transfers), 1)
        self.ops_per_round = len(events) // self.rounds or 1
        first_round = enumerate(events[: self.ops_per_round])
        self.position_by_value = {value: position for position, event in first_round for value in event.op.writes}
        self.round_by_id: dict[int, int] = {}  # by the id of a transfer
        self.transfer_by_recv: dict[int, Transfer] = {}  # by the event of a RECV
        self.send_by_id: dict[int, int] = {}  # the event of the SEND, by the id of its transfer
        self.previous_on_lane: list[tuple[int, Reason] | None] = []
        self.work_by_end: dict[tuple[int, float], int] = {}  # by rank and end
        self.previous_on_link: dict[int, Transfer] = {}  # by the id of a transfer
        self.transfer_by_end: dict[tuple[int, float], Transfer] = {}  # by rank and end
        self.queued_by_end: dict[tuple[int, Hashable, float], Transfer] = {}  # by rank, communicator and end
        self.arrivals = [defaultdict[tuple[Value, int], list[Transfer]](list) for _ in range(self.rounds)]
        for iteration, transfers_of_round in enumerate(transfers):
            for transfer in transfers_of_round:
                self.round_by_id[id(transfer)] = iteration
                self.arrivals[iteration][transfer.value, transfer.target].append(transfer)
        self._link_events()
        self._link_transfers([transfer for transfers_of_round in transfers for transfer in transfers_of_round])

    def _link_events(self) -> None:
        """Find for each event the one before it on its lane, and for each RECV its transfer."""
        last_event: dict[tuple[str, int], int] = {}
        main_event: dict[int, int] = {}
        for event, (op, start, end) in enumerate(self.events):
            lane = lane_of(op)
            self.previous_on_lane.append(None)
            if op.kind == "RECV":
                # A value may travel to a rank several times: this RECV takes the last that has arrived.
                sender = self._event_of(self.position_by_value[op.reads[0]], event)
                sent_value = self.events[sender].op.reads[0]
                arrivals = self.arrivals[event // self.ops_per_round].get((sent_value, op.rank), ())
                arrived = [transfer for transfer in arrivals if transfer.end <= end]
                transfer = max(arrived, key=lambda transfer: transfer.end, default=None)
                if transfer is not None:
                    self.transfer_by_recv[event], self.send_by_id[id(transfer)] = transfer, sender
            # Main lane: work, and SENDs and RECVs if they take time.
            if self.seconds_by_kind[op.kind] > 0 if op.kind in self.seconds_by_kind else is_work(op, end - start):
                if ("main", op.rank) in last_event:
                    self.previous_on_lane[event] = (last_event["main", op.rank], "rank")
                last_event["main", op.rank] = main_event[op.rank] = event
                if end > start:
                    self.work_by_end[op.rank, end] = event
            # Another lane: held back by the op before it there, or by the main op that launches it.
            elif lane != "main" and op.kind not in self.seconds_by_kind:
                if end > start:
                    if (lane, op.rank) in last_event:
                        self.previous_on_lane[event] = (last_event[lane, op.rank], "lane")
                    last_event[lane, op.rank] = event
                main = main_event.get(op.rank)
                is_first = self.previous_on_lane[event] is None
                if main is not None and (is_first or self._launch_time(main, lane) == start):
                    self.previous_on_lane[event] = (main, "lane")

    def _link_transfers(self, transfers: Sequence[Transfer]) -> None:
        """Find for each transfer the one before it on its link, and note where transfers end."""
        last_transfer: dict[Hashable, Transfer] = {}
        for transfer in sorted(transfers, key=lambda transfer: (transfer.start, transfer.end)):
            link = self.wire(transfer.source, transfer.target)
            if link in last_transfer:
                self.previous_on_link[id(transfer)] = last_transfer[link]
            last_transfer[link] = self.transfer_by_end[transfer.source, transfer.end] = transfer
            if self.rule is not None and transfer.end > transfer.start:
                communicator = self.rule.communicator(transfer.source, transfer.target)
                for rank in (transfer.source, transfer.target):
                    self.queued_by_end[rank, communicator, transfer.end] = transfer
                if self.rule.is_blocking:
                    self.transfer_by_end[transfer.target, transfer.end] = transfer

    def _launch_time(self, event: int, lane: str) -> float:
        """Return when a main op launches the ops behind it that run on another lane."""
        # A collective starts between two main ops, a copy during one.
        return self.events[event].end if lane == "wire" else self.events[event].start

    def _event_of(self, position: int, event: int) -> int:
        """Return the event of the op at a position, in the round of another event."""
        return event - event % self.ops_per_round + position

    def cause_of_arrival(self, value: Value, rank: int, iteration: int) -> _Cause:
        """Return the cause that a reader of a value waits for: its transfer, or its writer."""
        if (value, rank) in self.arrivals[iteration]:
            transfer = self.arrivals[iteration][value, rank][-1]
            return _Cause(transfer.end, transfer, "data")
        if value in self.position_by_value:
            event = iteration * self.ops_per_round + self.position_by_value[value]
            if event in self.transfer_by_recv and not self.receive_seconds:
                return _Cause(self.transfer_by_recv[event].end, self.transfer_by_recv[event], "data")
            return _Cause(self.events[event].end, event, "data")
        return self.cause_of_update(value, iteration)

    def cause_of_update(self, value: Value, iteration: int) -> _Cause:
        """Return the cause that an input waits for: the start, or the stage's gradients of the iteration before."""
        updates = self.updates.get(value, ()) if iteration else ()
        causes = [self.cause_of_arrival(gradient, home, iteration - 1) for gradient, home in updates]
        return max(causes, key=lambda cause: cause.time, default=_Cause(0.0, None, "start"))

    def find_cause(self, activity: int | Transfer) -> _Cause:
        """Return the cause that held an event or a transfer back."""
        if isinstance(activity, Transfer):
            return self._cause_of_transfer(activity)
        # 1. The last of what it reads. A RECV waits for its transfer, not for the SEND.
        op, start, _ = self.events[activity]
        causes = [self.cause_of_arrival(value, op.rank, activity // self.ops_per_round) for value in op.reads]
        if activity in self.transfer_by_recv:
            causes = [_Cause(self.transfer_by_recv[activity].end, self.transfer_by_recv[activity], "data")]
        cause = max(causes, key=lambda cause: cause.time, default=_Cause(0.0, None, "start"))
        # 2. The op before it on its lane, if that ended later.
        previous = self.previous_on_lane[activity]
        if previous is None:
            return cause
        previous_event, reason = previous
        is_behind_main = reason == "lane" and lane_of(self.events[previous_event].op) == "main"
        previous_end = min(self.events[previous_event].end, start)
        free = self._launch_time(previous_event, lane_of(op)) if is_behind_main else previous_end
        # 3. A transfer that keeps its sender busy (a blocking one: both ranks) has no event on the main lane.
        transfer = self.transfer_by_end.get((op.rank, start)) if self.sender_waits and reason == "rank" else None
        if transfer is not None and free < start > cause.time:
            return _Cause(start, transfer, "rank")
        return _Cause(free, previous_event, reason) if free >= cause.time else cause

    def _cause_of_transfer(self, transfer: Transfer) -> _Cause:
        # Its value, then what else could keep it: both ranks and their queue, or a busy sender, or its link.
        iteration, start = self.round_by_id[id(transfer)], transfer.start
        if transfer.value in self.position_by_value:
            cause = self.cause_of_arrival(transfer.value, transfer.source, iteration)
        else:
            cause = self.cause_of_update(transfer.value, iteration)
        if self.send_seconds:
            sender = self.send_by_id[id(transfer)]
            cause = _Cause(self.events[sender].start + self.send_seconds, sender, "data")
        if cause.time >= start:
            return cause
        if self.rule is not None:
            return self._cause_of_meeting(transfer, self.rule) or cause
        if self.sender_is_busy and not self.send_seconds:
            if (transfer.source, start) in self.transfer_by_end:
                return _Cause(start, self.transfer_by_end[transfer.source, start], "rank")
            for event, (op, _, end) in enumerate(self.events):
                if op.rank == transfer.source and end == start and lane_of(op) == "main":
                    return _Cause(start, event, "rank")
        return self._cause_of_link(transfer) or cause

    def _cause_of_link(self, transfer: Transfer) -> _Cause | None:
        previous = self.previous_on_link.get(id(transfer))
        return None if previous is None else _Cause(transfer.start, previous, "link")

    def _cause_of_meeting(self, transfer: Transfer, rule: MessageRule) -> _Cause | None:
        """Return the cause of a transfer under a rule of messages that left after its value was there.

        What ended just then held it back: a message in the queue of its communicator, or work of either rank.
        """
        communicator = rule.communicator(transfer.source, transfer.target)
        for rank in (transfer.source, transfer.target):
            previous = self.queued_by_end.get((rank, communicator, transfer.start))
            if previous is not None:
                return _Cause(transfer.start, previous, "queue")
        sides: tuple[tuple[int, Reason], ...] = ((transfer.source, "rank"), (transfer.target, "receiver"))
        for rank, reason in sides:
            if (rank, transfer.start) in self.work_by_end:
                return _Cause(transfer.start, self.work_by_end[rank, transfer.start], reason)
        return self._cause_of_link(transfer)

    def path(self) -> tuple[PathStep, ...]:
        """Return the chain of causes that ends with the last work, from the start on."""
        work = [event for event, (op, start, end) in enumerate(self.events) if is_work(op, end - start)]
        if not work:
            return ()
        current: int | Transfer | None = max(work, key=lambda event: self.events[event].end)
        end = self.events[current].end
        steps: list[PathStep] = []
        while current is not None:
            cause = self.find_cause(current)
            subject = current if isinstance(current, Transfer) else self.events[current].op
            start = current.start if isinstance(current, Transfer) else self.events[current].start
            steps.append(PathStep(subject, start, end, cause.reason if cause.activity is not None else "start"))
            end, current = start, cause.activity
        return tuple(reversed(steps))

    def waits(self, ranks: int, makespan: float) -> tuple[Wait, ...]:
        """Return the times at which a rank's main lane is idle, rank by rank."""
        # 1. What occupies each main lane: work, SENDs and RECVs that take time, and transfers that keep a rank.
        rows: list[list[tuple[float, float, int | None]]] = [[] for _ in range(ranks)]
        for event, (op, start, end) in enumerate(self.events):
            if is_work(op, end - start):
                rows[op.rank].append((start, end, event))
        for event, (op, start, end) in enumerate(self.events):
            if start < makespan and self.seconds_by_kind.get(op.kind):
                is_buffered = op.kind == "SEND" and not self.sender_is_busy
                rows[op.rank].append((start, start + self.send_seconds if is_buffered else end, event))
        if self.sender_waits and not self.send_seconds:
            for (rank, _), transfer in self.transfer_by_end.items():
                rows[rank].append((transfer.start, transfer.end, None))
        # 2. The gaps between them.
        waits: list[Wait] = []
        for rank, row in enumerate(rows):
            free = 0.0
            for start, end, event in sorted(row, key=lambda work: work[:2]):
                if start > free:
                    waits.append(Wait(rank, free, start, *self._waiter_and_writer(event)))
                free = max(free, end)
            if makespan > free:
                waits.append(Wait(rank, free, makespan, None, None, None))
        return tuple(waits)

    def _waiter_and_writer(self, event: int | None) -> tuple[Op | None, Op | None, int | None]:
        """Return the op behind an idle time, and the op and rank that it waits for."""
        if event is None:
            return None, None, None
        waiter, (_, activity, reason) = self.events[event].op, self.find_cause(event)
        # An op of no time can stand between: it waited in the rank's order, so its own cause is what counts.
        while reason == "rank" and isinstance(activity, int):
            _, activity, reason = self.find_cause(activity)
        # A measured timeline has SEND and RECV but no transfers: it is what they carry that is waited for.
        while isinstance(activity, int) and self.events[activity].op.kind in ("RECV", "SEND"):
            activity = self.position_by_value.get(self.events[activity].op.reads[0])
        source = activity.source if isinstance(activity, Transfer) else None
        activity = self.position_by_value.get(activity.value) if isinstance(activity, Transfer) else activity
        if activity is None:
            return waiter, None, source
        return waiter, self.events[activity].op, self.events[activity].op.rank if source is None else source


def _describe(subject: Op | Transfer) -> str:
    return subject.cell if isinstance(subject, Op) else f"{subject.value} {subject.source} > {subject.target}"


def sorted_transfers(transfers: Iterable[Transfer]) -> tuple[Transfer, ...]:
    """Sort transfers by time, then link, then value."""
    return tuple(sorted(transfers, key=lambda move: (move.start, move.end, move.source, move.target, str(move.value))))


# Longest paths through a program's data, whatever the order of its ranks.

OpWaits = Sequence[tuple[int, float]]
"""The ops that an op reads from, each with the seconds on the way; -1 is the caller."""


def travel_seconds(costs: Costs, value: Value, source: int, target: int) -> float:
    """Return the seconds that a value takes from one rank to another, alone on its link."""
    return costs.latency(source, target) + costs.link_seconds(value, source, target) if source != target else 0.0


def data_waits(program: Program, costs: Costs) -> list[list[tuple[int, float]]]:
    """Return for each op the ops that it reads from, with the seconds on the way; inputs at home are left out."""
    homes = {end.value: end.homes for end in program.inputs}

    def op_waits(op: Op, sources: Sequence[int]) -> Iterator[tuple[int, float]]:
        for value, source in zip(op.reads, sources, strict=True):
            # A SEND takes what it reads at once: its RECV has the way, and the bytes after a cast.
            if op.kind == "RECV":
                sender = program.ops[source]
                yield source, travel_seconds(costs, sent_value(sender), sender.rank, op.rank)
                continue
            ranks = homes[value] if source < 0 else (program.ops[source].rank,)
            seconds = 0.0 if op.rank in ranks else travel_seconds(costs, value, min(ranks), op.rank)
            if source >= 0 or seconds:
                yield source, seconds

    pairs = zip(program.ops, program.sources, strict=True)
    return [[] if op.kind == "FREE" else [*op_waits(op, sources)] for op, sources in pairs]


def waits_between_ops(
    program: Program, costs: Costs, is_selected: Callable[[Op], bool]
) -> tuple[list[int], list[dict[int, float]]]:
    """Return the positions of the selected ops, and for each the selected ops that it waits for.

    Ops between them, such as SENDs and sums, are contracted: only the longest way through them is kept. Selected
    ops are numbered in their order, -1 is the caller.
    """
    number_by_position: dict[int, int] = {}
    waits_through: dict[int, dict[int, float]] = {-1: {-1: 0.0}}
    waits_of_named: list[dict[int, float]] = []
    for position, (op, sources) in enumerate(zip(program.ops, data_waits(program, costs), strict=True)):
        waits: dict[int, float] = {}
        for source, travel in sources:
            is_source_selected = source in number_by_position
            seconds_by_number = {number_by_position[source]: 0.0} if is_source_selected else waits_through[source]
            for number, seconds in seconds_by_number.items():
                waits[number] = max(waits.get(number, 0.0), seconds + travel)
        if is_selected(op):
            number_by_position[position] = len(number_by_position)
            waits_of_named.append(waits)
        else:
            waits_through[position] = waits
    return [*number_by_position], waits_of_named


def earliest_starts(waits: Sequence[OpWaits], seconds: Sequence[float]) -> list[float]:
    """Return the earliest start of each op, whatever the order of ranks: the longest path to it through data."""
    starts: list[float] = []
    for waits_of_op in waits:
        ready = (travel + (starts[source] + seconds[source] if source >= 0 else 0.0) for source, travel in waits_of_op)
        starts.append(max(ready, default=0.0))
    return starts


def shortest_tails(waits: Sequence[OpWaits], seconds: Sequence[float], works: Sequence[bool]) -> list[float]:
    """Return the least seconds from the end of each op to the end of the last work that needs it."""
    tails = [float("-inf")] * len(seconds)  # -inf: no work needs it yet, which sums keep
    for position in reversed(range(len(seconds))):
        seconds_left = max(tails[position], 0.0) if works[position] else tails[position]
        for source, travel in waits[position]:
            if source >= 0:
                tails[source] = max(tails[source], travel + seconds[position] + seconds_left)
    return [max(tail, 0.0) for tail in tails]


class DataGraph:
    """A program as a graph of seconds: of its ops and of the ways between them, whatever the order of ranks."""

    def __init__(self, program: Program, costs: Costs) -> None:
        self.ops = program.ops
        self.seconds = [0.0 if op.kind in ("SEND", "RECV", "FREE") else costs.seconds(op) for op in self.ops]
        self.waits = data_waits(program, costs)
        works = [is_work(op, seconds) for op, seconds in zip(self.ops, self.seconds, strict=True)]
        self.starts = earliest_starts(self.waits, self.seconds)
        self.tails = shortest_tails(self.waits, self.seconds, works)
        self.rank_ops: defaultdict[int, list[int]] = defaultdict(list)
        for position in compress(range(len(self.ops)), works):
            self.rank_ops[self.ops[position].rank].append(position)

    def window(self, rank: int, without_weights: bool = False) -> tuple[float, float, float]:
        """Return the earliest start, the work and the shortest tail of a rank's ops."""
        positions = self.rank_ops[rank]
        if without_weights:
            positions = [position for position in positions if self.ops[position].kind != "W"]
        if not positions:
            return 0.0, 0.0, 0.0
        work = sum(self.seconds[position] for position in positions)
        # The window of any subset of the ops is a bound. Leaving out ops of no time narrows it and keeps the work.
        if work:
            positions = [position for position in positions if self.seconds[position]]
        head, tail = (min(seconds[position] for position in positions) for seconds in (self.starts, self.tails))
        return head, work, tail

    def idle_around(self, rank: int) -> float:
        """Return the seconds before the first op and after the last op of a rank, including ops of no time."""
        positions = self.rank_ops[rank]
        head = min((self.starts[position] for position in positions), default=0.0)
        return head + min((self.tails[position] for position in positions), default=0.0)
