"""The work to plan: a measured model, or given costs, as programs with their time and memory.

Costs of microbatches of any size are straight between those of sizes that were given or measured.
"""

from __future__ import annotations

import inspect
import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, cast

from fpipe.limits import refuse_too_many_ops, whole
from fpipe.model import Model
from fpipe.planning.candidates import Candidates, Machine, counts_of_microbatches
from fpipe.program import PARAMETERS, Program, ProgramError, Value
from fpipe.schedules.compare import parts_of_a_rank, shared
from fpipe.schedules.named import Named
from fpipe.timing.amounts import NamedBytes, between
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.data_parallel import data_parallel
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import WHOLE, is_sharded, shard
from fpipe.transforms.split import split

if TYPE_CHECKING:
    from fpipe.planning.model_costs import Measured


CostsOfParts = Costs | Callable[[float], Costs]
"""Costs of a whole rank, or `f(parts)`: those of an op where each rank cuts its share into so many parts."""

Share = Callable[[float, int], Costs]
"""`f(parts, slices)`: the costs of an op where each rank cuts its share of a microbatch into so many parts."""


@dataclass(frozen=True)
class CostCurve:
    """Costs by the rows of a microbatch.

    Args:
        known: for some numbers of rows.
        word: what they are: "given" or "measured".

    >>> curve = CostCurve({4.0: lambda v, _: Costs(1 / v), 8.0: lambda v, _: Costs(3 / v)}, "measured")
    >>> [(costs.forward, word) for costs, word in (curve.at(4, 2), curve.at(6, 1))]
    [(0.5, 'measured'), (2.0, 'interpolated')]
    """

    known: Mapping[float, Share]
    word: str

    def at(self, rows: float, parts: float, slices: int = 1) -> tuple[Costs, str]:
        """Return the costs of so many rows, and whether they were given, measured, or interpolated.

        Raises:
            ValueError: more rows than the most that are known, or fewer than the fewest.
        """
        if rows in self.known:
            return self.known[rows](parts, slices), self.word
        sizes = sorted(self.known)
        if not sizes[0] < rows < sizes[-1]:
            known = ", ".join(f"{size:g}" for size in sizes)
            raise ValueError(
                f"a microbatch has {rows:g} rows, and costs are {self.word} for {known} rows; between "
                "them they are interpolated, beyond them not: add costs for fewer or more rows."
            )
        high = bisect_left(sizes, rows)
        few, many = (self.known[size](parts, slices) for size in sizes[high - 1 : high + 1])
        return _between(few, many, (rows - sizes[high - 1]) / (sizes[high] - sizes[high - 1])), "interpolated"


_SECONDS = ("forward", "backward_input", "backward_weight", "recompute", "backward", "offload", "load", "exchange")
_SECONDS_OF_MOVES = "send", "receive"


def _between(few: Costs, many: Costs, share: float) -> Costs:
    """Interpolate seconds of ops and transfers, and bytes; all else is as for the smaller microbatch."""
    mixed = {
        word: between(word, getattr(few, word), getattr(many, word), share) for word in (*_SECONDS, *_SECONDS_OF_MOVES)
    }
    if isinstance(few.transfer, int | float) and isinstance(many.transfer, int | float):
        mixed["transfer"] = between("transfer", few.transfer, many.transfer, share)
    return replace(few, **mixed, bytes=_bytes(few.bytes, many.bytes, share))


def _bytes(few: Any, many: Any, share: float) -> Any:
    if isinstance(few, Mapping) and isinstance(many, Mapping):
        less, more = cast("Mapping[str, Any]", few), cast("Mapping[str, Any]", many)
        if less.keys() != more.keys():
            odd = ", ".join(sorted(less.keys() ^ more.keys()))
            raise ValueError(f"costs of several sizes say bytes of the same values; some say nothing of {odd}.")
        return {name: between(f"bytes of {name!r}", less[name], more[name], share) for name in less}
    if isinstance(few, NamedBytes) and isinstance(many, NamedBytes):
        return few.until(many, share)
    if not callable(few) or not callable(many):
        return few
    lesser, larger = cast("Callable[[Value], float]", few), cast("Callable[[Value], float]", many)
    return lambda value: between("bytes", lesser(value), larger(value), share)  # pyright: ignore[reportUnknownLambdaType]


