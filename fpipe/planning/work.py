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

from fpipe.limits import check_whole_number, refuse_too_many_ops
from fpipe.model import Model
from fpipe.planning.candidates import Candidates, Machine, checked_microbatch_counts
from fpipe.program import PARAMETERS, Program, ProgramError, Value
from fpipe.schedules.compare import parts_of_a_rank, share_costs
from fpipe.schedules.notations import NamedSchedule
from fpipe.timing.amounts import NamedBytes, interpolate
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs
from fpipe.timing.lengths import require_equal_microbatches
from fpipe.transforms._rewrite import Transform, chain
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.data_parallel import data_parallel
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import NEVER, gathers_params, shard
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

if TYPE_CHECKING:
    from fpipe.measuring.profile import MeasuredModel


CostsOfParts = Costs | Callable[[float], Costs]
"""Costs of a whole rank, or `f(parts)`: those of an op where each rank cuts its share into so many parts."""

CostShare = Callable[[float, int], Costs]
"""`f(parts, slices)`: the costs of an op where each rank cuts its share of a microbatch into so many parts."""


@dataclass(frozen=True)
class CostCurve:
    """Costs by the rows of a microbatch.

    Args:
        shares_by_rows: costs for some numbers of rows.
        source: where they are from: "given", "measured" or "estimated".

    >>> curve = CostCurve({4.0: lambda v, _: Costs(1 / v), 8.0: lambda v, _: Costs(3 / v)}, "measured")
    >>> [(costs.forward, source) for costs, source in (curve.costs_at(4, 2), curve.costs_at(6, 1))]
    [(0.5, 'measured'), (2.0, 'interpolated')]
    """

    shares_by_rows: Mapping[float, CostShare]
    source: str

    def costs_at(self, rows: float, parts: float, slices: int = 1) -> tuple[Costs, str]:
        """Return the costs of so many rows, and whether they were given, measured, or interpolated.

        Raises:
            ValueError: more rows than the most that are known, or fewer than the fewest.
        """
        if rows in self.shares_by_rows:
            return self.shares_by_rows[rows](parts, slices), self.source
        sizes = sorted(self.shares_by_rows)
        if not sizes[0] < rows < sizes[-1]:
            known_sizes = ", ".join(f"{size:g}" for size in sizes)
            raise ValueError(
                f"a microbatch has {rows:g} rows, and costs are {self.source} for {known_sizes}; add {rows:g} rows."
            )
        # The two sizes around `rows`, of which `high` indexes the larger.
        high = bisect_left(sizes, rows)
        smaller, larger = (self.shares_by_rows[size](parts, slices) for size in sizes[high - 1 : high + 1])
        weight = (rows - sizes[high - 1]) / (sizes[high] - sizes[high - 1])
        return _interpolate_costs(smaller, larger, weight), "interpolated"


_SECONDS = ("forward", "backward_input", "backward_weight", "recompute", "backward", "offload", "load", "exchange")
_SECONDS_OF_TRANSFERS = "send", "receive"


def _interpolate_costs(smaller: Costs, larger: Costs, weight: float) -> Costs:
    """Interpolate seconds of ops and transfers, and bytes; all else is as for the smaller microbatch."""
    for costs in (smaller, larger):
        require_equal_microbatches(costs, "interpolation")
    # Links and the cluster do not depend on rows. A transfer that is a table or a function is left as it is.
    fields = {
        field_name: interpolate(field_name, getattr(smaller, field_name), getattr(larger, field_name), weight)
        for field_name in (*_SECONDS, *_SECONDS_OF_TRANSFERS)
    }
    if isinstance(smaller.transfer, int | float) and isinstance(larger.transfer, int | float):
        fields["transfer"] = interpolate("transfer", smaller.transfer, larger.transfer, weight)
    return replace(smaller, **fields, bytes=_interpolate_bytes(smaller.bytes, larger.bytes, weight))


def _interpolate_bytes(smaller: Any, larger: Any, weight: float) -> Any:
    # Bytes have three forms: by name, `NamedBytes`, and a function of a value. Sizes of a model are counted for each
    # program anyway, and so are left as they are.
    if isinstance(smaller, Mapping) and isinstance(larger, Mapping):
        low, high = cast("Mapping[str, Any]", smaller), cast("Mapping[str, Any]", larger)
        if low.keys() != high.keys():
            missing = ", ".join(sorted(low.keys() ^ high.keys()))
            raise ValueError(f"some costs say bytes of {missing}, and others do not.")
        return {name: interpolate(f"bytes of {name!r}", low[name], high[name], weight) for name in low}
    if isinstance(smaller, NamedBytes) and isinstance(larger, NamedBytes):
        return smaller.interpolate(larger, weight)
    if not callable(smaller) or not callable(larger):
        return smaller
    low_size, high_size = cast("Callable[[Value], float]", smaller), cast("Callable[[Value], float]", larger)
    return lambda value: interpolate("bytes", low_size(value), high_size(value), weight)  # pyright: ignore[reportUnknownLambdaType]


