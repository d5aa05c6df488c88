"""Costs: seconds for an op of each kind and stage, seconds from rank to rank, bytes of a value.

    op     --seconds-->       on its lane, on its rank's speed
    value  --link_seconds-->  on a link, which it keeps from other values   --latency-->  until it arrives
    value  --size-->          bytes when it travels      --storages-->     bytes while it is held

All checks of numbers are here and in `amounts.py`, where costs enter; simulation trusts them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, fields, replace
from inspect import Signature, signature
from typing import Any, Literal

from fpipe.limits import check_whole_number
from fpipe.program import Op, Program, Value, is_exchange, kind_of, lane_of
from fpipe.timing.amounts import (
    EXTRA_COSTS,
    Bytes,
    Storages,
    check_bytes,
    checked_rate,
    checked_seconds,
    is_row,
    number_at_op,
    number_on_link,
    numbers_of_links,
    numbers_of_ops,
    numbers_of_stages,
    scattered_value,
    storages_of_value,
)
from fpipe.timing.cluster import Cluster
from fpipe.timing.messages import MESSAGES

Messages = Literal["eager", "rendezvous", "nccl", "nccl_pairs", "nccl_directions"]
PerStage = float | Sequence[float]
PerMicrobatch = PerStage | Sequence[Sequence[float]] | Callable[[int, int], float]
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
        forward, backward_input, backward_weight: of F, I and W; or `[stage][microbatch]`, or `f(stage, microbatch)`.
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
    >>> Costs(transfer={(0, 1): 0.5}, bandwidth=4.0, bytes={"y": 8}).link_seconds(Value("y", 0, 0), 0, 1)
    2.0
    """

    forward: PerMicrobatch = 1
    backward_input: PerMicrobatch = 1
    backward_weight: PerMicrobatch = 1
    recompute: PerMicrobatch | None = None
    transfer: PerLink = 0
    _: KW_ONLY
    bandwidth: PerLink | None = None
    sender: Literal["free", "busy"] = "free"
    messages: Messages = "eager"
    pair: Literal["sum", "max"] | Callable[[Op], float] = "sum"
    offload: PerMicrobatch = 0
    load: PerMicrobatch | None = None
    host_bandwidth: float | None = None
    bytes: Bytes | None = None
    backward: PerMicrobatch | None = None
    reduce: PerStage = 0
    gather: PerStage = 0
    scatter: PerStage = 0
    update: PerStage = 0
    exchange: PerMicrobatch = 0
    cluster: Cluster | None = None  # a text is parsed
    send: float = 0
    receive: float = 0

    def __new__(cls, *args: Any, **kwargs: Any) -> Costs:
        """Refuse the letters of papers, which are costs of a whole rank."""
        letters = [letter for letter in _LETTERS if letter in kwargs]
        if letters:
            raise TypeError(
                f"{' and '.join(letters)} are seconds of a whole rank: Costs.per_rank({letters[0]}=...). Costs are of "
                "one stage's op: forward=, backward_input=, backward_weight=, ..."
            )
        return super().__new__(cls)

    @classmethod
    def per_rank(
        cls, F: float, B: float, W: float, *, stages: int = 1, slices: int = 1, R: float | None = None, c: float = 0
    ) -> Costs:
        """Make costs from the letters of papers, which are for a whole rank's share of a microbatch.

        Args:
            F, B, W: seconds of the forward, the input gradient and the weight gradient of all stages of a rank.
            stages: how many stages a rank has (chunks), among which these are shared out.
            slices: into how many slices a microbatch's sequences are cut.
            R: of a recompute; by default what F costs.
            c: seconds from one rank to another, which are not shared out.

        >>> Costs.per_rank(F=10, B=12, W=8, stages=2, c=1)
        Costs(forward=5.0, backward_input=6.0, backward_weight=4.0, recompute=None, transfer=1)
        """
        for name, count in (("stages", stages), ("slices", slices)):
            check_whole_number(name, count)
        # Each stage and slice of a rank takes an equal part of its seconds.
        share = stages * slices
        return cls(F / share, B / share, W / share, None if R is None else R / share, c)

    def __repr__(self) -> str:
        field_texts = [f"{field.name}={getattr(self, field.name)!r}" for field in fields(self)[:5]]
        for field in fields(self)[5:]:
            value = getattr(self, field.name)
            if value != field.default:
                text = repr(value)  # bytes of a step may be thousands of numbers
                field_texts.append(f"{field.name}={text if len(text) <= 60 else f'<{type(value).__name__}>'}")
        return f"Costs({', '.join(field_texts)})"

    def __post_init__(self) -> None:
        # 1. Numbers: seconds, then rates.
        for field_name in _PER_STAGE_FIELDS:
            field_costs = getattr(self, field_name)
            if field_costs is not None or field_name not in ("recompute", "load", "backward"):
                for cost in numbers_of_ops(field_costs):
                    checked_seconds(field_name, cost)
        for field_name in ("send", "receive"):
            checked_seconds(field_name, getattr(self, field_name))
        for cost in numbers_of_links("transfer", "seconds", self.transfer):
            checked_seconds("transfer", cost)
        bandwidths = () if self.bandwidth is None else numbers_of_links("bandwidth", "bytes a second", self.bandwidth)
        host_bandwidths = () if self.host_bandwidth is None else (self.host_bandwidth,)
        for field_name, rates in (("bandwidth", bandwidths), ("host_bandwidth", host_bandwidths)):
            for rate in rates:
                checked_rate(field_name, rate)
            if getattr(self, field_name) is not None and self.bytes is None:
                raise ValueError(f"a {field_name} needs bytes of values: say bytes=fpipe.sizes(...).")
        # 2. The cluster, which says alone how long transfers take.
        cluster_text: object = self.cluster
        if isinstance(cluster_text, str):
            object.__setattr__(self, "cluster", Cluster.parse(cluster_text))
        if self.cluster is not None:
            if not isinstance(self.cluster, Cluster):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise TypeError(f"a cluster is an fpipe.Cluster or its text, found {self.cluster!r}.")
            if self.transfer != 0 or self.bandwidth is not None:
                raise ValueError("a cluster has links: leave out transfer= and bandwidth=.")
            if self.cluster.has_bandwidth and self.bytes is None:
                raise ValueError("a cluster's bandwidths need bytes of values: say Costs(bytes=...).")
        # 3. Words.
        if self.sender not in ("free", "busy"):
            raise ValueError(f'a sender is "free" or "busy", found {self.sender!r}.')
        if self.messages not in MESSAGES:
            raise ValueError(f"messages is one of {', '.join(map(repr, MESSAGES))}; found {self.messages!r}.")
        if self.messages != "eager" and (self.sender == "busy" or self.send or self.receive):
            remedy = "leave out sender=, send= and receive=."
            raise ValueError(f'messages="{self.messages}" says how long ranks stay with a transfer; {remedy}')
        if not callable(self.pair) and self.pair not in ("sum", "max"):
            raise ValueError(f'a pair costs "sum", "max" or f(op); found {self.pair!r}.')
        check_bytes(self.bytes)

    @property
    def occupies_ranks(self) -> bool:
        """Whether transfers keep ranks from other work, or wait for them."""
        return self.sender == "busy" or self.send > 0 or self.receive > 0 or self.messages != "eager"

    @property
    def vary_by_microbatch(self) -> bool:
        """Whether some ops of one kind and stage may take longer than others."""
        costs_of_kinds = (getattr(self, field_name) for field_name in _PER_STAGE_FIELDS)
        return any(callable(costs) or any(map(is_row, numbers_of_stages(costs))) for costs in costs_of_kinds)

    def mean_microbatch(self) -> Costs:
        """Return the costs of the mean microbatch, for a choice among groups of stages: a sum of means orders them.

        Raises:
            ValueError: a function of microbatches, whose number is not known.

        >>> Costs(forward=[[1, 3], 4]).mean_microbatch().forward
        [2.0, 4]
        """
        means = dict[str, Any]()
        for field_name in _PER_STAGE_FIELDS if self.vary_by_microbatch else ():
            costs = getattr(self, field_name)
            if callable(costs):
                raise ValueError(f"{field_name} is a function: list its seconds, [stage][microbatch], for their mean.")
            if is_row(costs):
                means[field_name] = [sum(row) / len(row) if is_row(row) else row for row in costs]
        return replace(self, **means)

    def seconds(self, op: Op) -> float:
        """Return the seconds of an op on its lane."""
        # A slow rank computes slowly; copies and collectives on other lanes depend on links.
        seconds = self._seconds_at_unit_speed(op)
        if self.cluster is None or not seconds or lane_of(op) != "main":
            return seconds
        return seconds / self.cluster.speed_of(op.rank)

    def _seconds_at_unit_speed(self, op: Op) -> float:
        if op.parts:
            if callable(self.pair):
                return checked_seconds(f"pair({op.cell})", self.pair(op))
            # An exchange is on a lane of its own, and so always runs at the same time as the computing parts.
            exchange_seconds = sum(self._seconds_at_unit_speed(part) for part in op.parts if is_exchange(part))
            computing = [self._seconds_at_unit_speed(part) for part in op.parts if not is_exchange(part)]
            return max(exchange_seconds, (sum if self.pair == "sum" else max)(computing) if computing else 0.0)
        kind = op.kind
        if is_exchange(op):
            is_free = kind in _FREE_KINDS_BY_EXCHANGE.get(dict(op.options)["exchange"], "W")
            return 0.0 if is_free else self._field_at("exchange", op) + self._exchange_seconds(op)
        # A B or I with options recomputes its stage itself: it costs an R more.
        if op.options and kind in "BI":
            return self._seconds_at_unit_speed(op._replace(options=())) + self._seconds_at_unit_speed(
                op._replace(kind="R")
            )
        if kind == "B" and self.backward is None:
            return self._field_at("backward_input", op) + self._field_at("backward_weight", op)
        if (field_name := _FIELD_BY_KIND.get(kind)) is not None:
            return self._field_at(field_name, op)
        if kind == "R":
            return self._field_at("forward" if self.recompute is None else "recompute", op)
        if kind in ("OFFLOAD", "LOAD"):
            fixed = self._field_at("offload" if kind == "OFFLOAD" or self.load is None else "load", op)
            copying = sum(map(self.size, op.reads)) / self.host_bandwidth if self.host_bandwidth else 0.0
            return fixed + copying
        if kind in ("REDUCE", "GATHER", "SCATTER"):
            fixed = self._field_at(kind.lower(), op) if kind != "REDUCE" or adds_gradients(op) else 0.0
            return fixed + self._ring_seconds(op)
        if kind in ("SEND", "RECV"):
            return self.send if kind == "SEND" else self.receive
        if kind not in EXTRA_COSTS:
            raise ValueError(f"{kind} has no cost; say fpipe.register_cost({kind!r}, seconds).")
        cost = EXTRA_COSTS[kind]
        return checked_seconds(f"the cost of {op.cell}", cost(op)) if callable(cost) else cost

    def _field_at(self, field_name: str, op: Op) -> float:
        return number_at_op(getattr(self, field_name), op, field_name)

    def _ring_seconds(self, op: Op) -> float:
        """Return the seconds that a collective over replicas takes on the links between them."""
        if self.cluster is None or self.cluster.replicas == 1:
            return 0.0
        # A ring all-reduce is a reduce-scatter and an all-gather, each once around the ring.
        rounds = 2 if op.kind == "REDUCE" else 1
        has_storages = hasattr(self.bytes, "storages")
        if not has_storages and self.cluster.across.bandwidth == math.inf:
            return self.cluster.ring_seconds(0.0) * rounds
        # The ring carries the whole value: what a GATHER makes, and what others start from, after a cast.
        value = op.writes[0] if op.kind == "GATHER" else scattered_value(op) if has_storages else op.reads[0]
        size = self.size(value)
        if has_storages and not size:  # nobody reads what would be gathered
            return 0.0
        return self.cluster.ring_seconds(size) * rounds

    def _exchange_seconds(self, op: Op) -> float:
        """Return the seconds that the collective of a stage takes on the links between replicas."""
        if self.cluster is None or self.cluster.replicas == 1:
            return 0.0
        has_bandwidth = self.cluster.across.bandwidth < math.inf
        activations = [[value for value in values if value.name in _ACTIVATIONS] for values in (op.reads, op.writes)]
        bytes_read, bytes_written = (sum(map(self.size, values)) if has_bandwidth else 0.0 for values in activations)
        exchange_kind = dict(op.options)["exchange"]
        # A ring passes its input to the next replica once. Others go around with the whole value, which is the larger
        # of what they read and write; those that sum and give all the result go around twice.
        if exchange_kind == "ring":
            return self.cluster.across.latency + bytes_read / self.cluster.across.bandwidth
        rounds = 2 if exchange_kind in ("all_reduce", "copy", "reduce") else 1
        return self.cluster.ring_seconds(max(bytes_read, bytes_written)) * rounds

    def latency(self, source: int, target: int) -> float:
        """Return the latency from one rank to another, in seconds."""
        if self.cluster is not None:
            return self.cluster.link(source, target).latency
        return checked_seconds("transfer", number_on_link(self.transfer, source, target, "transfer"))

    def link_seconds(self, value: Value, source: int, target: int) -> float:
        """Return the seconds for which a value keeps its link from other values."""
        if self.cluster is not None:
            is_on_host = max(source, target) >= len(self.cluster.speed)  # ranks beyond the cluster's are host memory
            bandwidth = (self.host_bandwidth or math.inf) if is_on_host else self.cluster.link(source, target).bandwidth
            return self.size(value) / bandwidth if bandwidth < math.inf else 0.0
        if self.bandwidth is None:
            return 0.0
        return self.size(value) / checked_rate("bandwidth", number_on_link(self.bandwidth, source, target, "bandwidth"))

    def wire(self, source: int, target: int) -> Hashable:
        """Return the wire from one rank to another, which carries one value at a time."""
        return (source, target) if self.cluster is None else self.cluster.wire(source, target)

    def size(self, value: Value) -> float:
        """Return the bytes of a value when it travels."""
        sizes: Any = self.bytes
        return sizes.size(value) if hasattr(sizes, "storages") else sum(self.storages(value).values())

    def storages(self, value: Value) -> Storages:
        """Return the storages of a value, as `storages_of_value`."""
        return storages_of_value(self.bytes, value)

    def hoisted_values(self, op: Op) -> Sequence[Value]:
        """Return the hoisted values that an op reads: they depend on parameters alone, and serve several ops."""
        hoisted_values = getattr(self.bytes, "hoisted_values", None)
        return () if hoisted_values is None else hoisted_values(op)