@dataclass(frozen=True)
class Work:
    """A step that can be cut and ordered in many ways.

    Args:
        what: a model, or how many stages there are; None: as many as a schedule wants.
        curve: costs by the rows of a microbatch.
        rows: of the batch; None: each microbatch has one.
        cluster: what it runs on.
        measured: what tells the bytes of a model's programs.
        replicas: how many share the parameters out, in programs that are sharded.
    """

    what: Model | int | None
    curve: CostCurve
    rows: float | None
    cluster: Cluster | None
    measured: Measured | None = None
    replicas: int = 1

    def rows_of(self, microbatches: int) -> float:
        """Return the rows of a microbatch."""
        return 1.0 if self.rows is None else self.rows / microbatches

    def base(self, stages: int, microbatches: int) -> Program:
        """Return the step in microbatches, in no order yet; of so many stages, where that is open."""
        return chain(split(microbatches), self.merged())(base_program(stages if self.what is None else self.what))

    def merged(self) -> Transform:
        """Merge all microbatches; a model's outputs are left out, which would be held until the end."""
        return merge(outputs=self.measured is None)

    def program(self, named: Named, ranks: int, microbatches: int, policy: str) -> Program:
        """Return the step in the order of a schedule.

        Raises:
            ValueError: the schedule does not serve the sizes, with the reason.
        """
        wanted = named.schedule.wants(ranks, named.options) if named.stages is None else named.stages
        stages = len(self.what.stages) if isinstance(self.what, Model) else self.what
        if named.stages is not None and stages not in (None, wanted):
            raise ProgramError(f"there are {stages} stages, and its name says {wanted}.")
        what = wanted if self.what is None else self.what
        refuse_too_many_ops(stages or wanted, microbatches)
        options = dict(named.options)
        if "costs" in inspect.signature(named.schedule.factory).parameters:
            options = {"costs": self.costs(microbatches, (stages or wanted) / ranks)[0]} | options
        order = named.schedule.factory(ranks, **options)
        return chain(split(microbatches), checkpoint(policy), order, self.merged())(base_program(what))  # pyright: ignore[reportArgumentType]

    def sharded(self, program: Program, gather: Any) -> Program:
        """Return the program of several replicas, with a policy of gathering parameters."""
        if not gather:
            return program
        return (data_parallel() if gather == WHOLE else shard(gather=gather))(program)

    def costs(self, microbatches: int, parts: float, slices: int = 1) -> tuple[Costs, str]:
        """Return the costs of ops of which a rank has `parts` in a microbatch, and where they are from."""
        costs, word = self.curve.at(self.rows_of(microbatches), parts, slices)
        return (costs if self.cluster is None else replace(costs, cluster=self.cluster)), word

    def costs_of(self, program: Program) -> tuple[Costs, str]:
        """Return the costs of a program, with the bytes of its values, and where they are from."""
        if program.slices > 1 and self.measured:
            raise ProgramError("it cuts sequences into slices, and costs are measured of whole microbatches.")
        costs, word = self.costs(program.microbatches, parts_of_a_rank(program), program.slices)
        if isinstance(costs.bytes, NamedBytes):
            costs = replace(costs, bytes=replace(costs.bytes, replicas=self.replicas if is_sharded(program) else 1))
        return (costs if self.measured is None else self.measured.with_bytes(costs, program, self.replicas)), word


def at_home(program: Program, costs: Costs, rank: int) -> float:
    """Return the bytes of the parameters that a rank has from the start; a leaf of a stage that it has counts once."""
    known = costs.bytes if isinstance(costs.bytes, Mapping) else PARAMETERS
    local = {end.value for end in program.inputs if end.value.name in PARAMETERS and rank in end.homes}
    return sum(
        costs.size(value)
        for value in local
        if value.name in known and (not value.port or value._replace(port=0) not in local)
    )


