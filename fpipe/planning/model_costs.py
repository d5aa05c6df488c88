"""Measure a model's costs for microbatches of some sizes, and count the bytes that each of its programs holds.

seconds   depend on the rows of a microbatch:   profiled or estimated once for each size
bytes     depend on the program too:            counted for each program, by `fpipe.sizes`
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fpipe import tree
from fpipe.meaning.single_device.params_and_state import refuse_meta
from fpipe.measuring.profile import estimate, profile
from fpipe.measuring.sizes import Sizes, sizes
from fpipe.model import Model
from fpipe.program import Program, Value
from fpipe.timing.costs import Costs, Storages
from fpipe.transforms._rewrite import chain
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import is_sharded
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program


@dataclass(frozen=True)
class MeasuredModel:
    """A model with the arguments of its step, from which its costs are measured, or estimated by `flops`."""

    model: Model
    params: Sequence[Any]
    batch: tuple[Any, Any]
    state: Sequence[Any] | None
    flops: float | None = None

    @property
    def rows(self) -> int:
        """Number of rows of the batch."""
        leaves = (leaf for leaf in tree.leaves(self.batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
        first_leaf = next(leaves, None)
        if first_leaf is None:
            raise ValueError("the batch has no tensor with rows to split into microbatches.")
        return first_leaf.shape[0]

    def costs(
        self, microbatches: Iterable[int], repeats: int, progress: Callable[[int, int, str], None]
    ) -> dict[float, Costs]:
        """Return the costs by the rows of a microbatch: profiled one op at a time, or estimated by `flops`."""
        if self.flops is None:
            remedy = "say flops=, operations a second of a rank, and costs are estimated"
            refuse_meta(remedy, params=self.params, batch=self.batch, state=self.state)
        counts, costs_by_rows = [*microbatches], dict[float, Costs]()
        for done, count in enumerate(counts):
            program = chain(split(count), merge())(base_program(self.model))
            example: Any = program, self.model, self.params, self.batch
            if self.flops is None:
                costs = profile(
                    *example,
                    state=self.state,
                    key=0,  # the random key of dropout: its value changes no time
                    repeats=repeats,
                    progress=lambda done, total, count=count: progress(done, total, f"profiling m={count}"),
                )
            else:
                progress(done, len(counts), f"estimating m={count}")
                costs = estimate(*example, flops=self.flops, state=self.state)
            costs_by_rows[self.rows / count] = costs
        return costs_by_rows

    def with_bytes(self, costs: Costs, program: Program, replicas: int = 1) -> Costs:
        """Add the bytes of a program's values to its costs, with parameters that travel or are gathered."""
        # In a sharded program `sizes` counts gathered parameters itself.
        has_shards = is_sharded(program)
        replica_count = replicas if has_shards else 1
        byte_sizes = sizes(program, self.model, self.params, self.batch, state=self.state, replicas=replica_count)
        return replace(costs, bytes=byte_sizes if has_shards else _SizesWithParams(byte_sizes))


@dataclass(frozen=True)
class _SizesWithParams:
    """Sizes of values in which parameters that have travelled to another rank count too."""

    sizes: Sizes

    def storages(self, value: Value) -> Storages:
        if value.name == "params":
            return {value._replace(at=""): self.sizes.size(value)}
        return self.sizes.storages(value)

    def size(self, value: Value) -> float:
        return self.sizes.size(value)
