"""A cluster as a short text: hosts and ranks, links inside and between hosts, speeds and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from fpipe.limits import check_whole_number, checked_init

_SECONDS_BY_UNIT = {"ns": Fraction("1e-9"), "us": Fraction("1e-6"), "ms": Fraction("1e-3"), "s": Fraction(1)}
_BYTES_BY_UNIT = {"B": Fraction(1)} | {
    f"{letter}{binary_mark}B": Fraction(1024 if binary_mark else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for binary_mark in ("", "i")
}
_EXAMPLE = "2 hosts x 4 ranks; inside 5us 200GB/s; between 20us 25GB/s shared; rank 3 speed 0.8 memory 40GiB"


class Link(NamedTuple):
    """A link: its latency in seconds, its bytes a second, and whether all transfers share one link."""

    latency: float = 0.0
    bandwidth: float = math.inf
    shared: bool = False


@checked_init
@dataclass(frozen=True)
class Cluster:
    """Hosts with equally many ranks, and the links inside and between them. Ranks are numbered host by host.

    A value takes latency + bytes/bandwidth from rank to rank, and keeps its link for the second of these. Each two
    ranks have a link of their own each way; where links are `shared`, there is one inside each host, and one from each
    host to each other. A link serves one transfer at a time, in the order in which they are asked for.

    Replicas of all this add their gradients, or gather parameters, around a ring: with n replicas a GATHER and a
    SCATTER take (n - 1) * latency + (n - 1)/n * bytes/bandwidth, and a REDUCE, which does both, twice that. Bytes are
    those of the whole value, and the link is that from a replica to the next.

    Args:
        hosts, ranks: how many hosts, and ranks on each.
        inside, between: the links inside a host, and from host to host.
        speed: of each rank; what a rank of speed 0.5 does takes twice as long as `Costs` say.
        memory: bytes of each rank.
        replicas: how many data-parallel replicas there are of these hosts.
        across: the link from a rank to that of the next replica.

    >>> cluster = Cluster.parse("2 hosts x 2 ranks; inside 5us 200GB/s; between 20us 25GB/s shared; rank 3 speed 0.8")
    >>> cluster.link(0, 1), cluster.link(1, 2).shared, cluster.speed
    (Link(latency=5e-06, bandwidth=200000000000.0, shared=False), True, (1.0, 1.0, 1.0, 0.8))
    """

    hosts: int
    ranks: int
    inside: Link
    between: Link
    speed: tuple[float, ...]
    memory: tuple[float, ...]
    replicas: int = 1
    across: Link = field(default_factory=Link)

    @classmethod
    def parse(cls, text: str) -> Cluster:
        """Parse a cluster from its text: clauses with semicolons between them, the sizes first.

        `inside` and `between` say a latency (5us), a bandwidth (200GB/s) or both, and `shared`; `replicas 4` says these
        of the link from one to the next; `rank 3`, `ranks 0-3` and `each rank` say a speed, a memory or both. What is
        not said is no time, no limit, and speed 1.

        Raises:
            ValueError: what cannot be read, with its place.

        >>> Cluster.parse("4 ranks; between 5us")
        Traceback (most recent call last):
        ValueError: a cluster of one host has nothing between hosts, at 'between 5us' (character 10 of the text).
        """
        if not isinstance(text, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TypeError(f"a cluster is a text such as {_EXAMPLE!r}, found {text!r}.")
        # 1. The sizes. Clauses stay matches, so that an error can tell its place in the text.
        clauses = [match for match in re.finditer(r"[^;]+", text) if match[0].strip()]
        if not clauses:
            raise ValueError(f"a cluster says how many ranks it has, as in {_EXAMPLE!r}; found {text!r}.")
        size_match = re.fullmatch(r"(?:(\d{1,9}) hosts? x )?(\d{1,9}) ranks?", " ".join(clauses[0][0].split()))
        if not size_match or "0" in (size_match[1], size_match[2]):
            raise _parse_error("a cluster begins with its sizes, '2 hosts x 4 ranks' or '4 ranks'", clauses[0])
        hosts, ranks = int(size_match[1] or 1), int(size_match[2])
        count = check_whole_number("the number of a cluster's ranks", hosts * ranks)
        # 2. One clause after the other: links by their keyword, speeds and memory rank by rank.
        links, replicas = dict[str, Link](), 1
        speed, memory = [1.0] * count, [math.inf] * count
        for clause in clauses[1:]:
            keyword = clause[0].split()[0]
            if keyword in ("inside", "between", "replicas"):
                if keyword in links:
                    raise _parse_error(f"{keyword} is said twice", clause)
                if keyword == "between" and hosts == 1:
                    raise _parse_error("a cluster of one host has nothing between hosts", clause)
                _, *tokens = _tokens(clause)
                if keyword == "replicas":
                    if not tokens or not re.fullmatch(r"0*[1-9]\d{0,8}", tokens[0][0]):
                        raise _parse_error("replicas are a number, at least 1, as in 'replicas 4 20us 25GB/s'", clause)
                    replicas = check_whole_number("the number of a cluster's replicas", int(tokens.pop(0)[0]))
                links[keyword] = _parse_link(clause, tokens)
                if keyword == "replicas" and links[keyword].shared:
                    raise _parse_error("replicas have links of their own, which are not shared", clause)
            elif keyword in ("rank", "ranks", "each"):
                _parse_rank_clause(clause, speed, memory)
            else:
                raise _parse_error("a clause begins with inside, between, replicas, rank, ranks or each", clause)
        # 3. What no clause says is free: no time, no limit.
        inside, between, across = (links.get(keyword, Link()) for keyword in ("inside", "between", "replicas"))
        return cls(hosts, ranks, inside, between, tuple(speed), tuple(memory), replicas, across)

    def speed_of(self, rank: int) -> float:
        """Return the speed of a rank. Ranks beyond the cluster's are the memory of a host, and have speed 1."""
        return self.speed[rank] if rank < len(self.speed) else 1.0

    def host(self, rank: int) -> int:
        """Return the host of a rank."""
        return rank // self.ranks

    def link(self, source: int, target: int) -> Link:
        """Return the link between two ranks; to and from a host's memory only `Costs(host_bandwidth=)` takes time."""
        if max(source, target) >= len(self.speed):
            return Link()
        return self.inside if self.host(source) == self.host(target) else self.between

    def wire(self, source: int, target: int) -> Hashable:
        """Return the wire between two ranks, which serves one transfer at a time."""
        if self.link(source, target).shared:
            return "shared", self.host(source), self.host(target)
        return source, target

    @property
    def has_bandwidth(self) -> bool:
        """Whether a transfer's time depends on its bytes."""
        return min(self.inside.bandwidth, self.between.bandwidth, self.across.bandwidth) < math.inf

    def ring_seconds(self, size: float) -> float:
        """Return the seconds in which a value of so many bytes goes once around the ring of replicas."""
        # Of n replicas each sends n - 1 parts of 1/n of the value to the next, one after the other.
        steps = self.replicas - 1
        return steps * self.across.latency + steps / self.replicas * size / self.across.bandwidth

    @property
    def has_queues(self) -> bool:
        """Whether ranks share links, on which transfers queue."""
        return self.inside.shared or self.between.shared


