"""Bytes of values by their names alone, as they are typed: y=8MiB,res=40MiB."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fpipe.program import Value
from fpipe.timing.average import between

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
