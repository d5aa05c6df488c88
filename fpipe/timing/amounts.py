"""The numbers that costs are made of, checked where they enter, and the text of amounts and tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Protocol, cast

from fpipe.limits import LARGEST_NUMBER
from fpipe.program import Op, Value, kind_of


def numbers_of_stages(field: Any) -> Iterable[Any]:
    """Return the numbers of a field that has one for all stages, or one for each."""
    return field if isinstance(field, Sequence) and not isinstance(field, str) else (field,)


def is_row(costs: object) -> bool:
    """Whether costs are listed: of stages, or in such a list of the microbatches of a stage."""
    return isinstance(costs, Sequence) and not isinstance(costs, str)


def numbers_of_ops(field: Any) -> Iterable[Any]:
    """Return the numbers of a field of stages or [stage][microbatch]; none of a function, not yet called."""
    return () if callable(field) else (number for row in numbers_of_stages(field) for number in numbers_of_stages(row))


def numbers_of_links(name: str, unit: str, field: Any) -> Iterable[Any]:
    """Return the numbers of a field that has one for all links, or a table; none of a function, not yet called."""
    if callable(field):
        return ()
    if not isinstance(field, Mapping):
        return (field,)
    table = cast("Mapping[object, Any]", field)
    for link in table:
        if not isinstance(link, tuple) or [type(rank) for rank in cast("tuple[object, ...]", link)] != [int, int]:
            forms = f"a number, or a table {{(from, to): {unit}}} with the numbers of two ranks"
            raise ValueError(f"{name} is {forms}; found the key {link!r}.")
        if min(cast("tuple[int, int]", link)) < 0:
            raise ValueError(f"{name} has a link {link!r}; ranks are numbers from 0.")
    return table.values()


def checked_seconds(name: str, cost: object) -> float:
    """Check a time."""
    return _checked_number(f"{name} is a time in seconds, at least 0", cost)


def checked_rate(name: str, rate: object) -> float:
    """Check a rate in bytes a second: its inverse must be a number too, since it divides."""
    if rate == 0:
        raise ValueError(f"{name} is bytes a second, above 0; found {rate!r}.")
    bytes_per_second = _checked_number(f"{name} is bytes a second, above 0", rate)
    if bytes_per_second * LARGEST_NUMBER < 1:
        raise ValueError(f"{name} is bytes a second, at least {1 / LARGEST_NUMBER:.1g}; found {rate!r}.")
    return bytes_per_second


def checked_count(name: str, size: object) -> float:
    """Check an amount, such as bytes."""
    return _checked_number(f"{name} are a number, at least 0", size)


def number_on_link(cost: Any, source: int, target: int, name: str) -> float:
    """Return the number of one link, from any of the three forms of a field of links."""
    if callable(cost):
        return cast("Callable[[int, int], float]", cost)(source, target)
    if not isinstance(cost, Mapping):
        return cost
    if (source, target) not in cost:
        link = f"the link from rank {source} to rank {target}, over which a value travels"
        raise ValueError(f"{name} says nothing of {link}; add ({source}, {target}).")
    return cost[source, target]


def number_at_stage(cost: Any, stage: int, name: str) -> float:
    """Return the number of one stage."""
    if not isinstance(cost, Sequence):
        return cost
    if stage >= len(cost):
        raise ValueError(f"{name} lists {len(cost)} costs, but the program has a stage {stage}; give one a stage.")
    return cost[stage]


def number_at_op(cost: Any, op: Op, name: str) -> float:
    """Return the number of an op, from any of the four forms of a field of ops."""
    stage, microbatch = op.stage or 0, op.microbatch
    # A function may stand for the whole table, or for the row of a stage.
    row: Any = cost if callable(cost) else number_at_stage(cost, stage, name)
    if not callable(row) and not is_row(row):
        return row
    if microbatch is None:
        raise ValueError(f"{name} has costs of microbatches, and {op.cell} belongs to none; give one cost a stage.")
    if callable(row):
        return checked_seconds(f"{name}({stage}, {microbatch})", row(stage, microbatch))
    if microbatch >= len(row):
        raise ValueError(f"{name} lists {len(row)} microbatches at stage {stage}; the program has a {op.cell}.")
    return row[microbatch]


def interpolate(name: str, low: Any, high: Any, weight: float) -> Any:
    """Interpolate one field of costs: a number, one for each stage, or nothing."""
    if low is None or high is None:
        return high
    lengths = {len(cost) for cost in (low, high) if isinstance(cost, Sequence)}
    if len(lengths) > 1:
        raise ValueError(f"{name} lists {len(low)} stages for one size and {len(high)} for another; list as many.")
    if not lengths:
        return (1 - weight) * low + weight * high
    lists = [cost if isinstance(cost, Sequence) else [cost] * max(lengths) for cost in (low, high)]
    return [(1 - weight) * low_cost + weight * high_cost for low_cost, high_cost in zip(*lists, strict=True)]


def _checked_number(expected: str, number: Any) -> float:
    # A bool is an int in Python, but costs=True is a mistake. Numbers of numpy are numbers too.
    if not isinstance(number, Real) or isinstance(number, bool):
        raise ValueError(f"{expected}; found {number!r}, which is no number.")
    number = number if isinstance(number, int) else float(number)
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"{expected}; found {number!r}.")
    # Costs near 1e308 are finite, and their sums are not: tables of nan.
    if number > LARGEST_NUMBER:
        raise ValueError(f"{expected}, at most {LARGEST_NUMBER:.3g}; found {number:.3g}.")
    return number


def format_amount(quantity: float, in_bytes: bool, digits: int = 6) -> str:
    """Write an amount held, in microbatches or bytes.

    >>> format_amount(2.5, False), format_amount(3 << 20, True), format_amount(1020 << 20, True)
    ('2.5', '3 MiB', '0.996 GiB')
    """
    if not in_bytes:
        return f"{quantity:.{digits}g}"
    unit, size = byte_unit(quantity)
    return f"{quantity:.0f} B" if unit == "B" else f"{quantity / size:.3g} {unit}"


def format_exact_amount(quantity: float, in_bytes: bool) -> str:
    """Write an amount held so that it can be typed again: all digits of bytes, and then their rounded unit.

    >>> format_exact_amount(2.5, False), format_exact_amount(3 << 20, True)
    ('2.5', '3145728 (3 MiB)')
    """
    return f"{quantity:.0f} ({format_amount(quantity, True)})" if in_bytes else format_amount(quantity, False)


def byte_unit(byte_count: float) -> tuple[str, float]:
    """Return the binary unit for a number of bytes, and how many bytes the unit has."""
    # Three digits of 999.5 and more would read 1e+03, so from there on the next unit is used.
    power = next((power for power in range(4) if byte_count < (999.5 if power else 1024) * 1024**power), 4)
    return ("B", "KiB", "MiB", "GiB", "TiB")[power], 1024.0**power


def align_columns(table: Sequence[Sequence[str]], left_aligned: Sequence[bool]) -> list[str]:
    """Write the lines of a table, with each column aligned to the left or to the right."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    aligners = [str.ljust if is_left else str.rjust for is_left in left_aligned]
    rows = ((align(cell, width) for align, cell, width in zip(aligners, row, widths, strict=True)) for row in table)
    return ["  ".join(cells).rstrip() for cells in rows]