# `help` and notebooks show the fields, and not the `__new__` that explains letters.
_PARAMETERS = [*signature(Costs.__init__).parameters.values()][1:]
Costs.__signature__ = Signature(_PARAMETERS)  # pyright: ignore[reportAttributeAccessIssue] # one that inspect reads


_ACTIVATIONS = ("y", "again", "dx", "dy")
"""Values that the collective of a stage sends: its input and output, forward and backward."""
_FREE_KINDS_BY_EXCHANGE = {"copy": "FRW", "scatter": "FRW", "reduce": "BIW", "gather": "BIW"}
"""Kinds of op that take no time, for exchanges that communicate only forward or only backward; for others W alone."""
_LETTERS = ("F", "B", "I", "W", "R", "c")
_PER_STAGE_FIELDS = (
    *("forward", "backward_input", "backward_weight", "recompute", "offload", "load", "backward"),
    *("reduce", "gather", "scatter", "update", "exchange"),
)
_FIELD_BY_KIND = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight", "UPDATE": "update"}


def adds_gradients(op: Op) -> bool:
    """Whether a REDUCE sums gradients of a stage over replicas, rather than a number such as the loss."""
    return op.writes[0].name == "all"


def compute_ranks(program: Program) -> set[int]:
    """Return the ranks that run stages; a host only stores copies."""
    return {rank for ranks in program.placement for rank in (ranks if isinstance(ranks, tuple) else (ranks,))}


