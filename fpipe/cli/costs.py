"""Read costs as they are typed: F=1,B=1,W=1,c=0.1 of a whole rank, or forward=1,transfer=0.1 of a stage."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fpipe.program import Program
from fpipe.schedules.compare import parts_of_a_rank, shared
from fpipe.timing.amounts import NAMES, NamedBytes
from fpipe.timing.cluster import Cluster, bytes_of, seconds_of
from fpipe.timing.costs import Costs
from fpipe.timing.messages import MESSAGES

SHARES = {"F": "forward", "B": "backward_input", "W": "backward_weight", "R": "recompute", "c": "transfer"}
COMPUTE = ("forward", "backward_input", "backward_weight")
MOVING = "send", "receive"
WORDS = (*SHARES.values(), "offload", "load", *MOVING)
CHOICES = {"sender": ("free", "busy"), "pair": ("sum", "max"), "messages": MESSAGES}


@dataclass(frozen=True)
class TypedCosts:
    """Costs as they were typed: of a whole rank's share of a microbatch (letters), or of a stage's (words).

    >>> import fpipe
    >>> two_a_rank = fpipe.schedules.gpipe(2)(fpipe.program(4))
    >>> texts = "F=3,B=1,W=1,c=0.5,send=0.1", "forward=3/4/3/4,backward_input=1,backward_weight=1,sender=busy"
    >>> shared, listed = (parse(text).of(two_a_rank) for text in texts)
    >>> shared.forward, shared.backward_input, shared.transfer, shared.send
    (1.5, 0.5, 0.5, 0.1)
    >>> listed.forward, listed.backward_input, listed.sender
    ([3.0, 4.0, 3.0, 4.0], 1.0, 'busy')
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

    def on(self, cluster: Cluster | None) -> TypedCosts:
        """Return these costs on a cluster."""
        return replace(self, cluster=cluster)

    def of(self, program: Program) -> Costs:
        """Return the costs of a program's ops."""
        return self.at(parts_of_a_rank(program), program.slices)

    def at(self, parts: float, slices: int = 1) -> Costs:
        """Return the costs where a rank cuts its share into so many ops: v stages of Q slices are vQ."""
        return shared(self._whole, parts, slices) if self.shares else self._whole

    @property
    def for_library(self) -> Costs | Callable[[float], Costs]:
        """Costs as functions of the library take them: of a whole rank, or a function of its parts."""
        return self._whole if self.shares else self.at

    @property
    def _whole(self) -> Costs:
        if self.cluster is not None and self.cluster.has_bandwidth and not self.bytes:
            raise ValueError("a cluster's bandwidths need the bytes of values: add them to --costs, as in y=8MiB.")
        defaults: dict[str, Any] = dict.fromkeys(COMPUTE, 1.0) if self.shares else {}
        sizes: Any = NamedBytes(self.bytes, self.cluster.replicas if self.cluster else 1) if self.bytes else None
        return Costs(**(defaults | self.seconds), bytes=sizes, cluster=self.cluster)


def parse(text: str) -> TypedCosts:
    """Read a list of costs; the error for an unknown name offers the closest."""
    seconds: dict[str, Any] = {}
    sizes: dict[str, float] = {}
    words: dict[str, str] = {}  # seconds as they were typed
    kinds: set[bool] = set()
    for item in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in item.partition("="))
        if not equals:
            raise ValueError(f"{item!r} says no cost; costs read F=1,B=1,W=1,c=0.1 or forward=1,transfer=0.1.")
        word = SHARES.get(name, name)
        if word in seconds or word in sizes:
            raise ValueError(f"{name} is said twice.")
        if name in CHOICES:
            if value not in CHOICES[name]:
                raise ValueError(f"{name} is {' or '.join(CHOICES[name])}, found {value!r}.")
            seconds[name] = value
            continue
        if name in NAMES:
            sizes[name] = bytes_of(value)
            continue
        if word not in WORDS:
            close = difflib.get_close_matches(name, (*WORDS, *CHOICES, *NAMES), n=1)
            raise ValueError(
                f"costs have no {name!r}{f'; did you mean {close[0]}?' if close else '.'} Of a whole rank: "
                f"{', '.join(SHARES)}; of a stage: {', '.join(WORDS)}; and sender=busy, messages=nccl, pair=max; "
                f"bytes: {', '.join(NAMES)}, as in y=8MiB."
            )
        if name not in MOVING:  # of a value, whatever costs are of
            kinds.add(name in SHARES)
        seconds[word], words[word] = _number(name, value), value
    if len(kinds) > 1:
        raise ValueError(f"{text!r} mixes costs of a whole rank (F, B, W, R, c) with those of a stage (forward, ...).")
    shares = kinds != {False}
    names = {word: letter for letter, word in SHARES.items()} if shares else {word: word for word in WORDS}
    typed = [word for word in COMPUTE if word in seconds]
    if typed and len(typed) < len(COMPUTE):
        missing = [f"{names[word]}={words[typed[0]]}" for word in COMPUTE if word not in seconds]
        raise ValueError(
            f"{text!r} says {' and '.join(names[word] for word in typed)} and nothing of the rest; say all, as "
            f"{text},{','.join(missing)}."
        )
    return TypedCosts(text, seconds, shares, sizes)


def _number(name: str, text: str) -> float | list[float]:
    try:
        numbers = [seconds_of(part) for part in text.split("/")]
    except ValueError:
        raise ValueError(
            f"{name} is a time, in seconds (0.5) or with a unit (10ms), or one for each stage as in 1/2/1; found "
            f"{text!r}."
        ) from None
    if not all(0 <= cost < float("inf") for cost in numbers):
        raise ValueError(f"{name} is a time in seconds, at least 0 and finite; found {text!r}.")
    if len(numbers) > 1 and name in SHARES:
        raise ValueError(f"{name} is of a whole rank, one number; one for each stage is {SHARES[name]}={text}.")
    return numbers if len(numbers) > 1 else numbers[0]