EXTRA_COSTS: dict[str, float | Callable[[Op], float]] = dict.fromkeys(
    ("SPLIT", "ADD", "SCALE", "MERGE", "FREE", "NORM", "VALIDATE", "UNSCALE"), 0.0
)
"""Costs of kinds that are no fields of `Costs`."""
_KINDS_IN_COSTS = (*"FBIWR", "PAIR", "OFFLOAD", "LOAD", "SEND", "RECV", "UPDATE", "REDUCE", "GATHER", "SCATTER")


def register_cost(kind: str, seconds: float | Callable[[Op], float]) -> None:
    """Register the cost of a kind of op, in seconds or as `f(op) -> seconds`.

    The costs of F, B, I, W, R, OFFLOAD, LOAD, SEND, RECV, REDUCE, GATHER, SCATTER and UPDATE are fields of `Costs`.

    >>> register_cost("SCALE", 0.0)
    """
    kind_of(kind)
    if kind in _KINDS_IN_COSTS:
        raise ValueError(f"the cost of {kind} is a field of fpipe.Costs.")
    EXTRA_COSTS[kind] = seconds if callable(seconds) else checked_seconds(f"the cost of {kind}", seconds)


def has_varying_cost(kind: str) -> bool:
    """Whether a registered function tells the cost of each op of a kind."""
    return callable(EXTRA_COSTS.get(kind))


# Bytes of values and the storages they lie in: by name, by a function, or as `fpipe.sizes` counts them.

Storages = Mapping[Hashable, int]
"""Bytes of the storages that a value lies in, each under a key that identifies the storage."""


class HasStorages(Protocol):
    """Bytes that know in which storages each value lies, as `fpipe.Sizes` does."""

    def storages(self, value: Value) -> Storages:
        """Return the storages of a value."""
        ...

    def size(self, value: Value) -> float:
        """Return the bytes of a value when it travels."""
        ...


Bytes = Mapping[str, float | Sequence[float]] | Callable[[Value], float] | HasStorages


def sent_value(send: Op) -> Value:
    """Return the value that a SEND puts on its link: its argument, or the cast of it."""
    return send.writes[0] if send.options else send.reads[0]


