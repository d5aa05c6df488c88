"""A model's costs, measured here for microbatches of some sizes, and the bytes that each of its programs holds."""

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
from fpipe.training import program as base_program
from fpipe.transforms._rewrite import chain
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import is_sharded
from fpipe.transforms.split import split


@dataclass(frozen=True)
class Measured:
    """A model, and what its step takes."""

    model: Model
    params: Sequence[Any]
    batch: tuple[Any, Any]
    state: Sequence[Any] | None
    flops: float | None = None

    @property
    def rows(self) -> int:
        """How many the batch has."""
        leaves = (leaf for leaf in tree.leaves(self.batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
        first = next(leaves, None)
        if first is None:
            raise ValueError("the batch has no tensor with rows to split into microbatches.")
        return first.shape[0]

    def costs(
        self, microbatches: Iterable[int], repeats: int, progress: Callable[[int, int, str], None]
    ) -> dict[float, Costs]:
        """Return the costs by the rows of a microbatch: profiled, one op at a time, or by `flops` estimated."""
        if self.flops is None:
            way_out = "say flops=, operations a second of a rank, and costs are estimated"
            refuse_meta(way_out, params=self.params, batch=self.batch, state=self.state)
        counts, costs_by_rows = [*microbatches], dict[float, Costs]()
        for done, count in enumerate(counts):
            program = chain(split(count), merge())(base_program(self.model))
            example: Any = program, self.model, self.params, self.batch
            if self.flops is None:
                costs = profile(
                    *example,
                    state=self.state,
                    key=0,  # of dropout; its value changes no time
                    repeats=repeats,
                    progress=lambda done, total, count=count: progress(done, total, f"profiling m={count}"),
                )
            else:
                progress(done, len(counts), f"estimating m={count}")
                costs = estimate(*example, flops=self.flops, state=self.state)
            costs_by_rows[self.rows / count] = costs
        return costs_by_rows

    def with_bytes(self, costs: Costs, program: Program, replicas: int = 1) -> Costs:
        """Add the bytes of a program's values, and of parameters that travel or are gathered."""
        shares = is_sharded(program)
        count = replicas if shares else 1
        byte_sizes = sizes(program, self.model, self.params, self.batch, state=self.state, replicas=count)
        return replace(costs, bytes=byte_sizes if shares else _WithParams(byte_sizes))


@dataclass(frozen=True)
class _WithParams:
    """Sizes of values, where parameters that have travelled count too."""

    sizes: Sizes

    def storages(self, value: Value) -> Storages:
        """The storages of a value."""
        if value.name == "params":
            return {value._replace(at=""): self.sizes.size(value)}
        return self.sizes.storages(value)

    def size(self, value: Value) -> float:
        """The bytes of a value when it travels."""
        return self.sizes.size(value)
