"""The work to plan: a measured model, or given costs, as programs with their time and memory."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fpipe.model import Model
from fpipe.planning.cost_curve import CostCurve
from fpipe.program import PARAMETERS, Program, ProgramError, Value
from fpipe.schedules.compare import parts_of_a_rank
from fpipe.schedules.named import Named
from fpipe.timing.cluster import Cluster
from fpipe.timing.costs import Costs
from fpipe.timing.value_bytes import NamedBytes
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.chain import chain
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.data_parallel import data_parallel
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import WHOLE, is_sharded, shard
from fpipe.transforms.split import split

if TYPE_CHECKING:
    from fpipe.planning.model_costs import Measured


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
        """Rows of a microbatch."""
        return 1.0 if self.rows is None else self.rows / microbatches

    def base(self, stages: int, microbatches: int) -> Program:
        """The step in microbatches, in no order yet; of so many stages, where that is open."""
        return chain(split(microbatches), self.merged())(base_program(stages if self.what is None else self.what))

    def merged(self) -> Transform:
        """One result of all microbatches; of a model without its outputs, which would be held until the end."""
        return merge(outputs=self.measured is None)

    def program(self, named: Named, ranks: int, microbatches: int, policy: str) -> Program:
        """The step in the order of a schedule.

        Raises:
            ValueError: the schedule does not serve the sizes, with the reason.
        """
        wanted = named.schedule.wants(ranks, named.options) if named.stages is None else named.stages
        stages = len(self.what.stages) if isinstance(self.what, Model) else self.what
        if named.stages is not None and stages not in (None, wanted):
            raise ProgramError(f"there are {stages} stages, and its name says {wanted}.")
        what = wanted if self.what is None else self.what
        told = dict(named.options)
        if "costs" in inspect.signature(named.schedule.factory).parameters:
            told = {"costs": self.costs(microbatches, (stages or wanted) / ranks)[0]} | told
        order = named.schedule.factory(ranks, **told)
        return chain(split(microbatches), checkpoint(policy), order, self.merged())(base_program(what))  # pyright: ignore[reportArgumentType]

    def sharded(self, program: Program, gather: Any) -> Program:
        """The program of several replicas, with a policy of gathering parameters; none: as it is."""
        if not gather:
            return program
        return (data_parallel() if gather == WHOLE else shard(gather=gather))(program)

    def costs(self, microbatches: int, parts: float, slices: int = 1) -> tuple[Costs, str]:
        """Of ops of which a rank has so many in a microbatch, and where they are from."""
        costs, word = self.curve.at(self.rows_of(microbatches), parts, slices)
        return (costs if self.cluster is None else replace(costs, cluster=self.cluster)), word

    def costs_of(self, program: Program) -> tuple[Costs, str]:
        """Of a program, with the bytes of its own values."""
        if program.slices > 1 and self.measured:
            raise ProgramError("it cuts sequences into slices, and costs are measured of whole microbatches.")
        costs, word = self.costs(program.microbatches, parts_of_a_rank(program), program.slices)
        if isinstance(costs.bytes, NamedBytes):
            costs = replace(costs, bytes=replace(costs.bytes, replicas=self.replicas if is_sharded(program) else 1))
        return (costs if self.measured is None else self.measured.with_bytes(costs, program, self.replicas)), word


def at_home(program: Program, costs: Costs, rank: int) -> float:
    """Bytes of the parameters that a rank has from the start; a leaf of a stage that it has counts once."""
    here = {end.value for end in program.inputs if end.value.name in PARAMETERS and rank in end.homes}
    return sum(_size(value, costs) for value in here if not value.port or value._replace(port=0) not in here)


def _size(value: Value, costs: Costs) -> float:
    if isinstance(costs.bytes, Mapping) and value.name not in costs.bytes:
        return 0.0
    return costs.size(value)
