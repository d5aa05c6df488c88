"""The numbers that costs are made of, checked where they enter, and the text of amounts and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from fpipe.limits import LARGEST_NUMBER
from fpipe.program import Op, Value, kind_of


def listed(field: Any) -> Iterable[Any]:
    """The numbers of a field: one, or one for each stage."""
    return field if isinstance(field, Sequence) and not isinstance(field, str) else (field,)


def of_links(word: str, unit: str, field: Any) -> Iterable[Any]:
    """The numbers of a field: one, or one for each link; of a function none yet."""
    if callable(field):
        return ()
    if not isinstance(field, Mapping):
        return (field,)
    table = cast("Mapping[object, Any]", field)
    for link in table:
        if not isinstance(link, tuple) or [type(rank) for rank in cast("tuple[object, ...]", link)] != [int, int]:
            forms = f"a number, or a table {{(from, to): {unit}}} with the numbers of two ranks"
            raise ValueError(f"{word} is {forms}; found the key {link!r}.")
        if min(cast("tuple[int, int]", link)) < 0:
            raise ValueError(f"{word} has a link {link!r}; ranks are numbers from 0 on.")
    return table.values()


def checked_seconds(word: str, cost: object) -> float:
    """A time."""
    return _number(f"{word} is a time in seconds, at least 0", cost)


def checked_rate(word: str, rate: object) -> float:
    """Bytes a second."""
    if rate == 0:
        raise ValueError(f"{word} is in bytes a second, more than 0; found {rate!r}.")
    found = _number(f"{word} is in bytes a second, more than 0", rate)
    if found * LARGEST_NUMBER < 1:
        raise ValueError(f"{word} is in bytes a second, at least {1 / LARGEST_NUMBER:.1g}; found {rate!r}.")
    return found


def checked_count(word: str, size: object) -> float:
    """An amount, such as bytes."""
    return _number(f"{word} are a number, at least 0", size)


def on_link(cost: Any, source: int, target: int, word: str) -> float:
    """The number of one link."""
    if callable(cost):
        return cast("Callable[[int, int], float]", cost)(source, target)
    if not isinstance(cost, Mapping):
        return cost
    if (source, target) not in cost:
        link = f"the link from rank {source} to rank {target}, over which a value travels"
        raise ValueError(f"{word} says nothing of {link}; add ({source}, {target}).")
    return cost[source, target]


def at_stage(cost: Any, stage: int, word: str) -> float:
    """The number of one stage."""
    if not isinstance(cost, Sequence):
        return cost
    if stage >= len(cost):
        raise ValueError(f"{word} lists {len(cost)} costs, but the program has a stage {stage}; give one a stage.")
    return cost[stage]


def between(word: str, low: Any, high: Any, weight: float) -> Any:
    """Interpolate one field of costs: a number, one for each stage, or nothing."""
    if low is None or high is None:
        return high
    lengths = {len(cost) for cost in (low, high) if isinstance(cost, Sequence)}
    if len(lengths) > 1:
        raise ValueError(f"{word} lists {len(low)} stages for one size and {len(high)} for another; list as many.")
    if not lengths:
        return (1 - weight) * low + weight * high
    rows = [cost if isinstance(cost, Sequence) else [cost] * max(lengths) for cost in (low, high)]
    return [(1 - weight) * of_low + weight * of_high for of_low, of_high in zip(*rows, strict=True)]


def _number(expected: str, found: object) -> float:
    """Check a number from 0 on whose sums are finite. A truth value is none, though Python counts with it."""
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise ValueError(f"{expected}; found {found!r}, which is no number.")
    if not (found >= 0 and math.isfinite(found)):
        raise ValueError(f"{expected}; found {found!r}.")
    if found > LARGEST_NUMBER:
        raise ValueError(f"{expected}, at most {LARGEST_NUMBER:.3g}; found {found:.3g}.")
    return found


def amount(held: float, in_bytes: bool, digits: int = 6) -> str:
    """Write an amount held, in microbatches or bytes.

    >>> amount(2.5, False), amount(3 << 20, True), amount(1020 << 20, True)
    ('2.5', '3 MiB', '0.996 GiB')
    """
    if not in_bytes:
        return f"{held:.{digits}g}"
    unit, size = byte_unit(held)
    return f"{held:.0f} B" if unit == "B" else f"{held / size:.3g} {unit}"


def exact_amount(held: float, in_bytes: bool) -> str:
    """Write an amount held so that it can be handed in again: bytes are rounded in their unit alone.

    >>> exact_amount(2.5, False), exact_amount(3 << 20, True)
    ('2.5', '3145728 (3 MiB)')
    """
    return f"{held:.0f} ({amount(held, True)})" if in_bytes else amount(held, False)


def byte_unit(held: float) -> tuple[str, float]:
    """The binary unit that suits some bytes, and how many bytes it has."""
    power = next((power for power in range(4) if held < (999.5 if power else 1024) * 1024**power), 4)
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024.0**power


def aligned(table: Sequence[Sequence[str]], left: Sequence[bool]) -> list[str]:
    """The lines of a table, each column to the left or to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(row, widths, left, strict=True)
        ).rstrip()
        for row in table
    ]


