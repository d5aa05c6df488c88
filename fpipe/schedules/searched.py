"""The zero-bubble schedules that papers order by cost: ZB-auto, ZB-V, V-Half and V-Min.

Each draws its published order, which is for F = I = W and no transfers. Told costs or a memory cap, it asks a search.
"""

from __future__ import annotations

from collections import deque

from fpipe.program import Program
from fpipe.schedules.blocks import BlockTicks, in_blocks, repeated, v_half_block, v_min_block, with_weights
from fpipe.schedules.in_turn import two_stages
from fpipe.schedules.registry import published
from fpipe.schedules.search_request import Objective, searched
from fpipe.schedules.zero_bubble import zb_h2
from fpipe.timing.costs import Costs, the_costs
from fpipe.transforms._rewrite import Transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import in_rows


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
    searches=True,
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
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
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
    rank 1 |  .  1F0 1F1 1F2 1I0 1F3 1I1 1W0 1I2 1W1 1I3 1W2 1W3  .
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2W0 2W1 2W2 2W3
    """
    if _is_untold(costs, memory_cap, kept, objective):
        return zb_h2(ranks)
    cap = 2 * ranks if memory_cap is None else memory_cap
    starts = tuple(_ahead(ranks, hop, more, cap, kept) for hop in (1.0, 1.5, 2.0, 3.0) for more in (0, 1))
    return searched("zb_auto", "linear", ranks, costs, cap, kept, objective, starts=starts)


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
    kept: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """Two chunks a rank on a V, so that the last stage is where the first is: no bubble in the memory of 1F1B (ZB-V).

    Args:
        ranks: how many.
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; p by default.
        kept, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("zbv").program(2, 4)))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 3W1 0F3 0I0 0W0 3F2 3I2 3W2 0I1 0W1 3F3 3I3 3W3 0I2 0W2 0I3 0W3  .
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 2W0 1F2 1I0 1W0 2F2 2I1 2W1 1F3 1I1 1W1 2F3 2I2 2W2 1I2 2I3 1I3 1W2 2W3 1W3
    """
    if _is_untold(costs, memory_cap, kept, objective):
        return in_rows(
            "v", ranks, lambda program, _: [_zbv_row(rank, ranks, program.microbatches) for rank in range(ranks)]
        )
    cap = ranks if memory_cap is None else memory_cap
    return searched("zbv", "v", ranks, costs, cap, kept, objective)


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
    kept: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """A block on a V that holds half of what 1F1B holds, repeated and squeezed (V-Half).

    Args:
        ranks: how many.
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; (p+2)//2 by default.
        kept, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("v_half").program(2, 4)))
    rank 0 | 0F0 0F1 0F2 3F0 3I0 3W0 3F1 3I1 0I0 3W1 0F3 0W0 3F2 3I2 0I1 3W2 0W1 3F3 3I3 0I2 3W3 0I3 0W2 0W3  .
    rank 1 |  .  1F0 2F0 1F1 2F1 2I0 1I0 2W0 1F2 1W0 2F2 2I1 1I1 2W1 1F3 1W1 2F3 2I2 1I2 2I3 1I3 2W2 1W2 2W3 1W3
    """
    if _is_untold(costs, memory_cap, kept, objective):
        return _repeated(v_half_block(ranks), ranks, (ranks + 2) // 2, tight=True)
    cap = (ranks + 2) // 2 if memory_cap is None else memory_cap
    return searched("v_half", "v", ranks, costs, cap, kept, objective)


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
    kept: float = 1.0,
    objective: Objective = "makespan",
) -> Transform:
    """The block on a V that holds least, a third of what 1F1B holds: no leg of it ever waits (V-Min).

    Args:
        ranks: how many.
        costs: seconds by which to search an order; without, the published one, for F = I = W and no transfer.
        memory_cap: the most microbatches a rank may hold, from 1; (p+4)//3 by default.
        kept, objective: of `zb_auto`.

    Raises:
        ProgramError: not two chunks a rank, a cap below 1.

    >>> import fpipe
    >>> print(fpipe.plot(fpipe.schedules.about("v_min").program(2, 4)))
    rank 0 | 0F0  .   .  3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 0F2 3W1 0I1 0W1 3F2 3I2 0F3 3W2 0I2 0W2 3F3 3I3 3W3  .  0I3 0W3
    rank 1 |  .  1F0 2F0  .   .  2I0 1I0 1F1 2F1 2W0 1W0 2I1 1I1 1F2 2F2 2W1 1W1 2I2 1I2 1F3 2F3 2W2 1W2 2I3 1I3 2W3 1W3
    """
    if _is_untold(costs, memory_cap, kept, objective):
        return _repeated(v_min_block(ranks), ranks, (ranks + 4) // 3, tight=False)
    cap = (ranks + 4) // 3 if memory_cap is None else memory_cap
    return searched("v_min", "v", ranks, costs, cap, kept, objective)


def _is_untold(costs: Costs | None, memory_cap: float | None, kept: float, objective: str) -> bool:
    """Whether nothing is said by which to search, so that the published order is asked for."""
    the_costs(costs)
    return costs is None and memory_cap is None and (kept, objective) == (1.0, "makespan")


def _ahead(ranks: int, per_hop: float, more: int, cap: float, kept: float) -> Transform:
    """Each rank runs some forwards ahead for every rank behind it, and then takes I and F in turn; each W where its
    rank would wait a tick."""

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        count, table = program.microbatches, list[list[Key]]()
        for rank in placement:  # where each stage has a rank of its own
            ahead = max(1, min(count, int(cap), int((ranks - 1 - rank) * per_hop + 1 + more)))
            forwards, backwards = ([(kind, rank, index, None) for index in range(count)] for kind in "FB")
            turns = [key for pair in zip(backwards, forwards[ahead:], strict=False) for key in pair]
            table.append([*forwards[:ahead], *turns, *backwards[count - ahead :]])
        return with_weights(table, placement, cap, kept)

    return in_rows("linear", ranks, rows)


def _repeated(block: BlockTicks, ranks: int, cap: int, *, tight: bool) -> Transform:
    """A block on a V, repeated, and pulled tight or not; each W where its rank would wait a tick."""

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        count = program.microbatches
        drawn = in_blocks(block, 6, (1, 1), placement, count) if tight else repeated(block, 6, placement, count)
        return with_weights(drawn, placement, 2 * cap)

    return in_rows("v", ranks, rows)


def _zbv_row(rank: int, ranks: int, count: int) -> list[Key]:
    """The row of a rank in ZB-V: first chunks until the first second chunk is back, then each forward with a whole
    backward, and in the end input gradients first."""
    down, up = ("F", rank), ("F", 2 * ranks - 1 - rank)
    back, home = ("I", up[1]), ("I", rank)
    weight = ("W", -1)  # of the I that has waited longest
    turns = [down] * (2 * (ranks - rank) - 1) + [up, down] * rank + [up, back, weight] * (ranks - rank)
    turns += [down, home, weight, up, back, weight] * max(0, count - ranks)
    turns += [up] * count + [home, back] * rank + [home, weight] * (ranks - rank) + [back, home] * count
    turns += [weight] * (2 * count)
    taken = dict.fromkeys((down, up, back, home), 0)
    waiting = deque[Key]()
    row: list[Key] = []
    for turn in turns:
        if turn == weight:
            row += [waiting.popleft()] if waiting else []
        elif taken[turn] < count:
            row.append((*turn, taken[turn], None))
            taken[turn] += 1
            if turn[0] == "I":
                waiting.append(("W", *row[-1][1:]))
    return row
