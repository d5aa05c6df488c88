"""Measure what a program's ops cost: seconds for each stage and kind, and the bytes of its values.

The ops run one after the other in this process, as often as asked; of each the least time counts, since whatever else
the machine does can only add to it. Or the ranks run together, as they will: then the typical run counts, since what
they take from one another is part of it. What the program has no op of is measured all the same: its backward whole and
cut in two, its residuals recomputed. So the costs serve schedules that it was not made with.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from fpipe.meaning.optimizers.optimizer_state import example_optim
from fpipe.meaning.single_device.params_and_state import refuse_meta
from fpipe.measuring.sizes import Sizes, sizes
from fpipe.measuring.timeline_costs import Moving, Runs, kept, moving, note, seconds_of, variants_of, with_halves
from fpipe.model import Model
from fpipe.program import Program, the_program
from fpipe.runtimes.build import build
from fpipe.timing.costs import Costs
from fpipe.timing.timeline import Timeline
from fpipe.transforms.communicate import communicate

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
    """Seconds of a program's ops, measured here, and bytes of its values.

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
    if type(repeats) is not int or repeats < 1:
        raise ValueError(f"repeats is how often each op is timed, at least 1; found {repeats!r}.")
    if progress is not None and not callable(progress):  # pyright: ignore[reportUnnecessaryComparison]
        raise TypeError(f"progress is called as progress(done, all), found {progress!r}.")
    if runtime != "distributed":
        refuse_meta("fpipe.estimate counts operations where none can be timed", params=params, batch=batch, state=state)
    alone = runtime == "local"
    halves = with_halves(the_program(program), alone)
    variants = variants_of(halves)
    opt, rates, scale = example_optim(halves, params) or (None, [], None)
    lr: Any = [float(rate) for rate in rates] or None
    example = None if alone else (params, batch) if state is None else (params, batch, state)
    runs: Runs = {}
    timelines: list[Timeline] = []
    done, every = 0, len(variants) * (repeats + 1)
    if progress:
        progress(done, every)
    for variant in variants:
        told = variant if alone else communicate()(variant)
        step = build(told, model, record=True, runtime=runtime, mesh=mesh, example=example)
        found: Runs = {}
        for turn in range(repeats + 1):
            timeline = step(params, batch, state=state, key=key, opt=opt, lr=lr, scale=scale).timeline
            if turn:
                timelines.append(timeline)
                took = [(op, end - start) for op, start, end in timeline.events] if alone else kept(timeline)
                for op, seconds in took:
                    note(found, op, seconds)
            done += 1
            if progress:
                progress(done, every)
        runs = {**found, **runs}  # a forward that leaves residuals comes before one that does not
    moved = Moving(0, 0, 0) if alone else moving(timelines)
    return Costs(
        **seconds_of(program, runs, alone),
        **moved._asdict(),
        bytes=_bytes(halves, model, params, batch, state),
    )


def _bytes(program: Program, model: Model, params: Any, batch: Any, state: Any) -> Sizes | None:
    try:
        return sizes(program, model, params, batch, state=state)
    except ValueError as error:
        warnings.warn(f"these costs have no bytes: {error}", stacklevel=3)
        return None
