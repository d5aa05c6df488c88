"""Measure what a program's ops cost: seconds for each stage and kind, and the bytes of its values.

The ops run one after the other in this process, as often as asked; of each the least time counts, since whatever else
the machine does can only add to it. What the program has no op of is measured all the same: its backward whole and cut
in two, its residuals recomputed. So the costs serve schedules that it was not made with.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from fpipe.model import Model
from fpipe.program import Op, Program, parts_of, the_program
from fpipe.runtimes.build import build
from fpipe.runtimes.sizes import Sizes, sizes
from fpipe.timing.costs import Costs
from fpipe.transforms.checkpoint import checkpoint
from fpipe.transforms.split_backward import split_backward

Least = dict[tuple[str, int], dict[tuple[int | None, int | None], float]]
"""For a kind and a stage, the least seconds of each microbatch (and slice)."""


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
) -> Costs:
    """What the ops of a program take, measured here, and what its values weigh.

    Parameters, buffers, random numbers and modes are as they were afterwards. Only one thread runs at a time, so an op
    that shares its machine with others may take longer in a pipeline than it is said to here.

    Args:
        program: how the batch is split; its ranks, order and transfers do not matter.
        model, params, batch, state, key: as a step takes them.
        repeats: how often each op is timed, after a first run that is not; its least time counts.
        progress: called as `progress(done, all)` before the first and after each run of the whole program.

    Returns:
        Costs in seconds per stage: the mean over microbatches (and slices) of F, I, W, R, and of B where I and W are on
        one rank; 0 where there is no such op. A W takes the time of adding its gradients up, where it does that. The
        bytes are those of `fpipe.sizes` with the backward split; without them, and with a warning, if a stage cannot be
        traced. Transfers are free: add `dataclasses.replace(costs, transfer=..., bandwidth=...)`.

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
    halves = split_backward()(_alone(the_program(program)))
    plain = _plain(halves)
    variants = dict.fromkeys((_joined(plain), checkpoint()(plain)))
    least: Least = defaultdict(dict)
    done, runs = 0, len(variants) * (repeats + 1)
    if progress:
        progress(done, runs)
    for variant in variants:
        step = build(variant, model, record=True)
        for turn in range(repeats + 1):
            timeline = step(params, batch, state=state, key=key).timeline
            if turn:
                for op, start, end in timeline.events:
                    times = least[op.kind, op.stage or 0]
                    place = op.microbatch, op.slice
                    times[place] = min(end - start, times.get(place, end - start))
            done += 1
            if progress:
                progress(done, runs)

    def seconds(kind: str) -> list[float]:
        found = [[*least[kind, stage].values()] for stage in range(program.stages)]
        return [sum(times) / max(1, len(times)) for times in found]

    whole = any(least["B", stage] for stage in range(program.stages))
    return Costs(
        forward=seconds("F"),
        backward_input=seconds("I"),
        backward_weight=seconds("W"),
        recompute=seconds("R"),
        backward=seconds("B") if whole else None,
        bytes=_bytes(halves, model, params, batch, state),
    )


def _bytes(program: Program, model: Model, params: Any, batch: Any, state: Any) -> Sizes | None:
    try:
        return sizes(program, model, params, batch, state=state)
    except ValueError as error:
        warnings.warn(f"these costs have no bytes: {error}", stacklevel=3)
        return None


def _alone(program: Program) -> Program:
    """The same ops in their order, each by itself and without transfers: what one process has to do."""
    moves = ("SEND", "RECV", "OFFLOAD", "LOAD", "FREE")
    ops = [_at_home(op) for op in parts_of(program.ops) if op.kind not in moves]
    outputs = tuple(end._replace(value=end.value._replace(at="")) for end in program.outputs)
    return Program.trusted(program.inputs, tuple(ops), outputs)


def _at_home(op: Op) -> Op:
    return op._replace(rank=0, reads=tuple(value._replace(at="") for value in op.reads))


def _plain(program: Program) -> Program:
    """The same without a backward that computes its stage again itself: that is R's time."""
    ops = (op._replace(how=()) if op.kind in "FBI" else op for op in program.ops)
    return Program.trusted(program.inputs, tuple(ops), program.outputs)


def _joined(program: Program) -> Program:
    """Every I and W as one B, in the place of I."""
    weights = {op.reads[-1]: op for op in program.ops if op.kind == "W"}
    ops: list[Op] = []
    for op in program.ops:
        if op.kind == "I":
            *cotangents, handed = op.writes
            ops.append(op._replace(kind="B", writes=(*cotangents, *weights[handed].writes)))
        elif op.kind != "W":
            ops.append(op)
    return Program.trusted(program.inputs, tuple(ops), program.outputs)
