"""Makespans of a program when costs vary about the nominal: drawn many times, simulated all at once.

Where nothing but the main lanes matters it stands apart from `lanes.walk`: a step is one operation on a vector with a
number for each draw. A law holds it to the lanes.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from fpipe.program import Op, Program, Value
from fpipe.timing.columns import is_plain, op_groups
from fpipe.timing.costs import Costs
from fpipe.timing.lanes import is_work, walk
from fpipe.timing.timeline import makespan_of

if TYPE_CHECKING:
    from torch import Tensor


_MOST = 1e6  # beyond it nothing is known of a makespan, and squares overflow


@dataclass(frozen=True)
class Noise:
    """How far costs vary, in each of many draws.

    Args:
        jitter: the standard deviation of an op's seconds, as a share of them; each op is drawn for itself, from a
            lognormal distribution with the nominal cost as its mean.
        slow_rank: one rank, another in each draw, takes so many times as long for all it does.
        slow_link: one link between two ranks, another in each draw, takes so many times as long, both ways.

    Raises:
        ValueError: a jitter below 0, or a factor below 1.

    >>> Noise(jitter=0.1, slow_rank=1.5)
    Noise(jitter=0.1, slow_rank=1.5, slow_link=1.0)
    """

    jitter: float = 0.0
    slow_rank: float = 1.0
    slow_link: float = 1.0

    def __post_init__(self) -> None:
        for field in fields(self):
            given: Any = getattr(self, field.name)
            least = 0 if field.name == "jitter" else 1
            number = isinstance(given, int | float) and not isinstance(given, bool)
            if not number or not least <= given <= _MOST:
                word = "a share of an op's seconds" if field.name == "jitter" else "how many times as long it takes"
                raise ValueError(f"{field.name} is {word}, a number from {least} to {_MOST:.0f}; found {given!r}.")


def makespans(program: Program, costs: Costs, noise: Noise, samples: int, seed: int) -> list[float]:
    """The makespan of each draw. An op is drawn by its name, so the same work is as slow in every program."""
    import torch

    with torch.inference_mode():
        draws = _Draws(program, costs, noise, samples, seed)
        if is_plain(op_groups(program.ops), costs):
            return _at_once(program, costs, draws)
        return [_alone(program, costs, draws, number) for number in range(samples)]


class _Draws:
    """The factors of ops, ranks and links: a number for each draw."""

    def __init__(self, program: Program, costs: Costs, noise: Noise, samples: int, seed: int) -> None:
        import torch

        self.noise, self.samples, self.seed = noise, samples, seed
        self.spread = math.sqrt(math.log1p(noise.jitter**2))
        self.generator = torch.Generator()
        ranks = program.ranks
        slow = self._uniform("rank").mul_(ranks).to(torch.int64)
        self.of_rank = [torch.where(slow == rank, noise.slow_rank, 1.0).to(torch.float64) for rank in range(ranks)]
        ways = ((op.rank, program.ops[at].rank) for op, sources in zip(program.ops, program.sources, strict=True)
                for at in sources if at >= 0)  # fmt: skip
        links = sorted({(min(way), max(way)) for way in ways if way[0] != way[1]})
        slow = self._uniform("link").mul_(max(1, len(links))).to(torch.int64)
        self.of_link = {
            link: torch.where(slow == at, noise.slow_link, 1.0).to(torch.float64) for at, link in enumerate(links)
        }
        self.even = torch.ones(samples, dtype=torch.float64)
        self.of_op = [self._op(op, costs) for op in program.ops]

    def _seeded(self, name: str) -> Any:
        return self.generator.manual_seed(zlib.crc32(f"{self.seed} {name}".encode()))

    def _uniform(self, name: str) -> Tensor:
        import torch

        return torch.rand(self.samples, generator=self._seeded(name), dtype=torch.float64)

    def _op(self, op: Op, costs: Costs) -> Tensor:
        """The factors of an op's seconds."""
        import torch

        if op.kind in ("SEND", "RECV", "FREE") or not costs.seconds(op):
            return self.even
        factor = self.of_rank[op.rank]
        if not self.spread:
            return factor
        drawn = torch.randn(self.samples, generator=self._seeded(op.cell), dtype=torch.float64)
        return drawn.mul_(self.spread).sub_(self.spread**2 / 2).exp_().mul_(factor)

    def link(self, source: int, target: int) -> Tensor:
        """The factors of a link, both ways."""
        return self.of_link.get((min(source, target), max(source, target)), self.even)


def _at_once(program: Program, costs: Costs, draws: _Draws) -> list[float]:
    """Walk as `columns.walk_plain` does, apart from it since a time is a number for each draw: no loop a draw."""
    import torch

    ops, ranks = program.ops, program.ranks
    transfer: Any = costs.transfer
    nothing = torch.zeros(draws.samples, dtype=torch.float64)
    free, last = [nothing] * ranks, nothing
    ends: list[Tensor] = []
    ways = {
        (source, target): draws.link(source, target) * transfer for source in range(ranks) for target in range(ranks)
    } if transfer else {}  # fmt: skip
    homes = {end.value: end.homes for end in program.inputs}
    for op, sources, factor in zip(ops, program.sources, draws.of_op, strict=True):
        cost, rank = costs.seconds(op), op.rank
        work = is_work(op, cost)
        start = free[rank] if work else nothing
        for value, source in zip(op.reads, sources, strict=True):
            where = homes[value] if source < 0 else (ops[source].rank,)
            ready = nothing if source < 0 else ends[source]
            if transfer and rank not in where:
                ready = ready + ways[min(where), rank]
            if ready is not nothing:
                start = torch.maximum(start, ready)
        end = start + factor * cost if cost else start
        ends.append(end)
        if work:
            free[rank] = end
            last = torch.maximum(last, end)
    return last.tolist()


def _alone(program: Program, costs: Costs, draws: _Draws, number: int) -> float:
    """One draw of costs that ask for more: links that carry one value at a time, busy senders, copies, clusters."""
    pairs = zip(program.ops, draws.of_op, strict=True)
    factors = {op.cell: float(factor[number]) for op, factor in pairs if factor is not draws.even}

    class Strayed(Costs):
        def seconds(self, op: Op) -> float:
            return super().seconds(op) * factors.get(op.cell, 1.0)

        def latency(self, source: int, target: int) -> float:
            return super().latency(source, target) * float(draws.link(source, target)[number])

        def carrying(self, value: Value, source: int, target: int) -> float:
            return super().carrying(value, source, target) * float(draws.link(source, target)[number])

    made = next(walk(program, Strayed(**{one.name: getattr(costs, one.name) for one in fields(costs)})))
    return makespan_of(program.ops, made.starts, made.ends, program.ranks)
