"""The machine that a run is planned for, and the candidates that a plan tries on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from fpipe.limits import check_whole_number, checked_init
from fpipe.schedules.notations import NamedSchedule, parse
from fpipe.schedules.registry import names
from fpipe.timing.cluster import Cluster
from fpipe.transforms.shard import GATHERS, NEVER, checked_policies

T = TypeVar("T")
POLICIES = ("never", "except_last", "always")


@checked_init
@dataclass(frozen=True)
class Machine:
    """The ranks that a run is planned for.

    Args:
        ranks: how many.
        memory: the most that a rank may hold: bytes where they are known, else rows. Bytes are those of parameters
            (`params` in the bytes of costs), gradients and values; an optimizer's state is not among them.
        cluster: links, speeds and memory of ranks, a `Cluster` or its text.
        replicas: of all ranks, each with a batch like this; by default those of the cluster.
        flops: operations a second of a rank: costs of a model are then those of `fpipe.estimate`, and nothing runs, so
            that parameters and batch may be on the meta device.

    >>> Machine(ranks=2, memory=8e9, cluster="2 ranks; rank 1 memory 4GB").limits
    (8000000000.0, 4000000000.0)
    """

    ranks: int
    memory: float | None = None
    cluster: Cluster | str | None = None
    replicas: int | None = None
    flops: float | None = None

    def __post_init__(self) -> None:
        check_whole_number("ranks", self.ranks)
        if self.memory is not None:
            _check_amount("memory", self.memory, "the most that a rank may hold, above 0")
        # A cluster says ranks and replicas too. It may have ranks to spare, but not another number of replicas.
        links = self.links
        if links is not None and len(links.speed) < self.ranks:
            raise ValueError(f"there are {self.ranks} ranks, and the cluster has {len(links.speed)}.")
        if self.replicas is not None:
            check_whole_number("replicas", self.replicas)
        if links is not None and links.replicas > 1 and self.replicas not in (None, links.replicas):
            raise ValueError(f"replicas={self.replicas}, and the cluster has {links.replicas}; say them once.")

    @cached_property
    def links(self) -> Cluster | None:
        """The cluster, parsed if it is a text."""
        return Cluster.parse(self.cluster) if isinstance(self.cluster, str) else self.cluster

    @property
    def replica_count(self) -> int:
        """Number of replicas."""
        return self.replicas or (1 if self.links is None else self.links.replicas)

    @property
    def limits(self) -> tuple[float, ...]:
        """The most that each rank may hold: the smaller of `memory` and its memory on the cluster."""
        memory_limit = math.inf if self.memory is None else float(self.memory)
        limits = [math.inf] * self.ranks if self.links is None else self.links.memory[: self.ranks]
        return tuple(min(memory_limit, limit) for limit in limits)


@checked_init
@dataclass(frozen=True)
class Candidates:
    """Ways to run a step that a plan tries: all combinations of numbers of microbatches, schedules and policies.

    Args:
        microbatches: numbers of them.
        schedules: names, with options behind a colon; by default all.
        checkpoint: which of "never", "except_last" and "always".
        shard: policies of gathering the parameters that replicas share out, of "step", "run" and "use" (`fpipe.shard`),
            and "never", whole ones on each (`fpipe.data_parallel`); by default there is one replica. A rank holds its
            part of parameters and added gradients, and what it has gathered, and a step takes until the last gradient
            is added up. A search is for whole parameters, and what it finds is then sharded.
        search: seconds for `fpipe.search` to find a schedule for each number of microbatches; its row is `found`. Where
            the number of stages is open, it is two a rank.
        seed: of the random choices of a search.

    >>> len(Candidates(microbatches=[8, 16], schedules=["gpipe", "zb_h1"]).combinations)
    12
    """

    microbatches: Collection[int]
    schedules: Collection[str] | None = None
    checkpoint: Collection[str] = POLICIES
    shard: Collection[str] | None = None
    search: float = 0
    seed: int = 0

    def __post_init__(self) -> None:
        checked_microbatch_counts("microbatches", self.microbatches)
        for policy_name in checked_list("checkpoint", self.checkpoint, f"some of {', '.join(POLICIES)}"):
            checked_policy(policy_name)
        if self.schedules is not None:
            checked_list("schedules", self.schedules, "names, such as ['zbv']")
        if self.shard is not None:
            policies = (*GATHERS, NEVER)
            checked_policies(checked_list("shard", self.shard, f"some of {', '.join(policies)}"), policies)
        if self.search != 0:
            _check_amount("search", self.search, "seconds, from 0")
        _ = self.named  # names are parsed here, so that a wrong one is refused where it enters

    @cached_property
    def named(self) -> Mapping[str, NamedSchedule]:
        """The schedules by their names, parsed."""
        return {name: parse(name) for name in (names() if self.schedules is None else self.schedules)}

    @property
    def gathers(self) -> tuple[str, ...]:
        """The policies of gathering; an empty one stands for a single replica."""
        return ("",) if self.shard is None else tuple(dict.fromkeys(self.shard))

    @property
    def combinations(self) -> list[tuple[int, str, str, str]]:
        """All (number of microbatches, policy of recomputing, schedule, policy of gathering)."""
        return [
            (count, checkpoint, name, gather)
            for count in dict.fromkeys(self.microbatches)
            for checkpoint in dict.fromkeys(self.checkpoint)
            for name in self.named
            for gather in self.gathers
        ]


def check_shard_policies(machine: Machine, candidates: Candidates) -> None:
    """Raise a ValueError for replicas without a policy of sharding, or a policy without replicas."""
    if candidates.shard is None and machine.replicas is not None:
        policies = ", ".join((*GATHERS, NEVER))
        raise ValueError(f"replicas= needs shard=, some of {policies}.")
    if candidates.shard is not None and machine.replica_count < 2:
        raise ValueError("shard= needs replicas: say replicas=2, or those of the cluster.")


def checked_policy(name: Any) -> str:
    """Return a policy of recomputing, or raise a ValueError."""
    if name not in POLICIES:
        raise ValueError(f"checkpoint lists some of {', '.join(POLICIES)}; found {name!r}.")
    return name


def checked_microbatch_counts(name: str, counts: Collection[int]) -> tuple[int, ...]:
    """Return the numbers of microbatches that an argument lists, each at least 1."""
    numbers = checked_list(name, counts, "numbers of microbatches, such as [8, 16]")
    return tuple(check_whole_number(name, count) for count in numbers)


def checked_list(name: str, values: Collection[T], expected: str) -> tuple[T, ...]:
    """Return the values of an argument that is a list of at least one."""
    if not values:
        raise ValueError(f"{name} lists {expected}; found {values!r}.")
    return tuple(values)


def _check_amount(name: str, number: float, expected: str) -> None:
    if not 0 < number < math.inf:
        raise ValueError(f"{name} is {expected}; found {number!r}.")
