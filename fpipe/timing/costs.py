"""Costs: seconds for an op of each kind and stage, seconds from rank to rank, bytes of a value."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields
from inspect import Signature, signature
from typing import Any, Literal

from fpipe.limits import whole
from fpipe.program import Op, Program, Value, is_exchange, kind_of, lane_of
from fpipe.timing.amounts import (
    EXTRA,
    Bytes,
    Storages,
    at_stage,
    check_bytes,
    checked_rate,
    checked_seconds,
    listed,
    of_links,
    on_link,
    scattered,
    storages_of,
)
from fpipe.timing.cluster import Cluster
from fpipe.timing.messages import MESSAGES

Messages = Literal["eager", "rendezvous", "nccl", "nccl_pairs", "nccl_directions"]
PerStage = float | Sequence[float]
Link = tuple[int, int]
PerLink = float | Mapping[Link, float] | Callable[[int, int], float]


@dataclass(frozen=True)
class Costs:
    """Seconds of one op for one microbatch (and slice), a number for all stages or one for each; and what moving takes.

    A value on its way from rank a to rank b leaves when it is there and its link is free, keeps the link for
    bytes/bandwidth seconds, and arrives `transfer` seconds after that. Without a bandwidth a link carries any number of
    values at once. Ranks may be busy with it too: the sender for `send` seconds before it leaves, the reader for
    `receive` seconds once it is there and the rank has time.

    Args:
        forward, backward_input, backward_weight: of F, I and W.
        recompute: of R; by default what F costs.
        backward: of a full backward B; by default what I and W cost together.
        transfer: latency from one rank to another, in seconds: a number, `{(from, to): seconds}` or
            `f(from, to) -> seconds`.
        bandwidth: bytes a second of a link, in the same three forms; needs `bytes`.
        sender: "free" goes on with its next op while a value leaves; "busy" does nothing else until it has arrived.
        messages: how a transfer waits, one of `MESSAGES`: "eager", for nobody; "rendezvous", until the other rank has
            come to it, and both stay until it has arrived; "nccl", in one queue of each rank, and nobody stays;
            "nccl_pairs", in a queue for each other rank; "nccl_directions", in two. See `fpipe.simulate`.
        send, receive: seconds for which a rank does nothing else when it sends a value, and when it takes one.
        pair: what a PAIR costs: the "sum" of its parts, their "max", or `f(op) -> seconds`.
        offload, load: of OFFLOAD and LOAD, which run beside the main work; by default a LOAD costs an OFFLOAD.
        exchange: of F, R, B and I of a stage that is a collective (`fpipe.exchange`), on a lane of its own.
        reduce: of a REDUCE of gradients over data-parallel replicas, which runs beside the main work too; one of a
            number, such as the loss, takes only what a cluster says.
        gather, scatter: of a GATHER of sharded parameters and a SCATTER of their gradients, which do too. To these and
            exchanges a cluster with replicas adds what the bytes of the whole value take around its ring.
        update: of an UPDATE of a stage's parameters; a leaf that stages share has one of its own.
        host_bandwidth: bytes a second to and from the host, added to these; needs `bytes`.
        cluster: what it runs on, a `Cluster` or its text: the speed of ranks and their links, in place of `transfer`
            and `bandwidth`.
        bytes: of a value: `{name: bytes}` (or one number for each stage), `f(value) -> bytes`, or `fpipe.Sizes`. With
            it a timeline's peaks are bytes.

    Raises:
        ValueError: a cost that is no number, negative, infinite or NaN; a bandwidth of 0, or without bytes; a table
            whose keys are no links.

    >>> Costs(forward=2, backward_weight=[1, 3]).forward
    2
    >>> Costs(transfer={(0, 1): 0.5}, bandwidth=4.0, bytes={"y": 8}).carrying(Value("y", 0, 0), 0, 1)
    2.0
    """

    forward: PerStage = 1
    backward_input: PerStage = 1
    backward_weight: PerStage = 1
    recompute: PerStage | None = None
    transfer: PerLink = 0
    _: KW_ONLY
    bandwidth: PerLink | None = None
    sender: Literal["free", "busy"] = "free"
    messages: Messages = "eager"
    pair: Literal["sum", "max"] | Callable[[Op], float] = "sum"
    offload: PerStage = 0
    load: PerStage | None = None
    host_bandwidth: float | None = None
    bytes: Bytes | None = None
    backward: PerStage | None = None
    reduce: PerStage = 0
    gather: PerStage = 0
    scatter: PerStage = 0
    update: PerStage = 0
    exchange: PerStage = 0
    cluster: Cluster | None = None  # a text is parsed
    send: float = 0
    receive: float = 0

    def __new__(cls, *given: Any, **named: Any) -> Costs:
        """Say what letters are for: the papers' are of a whole rank."""
        letters = [letter for letter in _LETTERS if letter in named]
        if letters:
            raise TypeError(
                f"{' and '.join(letters)} are seconds of a whole rank: Costs.per_rank({letters[0]}=...). Costs are of "
                "one stage's op, by forward=, backward_input=, backward_weight=, recompute= and transfer=."
            )
        return super().__new__(cls)

    @classmethod
    def per_rank(
        cls, F: float, B: float, W: float, *, stages: int = 1, slices: int = 1, R: float | None = None, c: float = 0
    ) -> Costs:
        """Costs as papers tell them: of a whole rank's share of a microbatch, in the letters that they use.

        Args:
            F, B, W: seconds of the forward, the input gradient and the weight gradient of all stages of a rank.
            stages: how many stages a rank has (chunks), among which these are shared out.
            slices: into how many slices a microbatch's sequences are cut.
            R: of a recompute; by default what F costs.
            c: seconds from one rank to another, which are not shared out.

        >>> Costs.per_rank(F=10, B=12, W=8, stages=2, c=1)
        Costs(forward=5.0, backward_input=6.0, backward_weight=4.0, recompute=None, transfer=1)
        """
        for word, parts in (("stages", stages), ("slices", slices)):
            whole(word, parts)
        share = stages * slices
        return cls(F / share, B / share, W / share, None if R is None else R / share, c)

    def __repr__(self) -> str:
        """Show the first five fields, and others where they are not the default."""
        shown = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)[:5]]
        for field in fields(self)[5:]:
            value = getattr(self, field.name)
            if value != field.default:
                text = repr(value)  # bytes of a step may be thousands of numbers
                shown.append(f"{field.name}={text if len(text) <= 60 else f'<{type(value).__name__}>'}")
        return f"Costs({', '.join(shown)})"

    def __post_init__(self) -> None:
        for word in _PER_STAGE:
            field = getattr(self, word)
            if field is not None or word not in ("recompute", "load", "backward"):
                for cost in listed(field):
                    checked_seconds(word, cost)
        for word in ("send", "receive"):
            checked_seconds(word, getattr(self, word))
        for cost in of_links("transfer", "seconds", self.transfer):
            checked_seconds("transfer", cost)
        on_links = () if self.bandwidth is None else of_links("bandwidth", "bytes a second", self.bandwidth)
        of_host = () if self.host_bandwidth is None else (self.host_bandwidth,)
        for word, rates in (("bandwidth", on_links), ("host_bandwidth", of_host)):
            for rate in rates:
                checked_rate(word, rate)
            if getattr(self, word) is not None and self.bytes is None:
                raise ValueError(f"a {word} needs the bytes of values; say bytes= too, such as fpipe.sizes(...).")
        text: object = self.cluster
        if isinstance(text, str):
            object.__setattr__(self, "cluster", Cluster.parse(text))
        if self.cluster is not None:
            if not isinstance(self.cluster, Cluster):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"a cluster is an fpipe.Cluster or its text, found {self.cluster!r}.")
            if self.transfer != 0 or self.bandwidth is not None:
                raise ValueError("a cluster says how long transfers take; leave out transfer= and bandwidth=.")
            if self.cluster.has_bandwidth and self.bytes is None:
                raise ValueError("a cluster's bandwidths need the bytes of values; say Costs(bytes=...) too.")
        if self.sender not in ("free", "busy"):
            raise ValueError(f'a sender is "free" or "busy", found {self.sender!r}.')
        if self.messages not in MESSAGES:
            raise ValueError(f"messages is one of {', '.join(map(repr, MESSAGES))}; found {self.messages!r}.")
        if self.messages != "eager" and (self.sender == "busy" or self.send or self.receive):
            mend = "leave out sender=, send= and receive=."
            raise ValueError(f'messages="{self.messages}" says how long ranks stay with a transfer; {mend}')
        if not callable(self.pair) and self.pair not in ("sum", "max"):
            raise ValueError(f'a pair costs the "sum" or the "max" of its parts, or f(op); found {self.pair!r}.')
        check_bytes(self.bytes)

    @property
    def busies(self) -> bool:
        """Whether what travels keeps ranks from other work, or waits for them."""
        return self.sender == "busy" or self.send > 0 or self.receive > 0 or self.messages != "eager"

    def seconds(self, op: Op) -> float:
        """How long an op takes on its lane; what keeps to its data takes nothing."""
        seconds = self._seconds(op)
        if self.cluster is None or not seconds or lane_of(op) != "main":
            return seconds
        return seconds / self.cluster.speed_of(op.rank)

    def _seconds(self, op: Op) -> float:
        """Seconds of an op on a rank of speed 1."""
        if op.parts:
            if callable(self.pair):
                return checked_seconds(f"pair({op.cell})", self.pair(op))
            exchanges = sum(self._seconds(part) for part in op.parts if is_exchange(part))
            parts = [self._seconds(part) for part in op.parts if not is_exchange(part)]
            return max(exchanges, (sum if self.pair == "sum" else max)(parts) if parts else 0.0)
        kind, stage = op.kind, op.stage or 0
        if is_exchange(op):
            free = kind in _FREE.get(dict(op.how)["exchange"], "W")
            return 0.0 if free else self._of("exchange", stage) + self._exchanged(op)
        if op.how and kind in "BI":  # it computes its stage again itself
            return self._seconds(op._replace(how=())) + self._seconds(op._replace(kind="R"))
        if kind == "B" and self.backward is None:
            return self._of("backward_input", stage) + self._of("backward_weight", stage)
        if (word := _OF_KIND.get(kind)) is not None:
            return at_stage(getattr(self, word), stage, word)
        if kind == "R":
            return self._of("forward" if self.recompute is None else "recompute", stage)
        if kind in ("OFFLOAD", "LOAD"):
            fixed = self._of("offload" if kind == "OFFLOAD" or self.load is None else "load", stage)
            moved = sum(map(self.size, op.reads)) / self.host_bandwidth if self.host_bandwidth else 0.0
            return fixed + moved
        if kind in ("REDUCE", "GATHER", "SCATTER"):
            fixed = self._of(kind.lower(), stage) if kind != "REDUCE" or adds_gradients(op) else 0.0
            return fixed + self._around(op)
        if kind in ("SEND", "RECV"):
            return self.send if kind == "SEND" else self.receive
        if kind not in EXTRA:
            raise ValueError(f"{kind} has no cost; say fpipe.register_cost({kind!r}, seconds), 0 if it takes no time.")
        cost = EXTRA[kind]
        return checked_seconds(f"the cost of {op.cell}", cost(op)) if callable(cost) else cost

    def _of(self, word: str, stage: int) -> float:
        return at_stage(getattr(self, word), stage, word)

    def _around(self, op: Op) -> float:
        """Seconds that a collective over replicas takes on their links; a REDUCE scatters and gathers."""
        if self.cluster is None or self.cluster.replicas == 1:
            return 0.0
        rounds = 2 if op.kind == "REDUCE" else 1
        has_storages = hasattr(self.bytes, "storages")
        if not has_storages and self.cluster.across.bandwidth == math.inf:
            return self.cluster.around(0.0) * rounds
        sent = op.writes[0] if op.kind == "GATHER" else scattered(op) if has_storages else op.reads[0]
        size = self.size(sent)
        if has_storages and not size:  # nobody reads what would be gathered
            return 0.0
        return self.cluster.around(size) * rounds

    def _exchanged(self, op: Op) -> float:
        """Seconds that the collective of a stage takes on the links between replicas."""
        if self.cluster is None or self.cluster.replicas == 1:
            return 0.0
        has_bandwidth = self.cluster.across.bandwidth < math.inf
        flows = [[value for value in values if value.name in _FLOWS] for values in (op.reads, op.writes)]
        read, written = (sum(map(self.size, values)) if has_bandwidth else 0.0 for values in flows)
        how = dict(op.how)["exchange"]
        if how == "ring":
            return self.cluster.across.latency + read / self.cluster.across.bandwidth
        return self.cluster.around(max(read, written)) * (2 if how in ("all_reduce", "copy", "reduce") else 1)

    def latency(self, source: int, target: int) -> float:
        """Seconds on the way from one rank to another."""
        if self.cluster is not None:
            return self.cluster.link(source, target).latency
        return checked_seconds("transfer", on_link(self.transfer, source, target, "transfer"))

    def carrying(self, value: Value, source: int, target: int) -> float:
        """Seconds for which a value keeps its link from other values."""
        if self.cluster is not None:
            hosted = max(source, target) >= len(self.cluster.speed)
            rate = (self.host_bandwidth or math.inf) if hosted else self.cluster.link(source, target).bandwidth
            return self.size(value) / rate if rate < math.inf else 0.0
        if self.bandwidth is None:
            return 0.0
        return self.size(value) / checked_rate("bandwidth", on_link(self.bandwidth, source, target, "bandwidth"))

    def wire(self, source: int, target: int) -> Hashable:
        """The wire from one rank to another, which carries one value at a time."""
        return (source, target) if self.cluster is None else self.cluster.wire(source, target)

    def size(self, value: Value) -> float:
        """Bytes of a value when it travels."""
        sizes: Any = self.bytes
        return sizes.size(value) if hasattr(sizes, "storages") else sum(self.storages(value).values())

    def storages(self, value: Value) -> Storages:
        """The storages of a value. Where only its bytes are known, it lies alone, with its copies, in one."""
        return storages_of(self.bytes, value)


