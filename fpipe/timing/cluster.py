"""A cluster as a short text: hosts and ranks, links inside and between hosts, speeds and memory."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple

from fpipe.limits import whole

_TIMES = {"ns": Fraction("1e-9"), "us": Fraction("1e-6"), "ms": Fraction("1e-3"), "s": Fraction(1)}
_SIZES = {"B": Fraction(1)} | {
    f"{letter}{more}B": Fraction(1024 if more else 1000) ** power
    for power, letter in enumerate("KMGT", 1)
    for more in ("", "i")
}
_FORM = "2 hosts x 4 ranks; inside 5us 200GB/s; between 20us 25GB/s shared; rank 3 speed 0.8 memory 40GiB"


class Link(NamedTuple):
    """Seconds on the way, bytes a second (infinite if not said), and whether all transfers share one link."""

    latency: float = 0.0
    bandwidth: float = math.inf
    shared: bool = False


@dataclass(frozen=True)
class Cluster:
    """Hosts with as many ranks each, and what is between them. Ranks count through the hosts, one after the other.

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
        """A cluster as it is typed: clauses with semicolons between them, the sizes first.

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
            raise TypeError(f"a cluster is a text such as {_FORM!r}, found {text!r}.")
        clauses = [found for found in re.finditer(r"[^;]+", text) if found[0].strip()]
        if not clauses:
            raise ValueError(f"a cluster says at least how many ranks there are, as in {_FORM!r}; found {text!r}.")
        sizes = re.fullmatch(r"(?:(\d{1,9}) hosts? x )?(\d{1,9}) ranks?", " ".join(clauses[0][0].split()))
        if not sizes or "0" in (sizes[1], sizes[2]):
            raise _wrong("a cluster begins with its sizes, '2 hosts x 4 ranks' or '4 ranks'", clauses[0])
        hosts, ranks = int(sizes[1] or 1), int(sizes[2])
        count = whole("the number of a cluster's ranks", hosts * ranks)
        links, replicas = dict[str, Link](), 1
        speed, memory = [1.0] * count, [math.inf] * count
        for clause in clauses[1:]:
            head = clause[0].split()[0]
            if head in ("inside", "between", "replicas"):
                if head in links:
                    raise _wrong(f"{head} is said twice", clause)
                if head == "between" and hosts == 1:
                    raise _wrong("a cluster of one host has nothing between hosts", clause)
                _, *words = _words(clause)
                if head == "replicas":
                    if not words or not re.fullmatch(r"0*[1-9]\d{0,8}", words[0][0]):
                        raise _wrong("replicas are a number, at least 1, as in 'replicas 4 20us 25GB/s'", clause)
                    replicas = whole("the number of a cluster's replicas", int(words.pop(0)[0]))
                links[head] = _link(clause, words)
                if head == "replicas" and links[head].shared:
                    raise _wrong("replicas have links of their own, which are not shared", clause)
            elif head in ("rank", "ranks", "each"):
                _of_ranks(clause, speed, memory)
            else:
                raise _wrong("a clause begins with inside, between, replicas, rank, ranks or each", clause)
        inside, between, across = (links.get(word, Link()) for word in ("inside", "between", "replicas"))
        return cls(hosts, ranks, inside, between, tuple(speed), tuple(memory), replicas, across)

    def speed_of(self, rank: int) -> float:
        """The speed of a rank; of one behind those of the cluster, which keeps what travels in a host's memory, 1."""
        return self.speed[rank] if rank < len(self.speed) else 1.0

    def host(self, rank: int) -> int:
        """The host of a rank."""
        return rank // self.ranks

    def link(self, source: int, target: int) -> Link:
        """The link between two ranks. From and to a host's memory it takes no time, but by `Costs(host_bandwidth=)`."""
        if max(source, target) >= len(self.speed):
            return Link()
        return self.inside if self.host(source) == self.host(target) else self.between

    def wire(self, source: int, target: int) -> Hashable:
        """The wire between two ranks, which serves one transfer at a time."""
        if self.link(source, target).shared:
            return "shared", self.host(source), self.host(target)
        return source, target

    @property
    def has_bandwidth(self) -> bool:
        """Whether the bytes of a value matter to how long it travels."""
        return min(self.inside.bandwidth, self.between.bandwidth, self.across.bandwidth) < math.inf

    def around(self, size: float) -> float:
        """Seconds in which a value of so many bytes has gone once around the ring of replicas."""
        steps = self.replicas - 1
        return steps * self.across.latency + steps / self.replicas * size / self.across.bandwidth

    @property
    def has_queues(self) -> bool:
        """Whether ranks wait for each other's transfers."""
        return self.inside.shared or self.between.shared