def checked_costs(costs: object, program: Program | None = None) -> Costs:
    """Return costs that fit a program, or the default: one second for each F, I and W.

    Raises:
        TypeError: these are no costs.
        ValueError: a list has fewer numbers than the program stages, or the cluster fewer ranks.
    """
    if costs is None:
        return Costs()
    if not isinstance(costs, Costs):
        raise TypeError(f"costs is an fpipe.Costs, such as fpipe.Costs(forward=2); found {type(costs).__name__}.")
    if program is None:
        return costs
    # Ranks beyond the cluster are allowed if they only store copies: host memory.
    cluster_ranks = math.inf if costs.cluster is None else len(costs.cluster.speed)
    if program.ranks > cluster_ranks and max(compute_ranks(program)) >= cluster_ranks:
        raise ValueError(f"the program has {program.ranks} ranks, and the cluster {cluster_ranks}.")
    for field_name in _PER_STAGE_FIELDS:
        length = len([*numbers_of_stages(getattr(costs, field_name))])
        if isinstance(getattr(costs, field_name), Sequence) and length < program.stages:
            problem = f"{field_name} lists {length} costs, but the program has a stage {length}"
            raise ValueError(f"{problem}; give one for each of its {program.stages} stages.")
    return costs


class Ticks(Costs):
    """The clock that fixes a program's global order: F, B, I, W and R take one tick each."""

    def seconds(self, op: Op) -> float:
        """Return one tick, or 0 for kinds that no schedule names."""
        return kind_of(op.kind).time
