"""The zero-bubble schedules that are ordered by cost: ZB-auto, ZB-V, V-Half and V-Min.

Without costs an order is there within 10 to 200 ms (p=8, m=64), with costs a search takes about a second.
"""

from __future__ import annotations

from collections.abc import Callable

from fpipe.orders.linear_pipeline import LinearPipeline, Objective, TrackRow, cells_of, linear_pipeline_of
from fpipe.program import Program
from fpipe.schedules.by_cost import linear_order, v_min_order, v_order
from fpipe.schedules.in_turn import two_stages
from fpipe.schedules.registry import published
from fpipe.timing.costs import Costs, the_costs
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import in_rows

EFFORT = 800_000
"""Ops in a share of a search by costs; a search takes two or three, 0.3 to 0.6 s each on one core."""
GLANCE = 200_000
"""Ops that an order for F = I = W may play where nothing was said of costs: 0.1 to 0.2 s."""


def _one_stage(ranks: int, stages: int, microbatches: int) -> str | None:
    if stages == ranks:
        return None
    return f"one stage on each rank, so {ranks} stages for {ranks} ranks; found {stages}. Cut the model into {ranks}."


@published(
    "ZB-auto (ZB-1p, ZB-2p)",
    "Qi et al. 2024, Zero Bubble Pipeline Parallelism (ICLR), section 3",
    idle="searched; with F = I = W and a cap of 2p: makespan (p-1)F, span 0",
    peak="<= memory_cap",
    accepts="any m; one stage a rank",
    refuses=_one_stage,
)
def zb_auto(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    kept: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """As many forwards ahead as the costs ask for and the memory allows, weight gradients in the gaps (ZB-auto).

    Args:
        ranks: how many.
        costs: seconds by which to order; without, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; 2p by default (ZB-2p), p is ZB-1p.
        kept: the share of a microbatch's activations that W still needs after I. With 1 they are held until W, as
            `simulate` counts `peak`; the paper's table 5 counts M_W / M_B, 32h / (34h + 5as) for a transformer.
        objective: what to make short first, the "makespan" or the "span"; then the other. Orders depend on the ratios
            of costs alone: the unit they are told in says nothing.

    Raises:
        ProgramError: not one stage a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("zb_auto").program(3, 4)))
    rank 0 | 0F0 0F1 0F2 0F3  .  0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3  .
    rank 1 |  .  1F0 1F1  .  1I0 1F2 1I1 1F3 1I2 1W0 1I3 1W1 1W2 1W3
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3
    """
    cap = 2 * ranks if memory_cap is None else memory_cap
    return _ordered("zb_auto", "linear", ranks, _in_a_line, costs, cap, kept, objective)


@published(
    "ZB-V",
    "Qi et al. 2024, Zero Bubble Pipeline Parallelism (ICLR), section 6",
    idle="F = I = W, m >= 2p-1: makespan (p-1)F/2, span 0",
    peak="min(m, p)",
    accepts="any m; two chunks a rank",
    stages_per_rank=2,
    refuses=two_stages,
)
def zbv(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    kept: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """Two chunks a rank on a V, so that the last stage is where the first is: no bubble in the memory of 1F1B (ZB-V).

    Args:
        ranks: how many.
        costs: seconds by which to order; without, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; p by default.
        kept, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("zbv").program(2, 4)))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """

    cap = ranks if memory_cap is None else memory_cap
    return _ordered("zbv", "v", ranks, _on_a_v, costs, cap, kept, objective)


@published(
    "V-Half",
    "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)",
    idle="F = I = W, m >= 2p: 0.5, 2.5, 8.5 for p = 2, 4, 8",
    peak="(p+2)//2",
    accepts="any m; two chunks a rank",
    stages_per_rank=2,
    refuses=two_stages,
)
def v_half(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    kept: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """A block on a V that holds half of what 1F1B holds, repeated and squeezed (V-Half).

    Args:
        ranks: how many.
        costs: seconds by which to order, which the published order ignores; without, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; (p+2)//2 by default.
        kept, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("v_half").program(2, 4)))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """

    cap = (ranks + 2) // 2 if memory_cap is None else memory_cap
    return _ordered("v_half", "v", ranks, _on_a_v, costs, cap, kept, objective)


@published(
    "V-Min",
    "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)",
    idle="F = I = W, m >= 2p: 1.5, 5.5, 13.5 for p = 2, 4, 8",
    peak="(p+4)//3",
    accepts="any m; two chunks a rank",
    stages_per_rank=2,
    refuses=two_stages,
)
def v_min(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    kept: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """The block on a V that holds least, a third of what 1F1B holds: no leg of it ever waits (V-Min).

    Args:
        ranks: how many.
        costs: seconds by which to order, which the published order ignores; without, the published order.
        memory_cap: the most microbatches a rank may hold, from 1; (p+4)//3 by default.
        kept, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("v_min").program(2, 4)))
    rank 0 | 0F0  .   .  3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 0F3 3W2 0I2 0W2 3F3 3I3 3W3  .  0I3 0W3
    rank 1 |  .  1F0 2F0  .   .  2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3
    """

    def order(pipeline: LinearPipeline, costs: Costs | None) -> list[TrackRow]:
        drawn = v_min_order(pipeline) if costs is None and memory_cap is None else None
        return drawn or _on_a_v(pipeline, costs)

    cap = (ranks + 4) // 3 if memory_cap is None else memory_cap
    return _ordered("v_min", "v", ranks, order, costs, cap, kept, objective)


def _in_a_line(pipeline: LinearPipeline, costs: Costs | None) -> list[TrackRow]:
    return linear_order(pipeline, GLANCE if costs is None else 3 * EFFORT)


def _on_a_v(pipeline: LinearPipeline, costs: Costs | None) -> list[TrackRow]:
    """A V is searched for one share, and what is found is polished for another."""
    return v_order(pipeline, GLANCE) if costs is None else v_order(pipeline, EFFORT, polish=EFFORT)


def _ordered(
    name: str,
    placement: str,
    ranks: int,
    order: Callable[[LinearPipeline, Costs | None], list[TrackRow]],
    costs: Costs | None,
    cap: float,
    kept: float,
    objective: Objective,
) -> Transform:
    """The transform of an order searched on the pipeline of a program's stages."""
    seconds = the_costs(costs)
    if objective not in ("makespan", "span"):
        raise ValueError(f"objective is 'makespan' or 'span', found {objective!r}.")
    if isinstance(kept, bool) or not isinstance(kept, int | float) or not 0 <= kept <= 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"kept is the share of an activation that W needs after I, from 0 to 1; found {kept!r}.")

    def rows(program: Program, ranks_of: list[int]) -> list[list[Key]]:
        pipeline = linear_pipeline_of(program, ranks_of, seconds, cap, kept, name, objective)
        return cells_of(pipeline, order(pipeline, costs))

    return in_rows(placement, ranks, rows)
