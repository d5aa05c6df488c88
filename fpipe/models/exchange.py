"""Make a collective over a dimension of the mesh a stage, so that schedules place it and nothing waits for it early.

route, exchange, experts        -->        0F0 [1F0 on the lane "exchange"] 2F0
"""

from __future__ import annotations

from typing import Literal

from fpipe.graphs.tracing.collective_stage import COLLECTIVES, CollectiveStage
from fpipe.model import Stage

Collective = Literal[
    "all_to_all", "all_gather", "reduce_scatter", "all_reduce", "ring", "copy", "reduce", "gather", "scatter"
]


def exchange(kind: Collective, axis: str, *, sizes: bool = False) -> Stage:
    """Make a stage without parameters that is a collective over the processes along one dimension of the mesh.

    Its F starts the collective, its B (or I) the adjoint, and W does nothing. Both are asynchronous, on the lane
    "exchange" next to the rank's computation, and a stage that reads the result waits for it. Each tensor of `x` is
    exchanged, and keeps its dtype; whole numbers have no gradient.

    Args:
        kind: "all_to_all" (dim 0 has equally many rows for each process, in order), "all_gather" (the rows of all in
            order), "reduce_scatter" (the sum of all, of which each keeps its rows), "all_reduce" (the sum of all) or
            "ring" (each sends to the next process what it has, and gets what the one before had). Or between layers of
            tensor parallelism, where what follows is alike on all processes: "copy" (hands on what it is given, and
            adds up its gradient), "reduce" (the sum of all), "gather" (the rows of all in order) and "scatter" (of rows
            alike on all each keeps its own, and gathers their gradient).
        axis: the name of the dimension, as `init_device_mesh(.., mesh_dim_names=("pp", "ep"))` has it; step and
            gradients are of the sum of the losses of its processes, or of "copy" to "scatter" of the one loss that all
            have. Where the step runs without that mesh, as by
            runtime="local" or "threads", in `reference` and `verify`, the dimension has one process, and the stage
            hands on what it is given.
        sizes: for an all-to-all whose sizes the data decide, as a router does: its x is `(rows, .., sizes)`, and so is
            what it hands on. `sizes` are whole numbers, dim 0 with equally many for each process, in order: those of a
            process add up to how many rows go to it. They are alike in dtype and length on all processes, and travel
            first. Stages that read what it brings run under autograd, without a trace, and are placed on its rank.

    Returns:
        A `Stage` for `from_functions`, or for the stages of a `Model`. In a program its ops say
        `{exchange='all_to_all', axis='ep'}`.

    Raises:
        ValueError: another kind, one that has no sizes, or an axis without a name. When a step is built: a mesh without
            that dimension, rows that its processes do not divide, tensors of other shapes on another process, or rows
            that only data count for another rank. In a step: sizes below 0, or of other rows than there are.

    Source: "copy" to "scatter" are f, g and their like of Megatron-LM (arXiv:1909.08053, figure 3).

    >>> import fpipe
    >>> block = [lambda p, x: x @ p, fpipe.exchange("all_to_all", axis="ep"), lambda p, x: x @ p]
    >>> model = fpipe.from_functions(block, loss=lambda y, t: y.sum())
    >>> table = fpipe.schedules.from_table("0F0 1F0 0F1 1F1 2F0 2B0 1B0 2F1 2B1 1B1 0B0 0B1")
    >>> program = fpipe.chain(fpipe.split(2), table)(fpipe.program(model))
    >>> print(fpipe.plot(fpipe.simulate(program, fpipe.Costs(exchange=1))))
    rank 0 | 0F0 0F1 2F0 2B0---- 2F1 2B1---- 0B0---- 0B1----
    exchange | ....1F0 1F1 ........1B0 ........1B1 ............
             0       2       4       6       8       10      12
    """
    if kind not in COLLECTIVES:
        raise ValueError(f"an exchange is one of {', '.join(map(repr, COLLECTIVES))}; found {kind!r}.")
    if not isinstance(axis, str) or not axis:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"axis is the name of a dimension of the mesh, such as 'ep'; found {axis!r}.")
    if not isinstance(sizes, bool):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"sizes is True or False: whether x is (rows, .., sizes); found {sizes!r}.")
    if sizes and kind != "all_to_all":
        raise ValueError(f"sizes are those of an all-to-all, whose parts differ; found {kind!r} with sizes=True.")
    function = CollectiveStage(kind, axis, has_sizes=sizes)
    return Stage(function, name=function.__name__, exchange=(("exchange", kind), ("axis", axis)))
