"""Bytes of values and the storages they lie in: told by name, by a function, or as `fpipe.sizes` counts them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Protocol, cast

from fpipe.program import Op, Value
from fpipe.timing.amounts import at_stage, checked_count, listed

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