@dataclass(frozen=True)
class Work:
    """A step that is planned: the programs and costs of all ways to cut and order it.

    Args:
        model_or_stages: a model, or how many stages there are; None: as many as a schedule wants.
        curve: costs by the rows of a microbatch.
        rows: of the batch; None: each microbatch has one.
        cluster: what it runs on.
        measured: the model that counts bytes of programs; None for given costs.
        replicas: how many shard the parameters, in programs that are sharded.
    """

    model_or_stages: Model | int | None
    curve: CostCurve
    rows: float | None
    cluster: Cluster | None
    measured: MeasuredModel | None = None
    replicas: int = 1

    def rows_of(self, microbatches: int) -> float:
        """Return the rows of a microbatch."""
        return 1.0 if self.rows is None else self.rows / microbatches

    def unscheduled_program(self, stages: int, microbatches: int) -> Program:
        """Return the step in microbatches, not yet scheduled; `stages` counts if their number is open."""
        program = base_program(stages if self.model_or_stages is None else self.model_or_stages)
        return chain(split(microbatches), self.merge_transform())(program)

    def merge_transform(self) -> Transform:
        """Return the transform that merges microbatches, without a model's outputs, which would be held to the end."""
        return merge(outputs=self.measured is None)

    def scheduled_program(self, named: NamedSchedule, ranks: int, microbatches: int, policy: str) -> Program:
        """Return the step under a schedule and a policy of recomputing.

        Raises:
            ValueError: the schedule does not serve the sizes, with the reason.
        """
        wanted_stages = named.schedule.stage_count(ranks, named.options) if named.stages is None else named.stages
        stages = len(self.model_or_stages.stages) if isinstance(self.model_or_stages, Model) else self.model_or_stages
        if named.stages is not None and stages not in (None, wanted_stages):
            raise ProgramError(f"there are {stages} stages, and its name says {wanted_stages}.")
        model_or_stages = wanted_stages if self.model_or_stages is None else self.model_or_stages
        refuse_too_many_ops(stages or wanted_stages, microbatches)
        # A schedule that plans by costs gets those of its stages, unless its name has given some.
        options = dict(named.options)
        if "costs" in inspect.signature(named.schedule.factory).parameters:
            options = {"costs": self.costs_of_parts(microbatches, (stages or wanted_stages) / ranks)[0]} | options
        schedule = named.schedule.factory(ranks, **options)
        recompute = checkpoint(policy)  # pyright: ignore[reportArgumentType] # Candidates has checked the policy
        step = chain(split(microbatches), recompute, schedule, self.merge_transform())
        return step(base_program(model_or_stages))

    def with_replicas(self, program: Program, gather: Any) -> Program:
        """Return the program with replicas, under a policy of gathering parameters; an empty policy changes nothing."""
        if not gather:
            return program
        return (data_parallel() if gather == NEVER else shard(gather=gather))(program)

    def costs_of_parts(self, microbatches: int, parts: float, slices: int = 1) -> tuple[Costs, str]:
        """Return costs if a rank's share of a microbatch is cut into `parts` ops, and where they are from."""
        costs, source = self.curve.costs_at(self.rows_of(microbatches), parts, slices)
        return (costs if self.cluster is None else replace(costs, cluster=self.cluster)), source

    def costs_of(self, program: Program) -> tuple[Costs, str]:
        """Return the costs of a program, with the bytes of its values, and where they are from."""
        if program.slices > 1 and self.measured:
            raise ProgramError("it cuts sequences into slices, and costs are measured of whole microbatches.")
        costs, source = self.costs_of_parts(program.microbatches, parts_of_a_rank(program), program.slices)
        if isinstance(costs.bytes, NamedBytes):
            costs = replace(costs, bytes=replace(costs.bytes, replicas=self.replicas if gathers_params(program) else 1))
        return (costs if self.measured is None else self.measured.with_bytes(costs, program, self.replicas)), source


def home_bytes(program: Program, costs: Costs, rank: int) -> float:
    """Return the bytes of parameters that a rank has from the start."""
    # Port 0 is all parameters of a stage, other ports are single leaves of it: with both, the leaf counts once.
    counted_names = costs.bytes if isinstance(costs.bytes, Mapping) else PARAMETERS
    local = {end.value for end in program.inputs if end.value.name in PARAMETERS and rank in end.homes}
    counted = (value for value in local if value.name in counted_names)
    return sum(costs.size(value) for value in counted if not value.port or value._replace(port=0) not in local)