def scattered_value(op: Op) -> Value:
    """Return the value that a SCATTER or REDUCE puts on its links: its argument, or the cast of it."""
    (value,) = op.reads
    return (
        value._replace(location=f"{value.location}>{dict(op.options)['axis']}") if "cast" in dict(op.options) else value
    )


def check_bytes(sizes: Any) -> None:
    """Check the bytes that a caller gives: raise TypeError for another type, ValueError for a wrong number."""
    if sizes is not None and not (isinstance(sizes, Mapping) or callable(sizes) or hasattr(sizes, "storages")):
        raise TypeError(f"bytes are {{name: bytes}}, f(value) or fpipe.sizes(...), found {type(sizes).__name__}.")
    if isinstance(sizes, Mapping):
        for name, stage_sizes in cast("Mapping[str, Any]", sizes).items():
            for size in numbers_of_stages(stage_sizes):
                checked_count(f"the bytes of {name!r}", size)


def storages_of_value(sizes: Any, value: Value) -> Storages:
    """Return the storages of a value. If only bytes are known, it has one storage, which its copies share."""
    if hasattr(sizes, "storages"):
        return sizes.storages(value)
    if isinstance(sizes, Mapping):
        if value.name not in sizes:
            known_names = ", ".join(map(str, sizes)) or "no names"
            remedy = f"add {value.name!r}, 0 if it does not count"
            raise ValueError(f"the bytes of {value} are not known: bytes= has {known_names}; {remedy}.")
        size = number_at_stage(sizes[value.name], value.stage or 0, f"bytes of {value.name!r}")
    else:
        size = checked_count(f"the bytes of {value}", sizes(value))
    return {value._replace(location=""): cast("int", size)}


_SHARDED_NAMES = ("shard", "cut", "all")
BYTE_NAMES = ("y", "dx", "res", "wres", "params")


@dataclass(frozen=True)
class NamedBytes:
    """Bytes by name, for tables of papers and the command line; other names count 0.

    Names are an output `y`, its gradient `dx`, residuals `res`, the part of them that a W needs `wres`, and `params`,
    which a stage's rank has all the time. By default dx is as large as y, and wres as res. Gradients of parameters are
    as large as these, and those of a stage are added in place. With `replicas` that shard parameters, each holds its
    part of them and of their added gradients.

    >>> sizes = NamedBytes({"y": 8, "res": 40, "wres": 24})
    >>> sizes.size(Value("dx", 1, 0)), sizes.size(Value("loss", 1, 0))
    (8, 0)
    >>> [*sizes.storages(Value("res", 1, 0)).values()], [*sizes.storages(Value("wres", 1, 0)).values()]
    ([24, 16], [24])
    """

    bytes_by_name: Mapping[str, float]
    replicas: int = 1

    def size(self, value: Value) -> float:
        """Return the bytes of a value when it travels."""
        if value.name in _SHARDED_NAMES:
            return self.bytes_by_name.get("params", 0) / self.replicas
        substitute_by_name = {"dx": "y", "wres": "res", "g": "params", "sum": "params"}
        return self.bytes_by_name.get(value.name, self.bytes_by_name.get(substitute_by_name.get(value.name, ""), 0))

    def storages(self, value: Value) -> Mapping[tuple[Value, str], int]:
        """Return the storages of a value; wres lies in its res, and gradients are added in place."""
        if value.name in ("g", "sum") or (value.name in ("cut", "all") and self.replicas == 1):
            return {(Value("sum", value.stage, location=value.location), ""): int(self.size(value))}
        # Copies share a storage, but for gathered parameters: each gather fills memory of its own.
        storage = value if value.name == "params" else value._replace(location="")
        if value.name not in ("res", "wres"):
            return {(storage, ""): int(self.size(value))}
        # Residuals are two storages: the part that stays until W, and the rest, which I frees.
        res = value._replace(name="res", location="")
        wres_size = min(self.size(res), self.size(res._replace(name="wres")))
        other_size = self.size(res) - wres_size if value.name == "res" else 0
        return {(res, part_name): int(size) for part_name, size in (("kept", wres_size), ("rest", other_size)) if size}

    def interpolate(self, high: NamedBytes, weight: float) -> NamedBytes:
        """Interpolate from these bytes to the bytes of a larger microbatch, for all names in either."""
        values = [Value(name) for name in dict.fromkeys((*self.bytes_by_name, *high.bytes_by_name))]
        sizes = {value.name: (self.size(value), high.size(value)) for value in values}
        bytes_by_name = {name: interpolate(f"bytes of {name}", *ends, weight) for name, ends in sizes.items()}
        return NamedBytes(bytes_by_name, self.replicas)