def _parse_error(problem: str, match: re.Match[str]) -> ValueError:
    start = match.end() - len(match[0].lstrip()) + 1  # characters count from 1
    return ValueError(f"{problem}, at {match[0].strip()!r} (character {start} of the text).")


def _tokens(clause: re.Match[str]) -> Iterator[re.Match[str]]:
    return re.compile(r"\S+").finditer(clause.string, *clause.span())


def _parse_link(clause: re.Match[str], tokens: list[re.Match[str]]) -> Link:
    value_by_field: dict[str, float | bool] = {}
    for token in tokens:
        field_name, value = "shared", True
        if token[0] != "shared":
            field_name = "bandwidth" if token[0].endswith("/s") else "latency"
            units = _BYTES_BY_UNIT if field_name == "bandwidth" else _SECONDS_BY_UNIT
            value = _parse_amount(token, token[0].removesuffix("/s"), units, "a latency (5us), a bandwidth (200GB/s)")
        if field_name in value_by_field:
            raise _parse_error(f"a second {field_name} of one link", token)
        if field_name == "bandwidth" and not value:
            raise _parse_error("a bandwidth is more than 0", token)
        value_by_field[field_name] = value
    if not value_by_field:
        raise _parse_error("a link has latency (5us), bandwidth (200GB/s) or both", clause)
    if value_by_field.get("shared") and "bandwidth" not in value_by_field:
        raise _parse_error("a shared link has a bandwidth that transfers wait for", clause)
    return Link(**value_by_field)  # pyright: ignore[reportArgumentType]


