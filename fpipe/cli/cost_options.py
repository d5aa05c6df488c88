"""Parse the option --costs: F=1,B=1,W=1,c=0.1 of a whole rank, or forward=1,transfer=0.1 of a stage."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fpipe.program import Program
from fpipe.schedules.compare import parts_of_a_rank, share_costs
from fpipe.timing.amounts import BYTE_NAMES, NamedBytes
from fpipe.timing.cluster import Cluster, parse_bytes, parse_seconds
from fpipe.timing.costs import Costs
from fpipe.timing.messages import MESSAGES

SHARES = {"F": "forward", "B": "backward_input", "W": "backward_weight", "R": "recompute", "c": "transfer"}
COMPUTE = ("forward", "backward_input", "backward_weight")
TRANSFER_COSTS = "send", "receive"
COSTS = (*SHARES.values(), "offload", "load", *TRANSFER_COSTS)
CHOICES = {"sender": ("free", "busy"), "pair": ("sum", "max"), "messages": MESSAGES}


@dataclass(frozen=True)
class TypedCosts:
    """Costs of the option --costs: of a whole rank's share of a microbatch (letters), or of a stage's (words).

    >>> import fpipe
    >>> two_a_rank = fpipe.schedules.gpipe(2)(fpipe.program(4))
    >>> texts = "F=3,B=1,W=1,c=0.5,send=0.1", "forward=3/4/3:2/4,backward_input=1,backward_weight=1,sender=busy"
    >>> shared, listed = (parse(text).of(two_a_rank) for text in texts)
    >>> shared.forward, shared.backward_input, shared.transfer, shared.send
    (1.5, 0.5, 0.5, 0.1)
    >>> listed.forward, listed.backward_input, listed.sender
    ([3.0, 4.0, [3.0, 2.0], 4.0], 1.0, 'busy')
    """

    text: str
    seconds: dict[str, Any]
    shares: bool
    bytes: dict[str, float] = field(default_factory=dict[str, float])
    cluster: Cluster | None = None

    @property
    def are_typed(self) -> bool:
        """Whether there are any costs."""
        return bool(self.text or self.cluster)

    def on_cluster(self, cluster: Cluster | None) -> TypedCosts:
        """Return these costs on a cluster."""
        return replace(self, cluster=cluster)

    def of(self, program: Program) -> Costs:
        """Return the costs of a program's ops."""
        return self.per_op(parts_of_a_rank(program), program.slices)

    def per_op(self, parts: float, slices: int = 1) -> Costs:
        """Return the costs if a rank cuts its share into so many ops: v stages of Q slices are vQ."""
        return share_costs(self._of_a_rank, parts, slices) if self.shares else self._of_a_rank

    @property
    def for_library(self) -> Costs | Callable[[float], Costs]:
        """Costs as functions of the library take them: of a whole rank, or a function of its parts."""
        return self._of_a_rank if self.shares else self.per_op

    @property
    def _of_a_rank(self) -> Costs:
        if self.cluster is not None and self.cluster.has_bandwidth and not self.bytes:
            raise ValueError("a cluster's bandwidths need the bytes of values: add them to --costs, as in y=8MiB.")
        defaults: dict[str, Any] = dict.fromkeys(COMPUTE, 1.0) if self.shares else {}
        sizes: Any = NamedBytes(self.bytes, self.cluster.replicas if self.cluster else 1) if self.bytes else None
        return Costs(**(defaults | self.seconds), bytes=sizes, cluster=self.cluster)


def parse(text: str) -> TypedCosts:
    """Parse a list of costs; the error for an unknown name offers the closest."""
    # 1) Read each NAME=VALUE into seconds or bytes. A letter (F) and a word (forward) name one cost of two scales.
    seconds: dict[str, Any] = {}
    sizes: dict[str, float] = {}
    text_by_cost: dict[str, str] = {}
    is_of_rank: set[bool] = set()
    for assignment in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in assignment.partition("="))
        if not equals:
            raise ValueError(f"{assignment!r} says no cost; costs read F=1,B=1,W=1,c=0.1 or forward=1,transfer=0.1.")
        cost = SHARES.get(name, name)
        if cost in seconds or cost in sizes:
            raise ValueError(f"{name} is said twice.")
        if name in CHOICES:
            if value not in CHOICES[name]:
                raise ValueError(f"{name} is {' or '.join(CHOICES[name])}, found {value!r}.")
            seconds[name] = value
            continue
        if name in BYTE_NAMES:
            sizes[name] = parse_bytes(value)
            continue
        if cost not in COSTS:
            close = difflib.get_close_matches(name, (*COSTS, *CHOICES, *BYTE_NAMES), n=1)
            raise ValueError(
                f"costs have no {name!r}{f'; did you mean {close[0]}?' if close else '.'} Of a whole rank: "
                f"{', '.join(SHARES)}; of a stage: {', '.join(COSTS)}; and sender=busy, messages=nccl, pair=max; "
                f"bytes: {', '.join(BYTE_NAMES)}, as in y=8MiB."
            )
        # Costs to send and to receive are of one value on either scale.
        if name not in TRANSFER_COSTS:
            is_of_rank.add(name in SHARES)
        seconds[cost], text_by_cost[cost] = _number(name, value), value
    # 2) One list has one scale, and all of F, B and W or none.
    if len(is_of_rank) > 1:
        raise ValueError(f"{text!r} mixes costs of a whole rank (F, B, W, R, c) with those of a stage (forward, ...).")
    shares = is_of_rank != {False}
    name_by_cost = {cost: letter for letter, cost in SHARES.items()} if shares else {cost: cost for cost in COSTS}
    typed_costs = [cost for cost in COMPUTE if cost in seconds]
    if typed_costs and len(typed_costs) < len(COMPUTE):
        typed_names = " and ".join(name_by_cost[cost] for cost in typed_costs)
        typed_value = text_by_cost[typed_costs[0]]
        missing = ",".join(f"{name_by_cost[cost]}={typed_value}" for cost in COMPUTE if cost not in seconds)
        raise ValueError(f"{text!r} says {typed_names} and nothing of the rest; say all, as {text},{missing}.")
    return TypedCosts(text, seconds, shares, sizes)


def _number(name: str, text: str) -> float | list[float | list[float]]:
    try:
        rows = [[parse_seconds(seconds) for seconds in stage.split(":")] for stage in text.split("/")]
    except ValueError:
        raise ValueError(
            f"{name} is a time (0.5 or 10ms), or one for each stage (1/2/1) and microbatch (1:4/2:2); found {text!r}."
        ) from None
    numbers = [seconds for row in rows for seconds in row]
    if not all(0 <= cost < float("inf") for cost in numbers):
        raise ValueError(f"{name} is a time in seconds, at least 0 and finite; found {text!r}.")
    if len(numbers) > 1 and name in SHARES:
        raise ValueError(f"{name} is of a whole rank, one number; one for each stage is {SHARES[name]}={text}.")
    return [row if len(row) > 1 else row[0] for row in rows] if len(numbers) > 1 else numbers[0]
