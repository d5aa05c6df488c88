"""Measure the costs of a program's ops: seconds for each stage and kind, and the bytes of its values.

The ops run one after the other in this process, several times, and the least time of each counts, since anything else
on the machine can only add to it. Or the ranks run together, as in training: then the typical run counts, since ranks
do slow each other down. Kinds that the program lacks are measured too: its backward whole and cut in two, its residuals
recomputed. So the costs serve other schedules.

seconds   depend on the rows of a microbatch:   profiled or estimated once for each size
bytes     depend on the program too:            counted for each program, by `fpipe.sizes`"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch

from fpipe import tree
from fpipe.graphs.language.flops import flops_of
from fpipe.meaning.inputs_and_results import check_match
from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.single_device.params_and_state import refuse_meta
from fpipe.meaning.step import StepInputs, StepOptions
from fpipe.measuring.sizes import Sizes, sizes
from fpipe.measuring.timeline_costs import (
    Runs,
    TransferSeconds,
    add_run,
    mean_seconds,
    op_seconds,
    transfer_seconds,
    variants_of,
    with_halves,
)
from fpipe.model import Model
from fpipe.program import Op, Program, Value
from fpipe.runtimes.build import build
from fpipe.runtimes.lowering.prepared_step import PreparedStep
from fpipe.runtimes.lowering.slots import ProcessContext
from fpipe.runtimes.lowering.stage_calls import UntracedStages
from fpipe.timing.costs import Costs, Storages
from fpipe.timing.timeline import Timeline
from fpipe.torch_internals import warn
from fpipe.transforms._rewrite import chain
from fpipe.transforms.communicate import communicate
from fpipe.transforms.merge import merge
from fpipe.transforms.shard import gathers_params
from fpipe.transforms.split import split
from fpipe.transforms.training import program as base_program

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def profile(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    state: Sequence[Any] | None = None,
    key: int | None = None,
    repeats: int = 5,
    progress: Callable[[int, int], None] | None = None,
    runtime: Literal["local", "threads", "distributed"] = "local",
    mesh: DeviceMesh | None = None,
) -> Costs:
    """Measure the seconds of a program's ops on this machine, and compute the bytes of its values.

    Parameters, buffers, random numbers and modes are as they were afterwards.

    Args:
        program: how the batch is split; its ranks and order matter only where they run together.
        model, params, batch, state, key: as a step takes them.
        repeats: how often each op is timed, after a first run that is not.
        progress: called as `progress(done, all)` before the first and after each run of the whole program.
        runtime: "local" runs one op at a time, and the least time of each counts: a machine that the op has for itself.
            "threads" and "distributed" run the ranks together, as `build` does: the mean of a run's ops counts, and the
            median of all runs, with what an op's rank does until its next: add up, start what it exchanges, and
            whatever the other ranks and the runtime take. So one schedule tells the times of others with the same
            stages. Say `one_f_one_b`, which takes forwards and backwards in turn, as most do: forwards in a row, as in
            `gpipe`, find their weights in the processor's cache.
        mesh: of runtime="distributed", as `build` takes it. All processes call this alike, and those of a replica get
            the same costs. params are those of all ranks; meta tensors will do for stages of others. Of a program with
            replicas these are shards where it has GATHERs, and bytes are then left out.
            Over gloo a GATHER or SCATTER is over when somebody waits for it: for the costs of another policy of
            gathering, profile with `shard(gather="use", lead=0)`, where readers wait at once.

    Returns:
        Costs in seconds per stage: the mean over microbatches (and slices) of F, I, W, R, and of B where I and W are on
        one rank, of UPDATE, of exchanges, and of GATHER, SCATTER and the REDUCE of gradients where replicas run; 0
        where there is no such op. A W takes the time of adding its gradients up, where it does that. The bytes are
        those of `fpipe.sizes` with the backward split; without them, and with a warning, if a stage cannot be traced.
        Transfers are free where one op runs at a time: add `dataclasses.replace(costs, transfer=..., bandwidth=...)`.
        Ranks that run together tell `send`, `transfer` and `receive`, the median over all values.

    Raises:
        ValueError: repeats below 1, or what `build` and its step refuse.

    >>> import fpipe, torch
    >>> net = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(4)))
    >>> model, params, _ = fpipe.from_sequential(net, stages=4, loss=torch.nn.functional.mse_loss)
    >>> start = fpipe.chain(fpipe.split(4), fpipe.merge())(fpipe.program(model))
    >>> costs = fpipe.profile(start, model, params, (torch.ones(8, 8), torch.ones(8, 8)))
    >>> len(costs.forward), all(seconds > 0 for seconds in costs.recompute)
    (4, True)
    >>> timeline = fpipe.simulate(fpipe.schedules.zbv(2, costs=costs)(start), costs)  # seconds and bytes
    >>> timeline.makespan < 1, timeline.peak[0] > 0
    (True, True)
    """
    if repeats < 1:
        raise ValueError(f"repeats is how often each op is timed, at least 1; found {repeats!r}.")
    if runtime != "distributed":
        refuse_meta("fpipe.estimate counts operations where none can be timed", params=params, batch=batch, state=state)
    is_serial = runtime == "local"
    halves = with_halves(program, is_serial)
    variants = variants_of(halves)
    opt, rates, scale = example_optim(halves, params) or (None, [], None)
    lr: Any = [float(rate) for rate in rates] or None
    example = None if is_serial else (params, batch) if state is None else (params, batch, state)
    # 1. Time the ops. Each variant of the program runs `repeats` times after a first run, which traces, compiles and
    # warms up.
    runs: Runs = {}
    timelines: list[Timeline] = []
    done, total = 0, len(variants) * (repeats + 1)
    if progress:
        progress(done, total)
    for variant in variants:
        communicated = variant if is_serial else communicate()(variant)
        step = build(communicated, model, record=True, runtime=runtime, mesh=mesh, example=example)
        runs_of_variant: Runs = {}
        for repeat in range(repeats + 1):
            timeline = step(params, batch, state=state, key=key, opt=opt, lr=lr, scale=scale).timeline
            if repeat:
                timelines.append(timeline)
                events = (
                    [(op, end - start) for op, start, end in timeline.events] if is_serial else op_seconds(timeline)
                )
                for op, seconds in events:
                    add_run(runs_of_variant, op, seconds)
            done += 1
            if progress:
                progress(done, total)
        # Both variants have forwards. Those of the first one count: they leave residuals, as most schedules' do.
        runs = {**runs_of_variant, **runs}
    # 2. Count bytes, and take means.
    try:
        byte_sizes = sizes(halves, model, params, batch, state=state)
    except ValueError as error:
        warn(f"these costs have no bytes: {error}", stacklevel=2)
        byte_sizes = None
    transfer_costs = TransferSeconds(0, 0, 0) if is_serial else transfer_seconds(timelines)
    return Costs(**mean_seconds(program, runs, is_serial), **transfer_costs._asdict(), bytes=byte_sizes)


# Estimate the costs of a program's ops by their shapes, where nothing can run: a model on meta, or another machine.


def estimate(
    program: Program,
    model: Model,
    params: Sequence[Any],
    batch: tuple[Any, Any],
    *,
    flops: float,
    state: Sequence[Any] | None = None,
) -> Costs:
    """Estimate the seconds of a program's ops by their floating-point operations, and the bytes of its values.

    Nothing is computed.

    The operations are those of products, convolutions and attention, as torch's `FlopCounterMode` counts them, in the
    graphs that a step would run. What only reads and writes memory, such as a norm or an embedding, takes no time here:
    so `flops` is best what whole models reach on a device, not what it could.

    Args:
        program, model, params, batch, state: as for `fpipe.profile`; tensors may be on the meta device.
        flops: operations a second of a rank, such as 400e12. With 1 the costs are operations.

    Returns:
        Costs in seconds per stage, of the kinds that `fpipe.profile` measures; transfers are free.

    Raises:
        ValueError: a rate that is no number above 0; what `sizes` refuses.

    >>> import fpipe, torch
    >>> with torch.device("meta"):
    ...     net = torch.nn.Sequential(torch.nn.Linear(512, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256))
    ...     batch = torch.empty(64, 512), torch.empty(64, 256)
    >>> model, params, _ = fpipe.from_sequential(net, stages=2, loss=torch.nn.functional.mse_loss)
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(model))
    >>> costs = fpipe.estimate(program, model, params, batch, flops=1e12)
    >>> costs.forward[0] == 2 * 16 * 512 * 256 / 1e12, costs.backward_input[0]  # 16 rows; no input gradient is wanted
    (True, 0.0)
    """
    if not 0 < flops < math.inf:
        raise ValueError(f"flops is how many operations a rank does a second, such as 400e12; found {flops!r}.")
    halves = with_halves(program)
    check_match(halves, model)
    flops_by_call: dict[Any, int] = {}
    runs: Runs = {}
    for variant in variants_of(halves):
        try:
            inputs = StepInputs(params, batch, state, example_optim(variant, params))
            options = StepOptions(runs=False)
            parts = PreparedStep(variant, model, inputs, UntracedStages(), options, ProcessContext()).lowered.parts
        except Untraceable as error:
            raise ValueError(f"the operations of this program are not known before it runs: {error}") from error
        runs_of_variant: Runs = {}
        for op, part in parts.items():
            add_run(runs_of_variant, op, flops_of(part.filled(), flops_by_call) / flops)
        runs = {**runs_of_variant, **runs}
    return Costs(**mean_seconds(program, runs, is_serial=True), bytes=sizes(halves, model, params, batch, state=state))


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
            raise ValueError("the batch has no tensor with rows to split.")
        return first_leaf.shape[0]

    def costs(
        self, microbatches: Iterable[int], repeats: int, progress: Callable[[int, int, str], None]
    ) -> dict[float, Costs]:
        """Return the costs by the rows of a microbatch: profiled one op at a time, or estimated by `flops`."""
        if self.flops is None:
            remedy = "say flops=, operations a second of a rank, and costs are estimated"
            refuse_meta(remedy, params=self.params, batch=self.batch, state=self.state)
        counts, costs_by_rows = [*microbatches], dict[float, Costs]()
        for index, count in enumerate(counts):
            program = chain(split(count), merge())(base_program(self.model))
            example: Any = program, self.model, self.params, self.batch
            if self.flops is None:
                costs = profile(
                    *example,
                    state=self.state,
                    key=0,  # the random key of dropout: its value changes no time
                    repeats=repeats,
                    progress=lambda runs_done, total, count=count: progress(runs_done, total, f"profiling m={count}"),
                )
            else:
                progress(index, len(counts), f"estimating m={count}")
                costs = estimate(*example, flops=self.flops, state=self.state)
            costs_by_rows[self.rows / count] = costs
        return costs_by_rows

    def with_bytes(self, costs: Costs, program: Program, replicas: int = 1) -> Costs:
        """Add the bytes of a program's values to its costs, with parameters that travel or are gathered."""
        # In a sharded program `sizes` counts gathered parameters itself.
        has_shards = gathers_params(program)
        replica_count = replicas if has_shards else 1
        byte_sizes = sizes(program, self.model, self.params, self.batch, state=self.state, replicas=replica_count)
        return replace(costs, bytes=byte_sizes if has_shards else _SizesWithParams(byte_sizes))


@dataclass(frozen=True)
class _SizesWithParams:
    """Sizes of values in which parameters that have travelled to another rank count too."""

    sizes: Sizes

    def storages(self, value: Value) -> Storages:
        if value.name == "params":
            return {value._replace(location=""): self.sizes.size(value)}
        return self.sizes.storages(value)

    def hoisted_values(self, op: Op) -> Sequence[Value]:
        return self.sizes.hoisted_values(op)

    def size(self, value: Value) -> float:
        return self.sizes.size(value)
