"""Zero-bubble schedules that papers order by cost: ZB-auto, ZB-V, V-Half and V-Min.

Each makes its published order, which is for F = I = W and no transfers. With costs or a memory cap, it asks a search.
"""

from __future__ import annotations

from collections import deque

from fpipe.program import Program
from fpipe.schedules.blocks import (
    BlockTicks,
    fill_gaps_with_weights,
    repeated_rows,
    tightened_block_rows,
    v_half_block,
    v_min_block,
)
from fpipe.schedules.in_turn import two_stages
from fpipe.schedules.registry import published
from fpipe.schedules.search_request import Objective, search_order
from fpipe.schedules.zero_bubble import zb_h2
from fpipe.timing.costs import Costs, checked_costs
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import from_rows


def _refuse_unless_one_stage(ranks: int, stages: int, microbatches: int) -> str | None:
    if stages == ranks:
        return None
    return f"one stage on each rank, so {ranks} stages for {ranks} ranks; found {stages}. Cut the model into {ranks}."


@published(
    "ZB-auto (ZB-1p, ZB-2p)",
    "Qi et al. 2024, Zero Bubble Pipeline Parallelism (ICLR), section 3",
    idle="searched; with F = I = W and a cap of 2p: makespan (p-1)F, span 0",
    peak="<= memory_cap",
    accepts="any m; one stage a rank",
    refuses=_refuse_unless_one_stage,
    searches=True,
)
def zb_auto(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    wres_share: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """As many forwards ahead as costs and memory allow, with weight gradients in the gaps.

    Args:
        ranks: the number of ranks.
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; 2p by default (ZB-2p), p is ZB-1p.
        wres_share: the share of a microbatch's activations that W still needs after I. With 1 they are held until W, as
            `simulate` counts `peak`; the paper's table 5 counts M_W / M_B, 32h / (34h + 5as) for a transformer.
        objective: what to make short first, the "makespan" or the "span"; then the other. Orders depend on the ratios
            of costs alone, not on their unit.

    Raises:
        ProgramError: not one stage a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("zb_auto").program(3, 4)))
    rank 0 | 0F0 0F1 0F2 0F3  .  0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3  .
    rank 1 |  .  1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3  .
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3
    """
    if wants_published_order(costs, memory_cap, wres_share, objective):
        return zb_h2(ranks)
    # 2p microbatches fill the wait for the first gradient, which takes p hops down and p back (ZB-2p).
    cap = 2 * ranks if memory_cap is None else memory_cap
    # Further starts: from the warm-up of 1F1B, one forward for each hop, to three. The best one depends on F : I : W.
    starts = tuple(
        forwards_ahead(ranks, forwards_per_hop, extra_forwards, cap, wres_share)
        for forwards_per_hop in (1.0, 1.5, 2.0, 3.0)
        for extra_forwards in (0, 1)
    )
    return search_order("zb_auto", "linear", ranks, costs, cap, wres_share, objective, starts=starts)


@published(
    "ZB-V",
    "Qi et al. 2024, Zero Bubble Pipeline Parallelism (ICLR), section 6",
    idle="F = I = W, m >= 2p-1: makespan (p-1)F/2, span 0",
    peak="min(m, p)",
    accepts="any m; two chunks a rank",
    stages_per_rank=2,
    refuses=two_stages,
    searches=True,
)
def zbv(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    wres_share: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """Two chunks a rank in a V, so the last stage is on the rank of the first: no bubble in 1F1B's memory.

    Args:
        ranks: the number of ranks.
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; p by default.
        wres_share, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("zbv").program(2, 4)))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """
    if wants_published_order(costs, memory_cap, wres_share, objective):
        return from_rows(
            "v", ranks, lambda program, _: [zbv_row(rank, ranks, program.microbatches) for rank in range(ranks)]
        )
    cap = ranks if memory_cap is None else memory_cap
    return search_order("zbv", "v", ranks, costs, cap, wres_share, objective)


@published(
    "V-Half",
    "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)",
    idle="F = I = W, m >= 2p: 0.5, 2.5, 8.5 for p = 2, 4, 8",
    peak="(p+2)//2",
    accepts="any m; two chunks a rank",
    stages_per_rank=2,
    refuses=two_stages,
    searches=True,
)
def v_half(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    wres_share: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """A block in a V that holds half of what 1F1B holds, repeated and compacted.

    Args:
        ranks: the number of ranks.
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; (p+2)//2 by default.
        wres_share, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("v_half").program(2, 4)))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0F3 0W0 3F2 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0I3 0W2 0W3  .
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
    """
    if wants_published_order(costs, memory_cap, wres_share, objective):
        return repeated_block(v_half_block(ranks), ranks, (ranks + 2) // 2, is_tight=True)
    cap = (ranks + 2) // 2 if memory_cap is None else memory_cap
    return search_order("v_half", "v", ranks, costs, cap, wres_share, objective)


@published(
    "V-Min",
    "Qi et al. 2024, Pipeline Parallelism with Controllable Memory (arXiv 2405.15362)",
    idle="F = I = W, m >= 2p: 1.5, 5.5, 13.5 for p = 2, 4, 8",
    peak="(p+4)//3",
    accepts="any m; two chunks a rank",
    stages_per_rank=2,
    refuses=two_stages,
    searches=True,
)
def v_min(
    ranks: int,
    *,
    costs: Costs | None = None,
    memory_cap: float | None = None,
    wres_share: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """The block in a V that holds least: a third of what 1F1B holds.

    Args:
        ranks: the number of ranks.
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; (p+4)//3 by default.
        wres_share, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("v_min").program(2, 4)))
    rank 0 | 0F0  .   .  3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 0F3 3W2 0I2 0W2 3F3 3I3 3W3  .  0I3 0W3
    rank 1 |  .  1F0 2F0  .   .  2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3
    """
    if wants_published_order(costs, memory_cap, wres_share, objective):
        return repeated_block(v_min_block(ranks), ranks, (ranks + 4) // 3, is_tight=False)
    cap = (ranks + 4) // 3 if memory_cap is None else memory_cap
    return search_order("v_min", "v", ranks, costs, cap, wres_share, objective)


def wants_published_order(costs: Costs | None, memory_cap: float | None, wres_share: float, objective: str) -> bool:
    """Whether all options have their defaults, which ask for the published order."""
    checked_costs(costs)
    return costs is None and memory_cap is None and (wres_share, objective) == (1.0, "makespan")


def forwards_ahead(ranks: int, forwards_per_hop: float, surplus: int, cap: float, wres_share: float) -> Transform:
    """Return an order to start a search from, which runs more or fewer forwards ahead.

    A rank runs `forwards_per_hop` forwards ahead for each rank behind it, then I and F in turn, and each W where it
    would wait a tick.
    """

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        microbatches, table = program.microbatches, list[list[Key]]()
        # One stage a rank: the rank is also the number of its stage.
        for rank in placement:
            warm_up = int((ranks - 1 - rank) * forwards_per_hop + 1 + surplus)
            forward_count = max(1, min(microbatches, int(cap), warm_up))
            forwards, backwards = ([(kind, rank, i, None) for i in range(microbatches)] for kind in "FB")
            paired_ops = [key for pair in zip(backwards, forwards[forward_count:], strict=False) for key in pair]
            table.append([*forwards[:forward_count], *paired_ops, *backwards[microbatches - forward_count :]])
        return fill_gaps_with_weights(table, placement, cap, wres_share)

    return from_rows("linear", ranks, rows)


def repeated_block(block: BlockTicks, ranks: int, cap: int, *, is_tight: bool) -> Transform:
    """Return a repeated block on a V, pulled tight or not, with each W where its rank would wait a tick."""

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        microbatches = program.microbatches
        # The interval is 6 ticks: F, I and W of two chunks. A cap in microbatches is twice as many chunks.
        if is_tight:
            block_rows = tightened_block_rows(block, 6, (1, 1), placement, microbatches)
        else:
            block_rows = repeated_rows(block, 6, placement, microbatches)
        return fill_gaps_with_weights(block_rows, placement, 2 * cap)

    return from_rows("v", ranks, rows)


def zbv_row(rank: int, ranks: int, count: int) -> list[Key]:
    """Return the row of a rank in ZB-V (Qi et al. 2024, section 6).

    A list of turns, longer than the row: a turn of an op that has no microbatch left is skipped.
    """
    first_forward, second_forward = ("F", rank), ("F", 2 * ranks - 1 - rank)
    second_input_grad, first_input_grad = ("I", second_forward[1]), ("I", rank)
    # The W of the I that has waited longest, of either chunk.
    weight = ("W", -1)
    # 1) Warm-up: forwards of the first chunk until the first microbatch is back at the second one, then both in turn.
    # 2) F, I and W of the second chunk, until the first chunk gets its first gradient.
    turns = (
        [first_forward] * (2 * (ranks - rank) - 1)
        + [second_forward, first_forward] * rank
        + [second_forward, second_input_grad, weight] * (ranks - rank)
    )
    # 3) Steady state: F, I and W of both chunks. 4) Drain: input gradients first, which others wait for, W last.
    steady_turns = [first_forward, first_input_grad, weight, second_forward, second_input_grad, weight]
    turns += steady_turns * max(0, count - ranks)
    turns += (
        [second_forward] * count
        + [first_input_grad, second_input_grad] * rank
        + [first_input_grad, weight] * (ranks - rank)
        + [second_input_grad, first_input_grad] * count
    )
    turns += [weight] * (2 * count)
    next_microbatch = dict.fromkeys((first_forward, second_forward, second_input_grad, first_input_grad), 0)
    waiting_weights = deque[Key]()
    row: list[Key] = []
    for turn in turns:
        if turn == weight:
            row += [waiting_weights.popleft()] if waiting_weights else []
        elif next_microbatch[turn] < count:
            row.append((*turn, next_microbatch[turn], None))
            next_microbatch[turn] += 1
            if turn[0] == "I":
                waiting_weights.append(("W", *row[-1][1:]))
    return row
