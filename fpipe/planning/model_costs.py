"""A model's costs, measured here for microbatches of some sizes, and the bytes that each of its programs holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fpipe import tree
from fpipe.meaning.single_device.params_and_state import refuse_meta
from fpipe.measuring.estimate import estimate
from fpipe.measuring.profile import profile
from fpipe.measuring.sizes import Sizes, sizes
from fpipe.model import Model
from fpipe.program import Program, Value
from fpipe.timing.costs import Costs, Storages
from fpipe.training import program as base_program
from fpipe.transforms.chain import chain
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
        """Of the batch."""
        leaves = (leaf for leaf in tree.leaves(self.batch) if isinstance(leaf, torch.Tensor) and leaf.ndim)
        first = next(leaves, None)
        if first is None:
            raise ValueError("the batch has no tensor with rows to split into microbatches.")
        return first.shape[0]

    def costs(
        self, microbatches: Iterable[int], repeats: int, progress: Callable[[int, int, str], None]
    ) -> dict[float, Costs]:
        """By the rows of a microbatch: profiled, one op at a time, or estimated, where `flops` are said."""
        if self.flops is None:
            way_out = "say flops=, operations a second of a rank, and costs are estimated"
            refuse_meta(way_out, params=self.params, batch=self.batch, state=self.state)
        counts, found = [*microbatches], dict[float, Costs]()
        for done, count in enumerate(counts):
            program = chain(split(count), merge())(base_program(self.model))
            given: Any = program, self.model, self.params, self.batch
            if self.flops is None:
                costs = profile(
                    *given,
                    state=self.state,
                    key=0,  # of dropout; its value changes no time
                    repeats=repeats,
                    progress=lambda done, every, count=count: progress(done, every, f"profiling m={count}"),
                )
            else:
                progress(done, len(counts), f"estimating m={count}")
                costs = estimate(*given, flops=self.flops, state=self.state)
            found[self.rows / count] = costs
        return found

    def with_bytes(self, costs: Costs, program: Program, replicas: int = 1) -> Costs:
        """These costs with the bytes of a program's own values, and of parameters that travel or are gathered."""
        shares = is_sharded(program)
        count = replicas if shares else 1
        own = sizes(program, self.model, self.params, self.batch, state=self.state, replicas=count)
        return replace(costs, bytes=own if shares else _WithParams(own))


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
        """Its bytes when it travels."""
        return self.sizes.size(value)