# `help` and notebooks show the fields, and not the `__new__` that explains letters.
_FIELDS = [*signature(Costs.__init__).parameters.values()][1:]
Costs.__signature__ = Signature(_FIELDS)  # pyright: ignore[reportAttributeAccessIssue] # one that inspect reads


_FLOWS = ("y", "again", "dx", "dy")
_FREE = {"copy": "FRW", "scatter": "FRW", "reduce": "BIW", "gather": "BIW"}
"""The ops of an exchange, of one that has a collective in one direction only, that take no time; by default W."""
_LETTERS = ("F", "B", "I", "W", "R", "c")
_PER_STAGE = (
    *("forward", "backward_input", "backward_weight", "recompute", "offload", "load", "backward"),
    *("reduce", "gather", "scatter", "update", "exchange"),
)
_OF_KIND = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "UPDATE": "update"}


def adds_gradients(op: Op) -> bool:
    """Whether a REDUCE adds up gradients of a stage over replicas, and not a number."""
    return op.writes[0].name == "all"


def computing(program: Program) -> set[int]:
    """The ranks that compute; a host only keeps what travels."""
    return {rank for ranks in program.placement for rank in (ranks if isinstance(ranks, tuple) else (ranks,))}


def the_costs(costs: object, program: Program | None = None) -> Costs:
    """Check costs, by default one second for each F, I and W, and whether their lists are long enough for a program."""
    if costs is None:
        return Costs()
    if not isinstance(costs, Costs):
        raise TypeError(f"costs is an fpipe.Costs, such as fpipe.Costs(forward=2); found {type(costs).__name__}.")
    if program is None:
        return costs
    most = math.inf if costs.cluster is None else len(costs.cluster.speed)
    if program.ranks > most and max(computing(program)) >= most:
        raise ValueError(f"the program has {program.ranks} ranks, and the cluster {most}.")
    for word in _PER_STAGE:
        length = len([*listed(getattr(costs, word))])
        if isinstance(getattr(costs, word), Sequence) and length < program.stages:
            found = f"{word} lists {length} costs, but the program has a stage {length}"
            raise ValueError(f"{found}; give one for each of its {program.stages} stages.")
    return costs


class Ticks(Costs):
    """The clock that fixes a program's global order: F, B, I, W and R take one tick each."""

    def seconds(self, op: Op) -> float:
        """One tick, or none for what keeps to its data."""
        return kind_of(op.kind).time
