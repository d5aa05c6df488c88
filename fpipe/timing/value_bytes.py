"""Bytes of values and the storages they lie in: told by name, by a function, or as `fpipe.sizes` counts them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fpipe.program import Op, Value
from fpipe.timing.amounts import at_stage, between, checked_count, listed

Storages = Mapping[Hashable, int]
"""Bytes of the storages that a value lies in, each under what tells it from the others."""


class HasStorages(Protocol):
    """Knows in which storages each value lies, as `fpipe.Sizes` does."""

    def storages(self, value: Value) -> Storages:
        """The storages of a value."""
        ...

    def size(self, value: Value) -> float:
        """Its bytes when it travels."""
        ...


Bytes = Mapping[str, float | Sequence[float]] | Callable[[Value], float] | HasStorages


def carried(send: Op) -> Value:
    """The value that a SEND puts on its link: its own, or what a cast makes of it."""
    return send.writes[0] if send.how else send.reads[0]


def scattered(op: Op) -> Value:
    """The value that a SCATTER or REDUCE puts on its links: its own, or what a cast makes of it."""
    (value,) = op.reads
    return value._replace(at=f"{value.at}>{dict(op.how)['axis']}") if "cast" in dict(op.how) else value


def check_bytes(given: Any) -> None:
    """A TypeError for what tells no bytes of values, a ValueError for bytes by name that are no numbers."""
    if given is not None and not (isinstance(given, Mapping) or callable(given) or hasattr(given, "storages")):
        raise TypeError(f"bytes are {{name: bytes}}, f(value) or fpipe.sizes(...), found {type(given).__name__}.")
    if isinstance(given, Mapping):
        for name, sizes in cast("Mapping[str, Any]", given).items():
            for size in listed(sizes):
                checked_count(f"the bytes of {name!r}", size)


def storages_of(given: Any, value: Value) -> Storages:
    """The storages of a value. Where only its bytes are known, it lies alone, with its copies, in one."""
    if hasattr(given, "storages"):
        return given.storages(value)
    if isinstance(given, Mapping):
        if value.name not in given:
            raise ValueError(
                f"the bytes of {value} are not known: bytes= has {', '.join(map(str, given)) or 'no names'}; add "
                f"{value.name!r}, 0 if it does not count."
            )
        size = at_stage(given[value.name], value.stage or 0, f"bytes of {value.name!r}")
    else:
        size = checked_count(f"the bytes of {value}", given(value))
    return {value._replace(at=""): cast("int", size)}


_PARTS = ("shard", "cut", "all")
NAMES = ("y", "dx", "res", "wres", "params")


@dataclass(frozen=True)
class NamedBytes:
    """Bytes by name: an output `y`, its gradient `dx`, residuals `res`, what a W keeps of them `wres`, and `params`,
    what a stage's rank has all the time. Unsaid, dx is as large as y and wres as res. Gradients of parameters are as
    large as these, and those of a stage are added up in one place; nothing else counts. Of `replicas` that share
    parameters out, each has so small a part of them, and of their added gradients; others add up in place.

    >>> sizes = NamedBytes({"y": 8, "res": 40, "wres": 24})
    >>> sizes.size(Value("dx", 1, 0)), sizes.size(Value("loss", 1, 0))
    (8, 0)
    >>> [*sizes.storages(Value("res", 1, 0)).values()], [*sizes.storages(Value("wres", 1, 0)).values()]
    ([24, 16], [24])
    """

    said: Mapping[str, float]
    replicas: int = 1

    def size(self, value: Value) -> float:
        """Bytes of a value when it travels."""
        if value.name in _PARTS:
            return self.said.get("params", 0) / self.replicas
        unsaid = {"dx": "y", "wres": "res", "g": "params", "sum": "params"}
        return self.said.get(value.name, self.said.get(unsaid.get(value.name, ""), 0))

    def storages(self, value: Value) -> Mapping[tuple[Value, str], int]:
        """The storages of a value; wres lies in its res, and gradients are added in place."""
        if value.name in ("g", "sum") or (value.name in ("cut", "all") and self.replicas == 1):
            return {(Value("sum", value.stage, at=value.at), ""): int(self.size(value))}
        whole = value if value.name == "params" else value._replace(at="")  # each gathered copy has memory of its own
        if value.name not in ("res", "wres"):
            return {(whole, ""): int(self.size(value))}
        res = value._replace(name="res", at="")
        kept = min(self.size(res), self.size(res._replace(name="wres")))
        rest = self.size(res) - kept if value.name == "res" else 0
        return {(res, part): int(size) for part, size in (("kept", kept), ("rest", rest)) if size}

    def until(self, other: NamedBytes, share: float) -> NamedBytes:
        """So far from these to others."""
        names = [*dict.fromkeys((*self.said, *other.said))]
        return NamedBytes(
            {
                name: between(f"bytes of {name}", self.size(Value(name)), other.size(Value(name)), share)
                for name in names
            },
            self.replicas,
        )