def _parse_rank_clause(clause: re.Match[str], speed: list[float], memory: list[float]) -> None:
    keyword, *tokens = _tokens(clause)
    if len(tokens) not in (3, 5) or any(token[0] not in ("speed", "memory") for token in tokens[1::2]):
        raise _parse_error("ranks have a speed, a memory or both, as in 'rank 3 speed 0.8 memory 40GiB'", clause)
    rank_token, *tokens = tokens
    ranks = range(len(speed))
    if keyword[0] != "each":
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", rank_token[0])
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not ranks or ranks[-1] >= len(speed):
            raise _parse_error(f"ranks are 0..{len(speed) - 1}, one (3) or several (0-3)", rank_token)
    for token, amount_token in zip(tokens[::2], tokens[1::2], strict=True):
        values, units = (speed, {"": Fraction(1)}) if token[0] == "speed" else (memory, _BYTES_BY_UNIT)
        value = _parse_amount(amount_token, amount_token[0], units, "a speed (0.8), a memory (40GiB)")
        if not value:
            raise _parse_error(f"a {token[0]} is more than 0", amount_token)
        values[ranks.start : ranks.stop] = [value] * len(ranks)


def _parse_amount(token: re.Match[str], text: str, units: Mapping[str, Fraction], expected: str) -> float:
    amount = _number_in_units(text, units)
    if amount is None:
        unit_names = ", ".join(unit for unit in units if unit)
        raise _parse_error(f"expected {expected}{f' in {unit_names}' if unit_names else ''}", token)
    return amount


def parse_bytes(text: str) -> float:
    """Parse an amount of bytes.

    >>> parse_bytes("40GiB"), parse_bytes("512B")
    (42949672960.0, 512.0)
    """
    amount = _number_in_units(text, _BYTES_BY_UNIT)
    if amount is None:
        raise ValueError(f"an amount of bytes reads 40GiB or 512B, in {', '.join(_BYTES_BY_UNIT)}; found {text!r}.")
    return amount


def parse_seconds(text: str) -> float:
    """Parse a time; a plain number is in seconds.

    >>> parse_seconds("10ms"), parse_seconds("0.5")
    (0.01, 0.5)
    """
    try:
        return float(text)
    except ValueError:
        seconds = _number_in_units(text, _SECONDS_BY_UNIT)
    if seconds is None:
        raise ValueError(f"a time reads 0.5 (seconds), 0.5s, 10ms, 5us or 200ns; found {text!r}.")
    return seconds


def _number_in_units(text: str, units: Mapping[str, Fraction]) -> float | None:
    # Fractions, so that 0.1ms is the float nearest to it; digits are bounded against hostile texts.
    match = re.fullmatch(r"(\d{1,30}\.?\d{0,30}|\.\d{1,30})([A-Za-z]*)", text)
    return float(Fraction(match[1]) * units[match[2]]) if match and match[2] in units else None