def _wrong(what: str, found: re.Match[str]) -> ValueError:
    start = found.end() - len(found[0].lstrip()) + 1
    return ValueError(f"{what}, at {found[0].strip()!r} (character {start} of the text).")


def _words(clause: re.Match[str]) -> Iterator[re.Match[str]]:
    return re.compile(r"\S+").finditer(clause.string, *clause.span())


def _link(clause: re.Match[str], words: list[re.Match[str]]) -> Link:
    found: dict[str, float | bool] = {}
    for word in words:
        name, value = "shared", True
        if word[0] != "shared":
            name = "bandwidth" if word[0].endswith("/s") else "latency"
            units = _SIZES if name == "bandwidth" else _TIMES
            value = _amount(word, word[0].removesuffix("/s"), units, "a latency (5us), a bandwidth (200GB/s)")
        if name in found:
            raise _wrong(f"a second {name} of one link", word)
        if name == "bandwidth" and not value:
            raise _wrong("a bandwidth is more than 0", word)
        found[name] = value
    if not found:
        raise _wrong("a link has a latency (5us), a bandwidth (200GB/s) or both", clause)
    if found.get("shared") and "bandwidth" not in found:
        raise _wrong("a shared link has a bandwidth, for which its transfers wait", clause)
    return Link(**found)  # pyright: ignore[reportArgumentType]


def _of_ranks(clause: re.Match[str], speed: list[float], memory: list[float]) -> None:
    head, *words = _words(clause)
    if len(words) not in (3, 5) or any(word[0] not in ("speed", "memory") for word in words[1::2]):
        raise _wrong("ranks have a speed, a memory or both, as in 'rank 3 speed 0.8 memory 40GiB'", clause)
    whom, *words = words
    ranks = range(len(speed))
    if head[0] != "each":
        numbers = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", whom[0])
        if not numbers or int(numbers[2] or numbers[1]) >= len(speed) or int(numbers[1]) > int(numbers[2] or 1e9):
            raise _wrong(f"ranks are 0..{len(speed) - 1}, one (3) or several (0-3)", whom)
        ranks = range(int(numbers[1]), int(numbers[2] or numbers[1]) + 1)
    for word, amount in zip(words[::2], words[1::2], strict=True):
        each, units = (speed, {"": Fraction(1)}) if word[0] == "speed" else (memory, _SIZES)
        value = _amount(amount, amount[0], units, "a speed (0.8), a memory (40GiB)")
        if not value:
            raise _wrong(f"a {word[0]} is more than 0", amount)
        each[ranks.start : ranks.stop] = [value] * len(ranks)


def _amount(word: re.Match[str], text: str, units: Mapping[str, Fraction], expected: str) -> float:
    found = _read(text, units)
    if found is None:
        said = ", ".join(unit for unit in units if unit)
        raise _wrong(f"expected {expected}{f' in {said}' if said else ''}", word)
    return found


def bytes_of(text: str) -> float:
    """An amount of bytes as it is typed.

    >>> bytes_of("40GiB"), bytes_of("512B")
    (42949672960.0, 512.0)
    """
    found = _read(text, _SIZES)
    if found is None:
        raise ValueError(f"an amount of bytes reads 40GiB or 512B, in {', '.join(_SIZES)}; found {text!r}.")
    return found


def seconds_of(text: str) -> float:
    """A time as it is typed: of a plain number seconds.

    >>> seconds_of("10ms"), seconds_of("0.5")
    (0.01, 0.5)
    """
    try:
        return float(text)
    except ValueError:
        found = _read(text, _TIMES)
    if found is None:
        raise ValueError(f"a time reads 0.5 (seconds), 0.5s, 10ms, 5us or 200ns; found {text!r}.")
    return found


def _read(text: str, units: Mapping[str, Fraction]) -> float | None:
    found = re.fullmatch(r"(\d{1,30}\.?\d{0,30}|\.\d{1,30})([A-Za-z]*)", text)
    return float(Fraction(found[1]) * units[found[2]]) if found and found[2] in units else None