def work_of_costs(
    costs: CostsOfParts | Mapping[float, CostsOfParts],
    machine: Machine,
    candidates: Candidates,
    rows: int | None,
    stages: int | None,
) -> Work:
    """Make the work of given costs, by the rows of a microbatch; see `plan_run` for their forms."""
    # 1. Costs by rows. One set of costs can only serve microbatches of one size.
    for name, count in (("rows", rows), ("stages", stages)):
        if count is not None:
            check_whole_number(name, count, maximum=math.inf)
    sizes = [1.0 if rows is None else rows / count for count in candidates.microbatches]
    if isinstance(costs, Mapping):
        costs_by_rows = costs
        if rows is None:
            raise ValueError("{rows: costs} needs rows=, how many the batch has.")
    else:
        costs_by_rows = dict.fromkeys(sizes, costs)
        if len(costs_by_rows) > 1:
            raise ValueError(
                f"microbatches of {', '.join(f'{size:g}' for size in costs_by_rows)} rows need {{rows: costs}} "
                "for two sizes or more; or leave rows= out."
            )
    if not costs_by_rows or not all(isinstance(size, int | float) and size > 0 for size in costs_by_rows):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"costs are by rows of a microbatch, above 0; found {list(costs_by_rows)}.")
    # 2. All have bytes, or none; else memory would be in two units.
    shares = {float(size): _share_of(cost, stages is not None) for size, cost in costs_by_rows.items()}
    byte_sizes = [share(1, 1).bytes for share in shares.values()]
    if len(shares) > 1 and any(hasattr(size, "storages") and not isinstance(size, NamedBytes) for size in byte_sizes):
        raise ValueError("fpipe.sizes counts for one size; say {name: bytes} for each.")
    without_bytes = [f"{rows:g}" for rows, size in zip(shares, byte_sizes, strict=True) if size is None]
    if 0 < len(without_bytes) < len(byte_sizes):
        raise ValueError(f"all costs say bytes, or none do; those of {', '.join(without_bytes)} rows say none.")
    # 3. Asking for the costs of each number of microbatches refuses what is not between the given ones.
    replicas = _sharding_replicas(machine, candidates)
    work = Work(stages, CostCurve(shares, "given"), rows, machine.links, replicas=replicas)
    costs_of_first, *_ = [work.costs_of_parts(count, 1)[0] for count in candidates.microbatches]
    if machine.links is not None and min(machine.links.memory) < math.inf and costs_of_first.bytes is None:
        raise ValueError("a cluster's memory needs bytes of values: Costs(bytes=...).")
    return work


def _sharding_replicas(machine: Machine, candidates: Candidates) -> int:
    return 1 if candidates.shard is None else machine.replica_count


def _share_of(costs: CostsOfParts, are_of_one_stage: bool) -> CostShare:
    if isinstance(costs, Costs):
        return (lambda parts, slices: costs) if are_of_one_stage else partial(share_costs, costs)
    if not callable(costs):
        raise TypeError(
            "plan_run takes an fpipe.Model, fpipe.Costs, {rows: costs} or f(parts) -> costs; found "
            f"{type(costs).__name__}."
        )
    return lambda parts, slices: costs(parts)


def work_of_model(
    measured: MeasuredModel,
    machine: Machine,
    candidates: Candidates,
    profiled: Collection[int] | None,
    repeats: int,
    progress: Callable[[int, int, str], None],
) -> Work:
    """Make the work of a model that is profiled, or estimated, at some numbers of microbatches."""
    counts = candidates.microbatches if profiled is None else checked_microbatch_counts("profiled", profiled)
    outside = [count for count in candidates.microbatches if not min(counts) <= count <= max(counts)]
    if outside:
        known_counts = ", ".join(map(str, sorted(counts)))
        raise ValueError(
            f"costs are profiled at {known_counts} microbatches, and {outside[0]} is not between them: add it to "
            "profiled=."
        )
    costs = measured.costs(counts, repeats, progress)
    # A model has its own stages, so its costs do not depend on how a rank's share is cut.
    shares: dict[float, CostShare] = {rows: (lambda parts, slices, cost=cost: cost) for rows, cost in costs.items()}
    curve = CostCurve(shares, "measured" if measured.flops is None else "estimated")
    return Work(measured.model, curve, measured.rows, machine.links, measured, _sharding_replicas(machine, candidates))