def work_of_costs(
    costs: CostsOfParts | Mapping[float, CostsOfParts],
    machine: Machine,
    candidates: Candidates,
    rows: int | None,
    stages: int | None,
) -> Work:
    """Return the work of costs that are given, by the rows of a microbatch."""
    for word, count in (("rows", rows), ("stages", stages)):
        if count is not None:
            whole(word, count, most=math.inf)
    sizes = [1.0 if rows is None else rows / count for count in candidates.microbatches]
    if isinstance(costs, Mapping):
        by_size = costs
        if rows is None:
            raise ValueError("costs by the rows of a microbatch need rows=, how many the batch has.")
    else:
        by_size = dict.fromkeys(sizes, costs)
        if len(by_size) > 1:
            raise ValueError(
                f"microbatches of {', '.join(f'{size:g}' for size in by_size)} rows cost different times: say "
                "{rows: costs} for two sizes or more, or leave rows= out for batches of different size."
            )
    if not by_size or not all(isinstance(size, int | float) and size > 0 for size in by_size):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"costs are listed by the rows of a microbatch, above 0; found {list(by_size)}.")
    shares = {float(size): _share(cost, stages is not None) for size, cost in by_size.items()}
    byte_sizes = [share(1, 1).bytes for share in shares.values()]
    if len(shares) > 1 and any(hasattr(size, "storages") and not isinstance(size, NamedBytes) for size in byte_sizes):
        raise ValueError("bytes by fpipe.sizes are of microbatches of one size; say {name: bytes} for each.")
    without_bytes = [f"{rows:g}" for rows, size in zip(shares, byte_sizes, strict=True) if size is None]
    if 0 < len(without_bytes) < len(byte_sizes):
        raise ValueError(
            f"costs of several sizes all say bytes, or none do; those of {', '.join(without_bytes)} rows say none."
        )
    work = Work(stages, CostCurve(shares, "given"), rows, machine.links, replicas=_sharing(machine, candidates))
    first, *_ = [work.costs(count, 1)[0] for count in candidates.microbatches]
    if machine.links is not None and min(machine.links.memory) < math.inf and first.bytes is None:
        raise ValueError("a cluster's memory is in bytes: say the bytes of values, Costs(bytes=...).")
    return work


def _sharing(machine: Machine, candidates: Candidates) -> int:
    """Return how many replicas share the parameters out."""
    return 1 if candidates.shard is None else machine.replica_count


def _share(costs: CostsOfParts, of_stage: bool) -> Share:
    if isinstance(costs, Costs):
        return (lambda parts, slices: costs) if of_stage else partial(shared, costs)
    if not callable(costs):
        raise TypeError(
            "what is planned is an fpipe.Model, fpipe.Costs, {rows: costs} or f(parts) -> costs; found "
            f"{type(costs).__name__}."
        )
    return lambda parts, slices: costs(parts)


def work_of_model(
    measured: Measured,
    machine: Machine,
    candidates: Candidates,
    profiled: Collection[int] | None,
    repeats: int,
    progress: Callable[[int, int, str], None],
) -> Work:
    """Return the work of a model that is profiled, or estimated, at some numbers of microbatches."""
    counts = candidates.microbatches if profiled is None else counts_of_microbatches("profiled", profiled)
    beyond = [count for count in candidates.microbatches if not min(counts) <= count <= max(counts)]
    if beyond:
        raise ValueError(
            f"costs at {beyond[0]} microbatches are not between those at {', '.join(map(str, sorted(counts)))}, which "
            "are profiled; add a number beyond it to profiled=."
        )
    costs = measured.costs(counts, repeats, progress)
    shares: dict[float, Share] = {rows: (lambda parts, slices, cost=cost: cost) for rows, cost in costs.items()}
    curve = CostCurve(shares, "measured" if measured.flops is None else "estimated")
    return Work(measured.model, curve, measured.rows, machine.links, measured, _sharing(machine, candidates))