EXTRA: dict[str, float | Callable[[Op], float]] = dict.fromkeys(
    ("SPLIT", "ADD", "SCALE", "MERGE", "FREE", "NORM", "VALIDATE", "UNSCALE"), 0.0
)
"""Costs of kinds that are no fields of `Costs`."""
_FIELDS = (*"FBIWR", "PAIR", "OFFLOAD", "LOAD", "SEND", "RECV", "UPDATE", "REDUCE", "GATHER", "SCATTER")


def register_cost(kind: str, seconds: float | Callable[[Op], float]) -> None:
    """Say what an op of a kind of your own costs, in seconds or as `f(op) -> seconds`.

    The costs of F, B, I, W, R, OFFLOAD, LOAD, SEND, RECV, REDUCE, GATHER, SCATTER and UPDATE are fields of `Costs`.

    >>> register_cost("SCALE", 0.0)
    """
    kind_of(kind)
    if kind in _FIELDS:
        raise ValueError(f"the cost of {kind} is a field of Costs.")
    EXTRA[kind] = seconds if callable(seconds) else checked_seconds(f"the cost of {kind}", seconds)


def varies(kind: str) -> bool:
    """Whether ops of a kind cost what a function says of each."""
    return callable(EXTRA.get(kind))


# Bytes of values and the storages they lie in: told by name, by a function, or as `fpipe.sizes` counts them.

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


def check_bytes(sizes: Any) -> None:
    """Raise a TypeError if these are no bytes of values, a ValueError for bytes by name that are no numbers."""
    if sizes is not None and not (isinstance(sizes, Mapping) or callable(sizes) or hasattr(sizes, "storages")):
        raise TypeError(f"bytes are {{name: bytes}}, f(value) or fpipe.sizes(...), found {type(sizes).__name__}.")
    if isinstance(sizes, Mapping):
        for name, of_name in cast("Mapping[str, Any]", sizes).items():
            for size in listed(of_name):
                checked_count(f"the bytes of {name!r}", size)


def storages_of(sizes: Any, value: Value) -> Storages:
    """The storages of a value. Where only its bytes are known, it lies alone, with its copies, in one."""
    if hasattr(sizes, "storages"):
        return sizes.storages(value)
    if isinstance(sizes, Mapping):
        if value.name not in sizes:
            known, mend = ", ".join(map(str, sizes)) or "no names", f"add {value.name!r}, 0 if it does not count"
            raise ValueError(f"the bytes of {value} are not known: bytes= has {known}; {mend}.")
        size = at_stage(sizes[value.name], value.stage or 0, f"bytes of {value.name!r}")
    else:
        size = checked_count(f"the bytes of {value}", sizes(value))
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

    def until(self, high: NamedBytes, share: float) -> NamedBytes:
        """Interpolate from these bytes to others."""
        values = [Value(name) for name in dict.fromkeys((*self.said, *high.said))]
        sizes = {value.name: (self.size(value), high.size(value)) for value in values}
        said = {name: between(f"bytes of {name}", *both, share) for name, both in sizes.items()}
        return NamedBytes(said, self.replicas)
