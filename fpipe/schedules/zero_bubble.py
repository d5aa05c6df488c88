"""The two handcrafted zero-bubble schedules: other stages wait for the I of a split backward, and W fills gaps."""

from __future__ import annotations

from fpipe.program import Program
from fpipe.schedules.in_turn import RankContext, in_turn
from fpipe.schedules.registry import published
from fpipe.schedules.search_request import search_order
from fpipe.timing.costs import Costs, checked_costs
from fpipe.transforms._rewrite import Transform, as_transform
from fpipe.transforms.cells import Key
from fpipe.transforms.reorder import from_rows


@published("ZB-H1 (ZB1P)", "Qi et al. 2024 (ICLR), figure 3, top", idle="(p-1)(F+B-W), m >= p", peak="min(m, p)")
def zb_h1(ranks: int) -> Transform:
    """1F1B whose weight gradients wait and fill the drain: a third of the bubble, in the same memory.

    Rank r of p warms up with p-r-1 forwards, as in 1F1B. Its Ws lag r Is behind, so every rank holds up to p
    microbatches.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(4), fpipe.schedules.zb_h1(3))(fpipe.program(3))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2  .   .  0I0 0W0 0F3 0I1 0W1 0I2 0W2 0I3 0W3
    rank 1 |  .  1F0 1F1  .  1I0 1F2 1I1 1W0 1F3 1I2 1W1 1I3 1W2 1W3
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2W0 2F3 2I3 2W1 2W2 2W3
    """
    # Rank r holds p-r microbatches in F, as in 1F1B, and r more until their W: all ranks hold p.
    return from_rows("linear", ranks, in_turn(lambda context: context.later_ranks, lag=lambda context: context.rank))


@published(
    "ZB-H2",
    "Qi et al. 2024 (ICLR), figure 3, bottom",
    idle="span: (p-1)(F+B+2c-2W), m >= 2p-1",
    peak="min(m, 2p-1)",
    searches=True,
)
def zb_h2(ranks: int, *, costs: Costs | None = None) -> Transform:
    """ZB-H1 with twice the warm-up and twice the lag of W: no rank idles between its first op and its last.

    Rank r of p warms up with 2(p-r-1) forwards, its Ws lag 2r Is behind, and it holds 2p-1 microbatches. The paper
    counts the span of a rank; the makespan is below ZB-H1's only where W is shorter than F and B.

    With m < 2p-1, a rank holds k = max(p, m) microbatches: it warms up with p-r-1 + min(p-r-1, k-p) forwards, and its
    Ws lag accordingly. k = p is ZB-H1, k = 2p-1 the paper's rule. With costs, an order that holds 2p-1 is searched.

    Args:
        ranks: the number of ranks.
        costs: seconds by which to search where there are fewer than 2p-1 microbatches.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(5), fpipe.schedules.zb_h2(3))(fpipe.program(3))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0F1 0F2 0F3 0F4 0I0 0W0 0I1 0W1 0I2 0W2 0I3 0W3 0I4 0W4  .   .
    rank 1 |  .  1F0 1F1 1F2 1I0 1F3 1I1 1F4 1I2 1W0 1I3 1W1 1I4 1W2 1W3 1W4  .
    rank 2 |  .   .  2F0 2I0 2F1 2I1 2F2 2I2 2F3 2I3 2F4 2I4 2W0 2W1 2W2 2W3 2W4
    """
    max_held = 2 * ranks - 1

    def rows(program: Program, placement: list[int]) -> list[list[Key]]:
        held_microbatches = max(ranks, min(program.microbatches, max_held))

        def warm_up(context: RankContext) -> int:
            # Beyond the warm-up of ZB-H1, up to twice as much; W's then lag until the rank holds that many.
            return context.later_ranks + min(context.later_ranks, held_microbatches - ranks)

        return in_turn(warm_up, lag=lambda context: held_microbatches - 1 - warm_up(context))(program, placement)

    published_order = from_rows("linear", ranks, rows)
    searched = search_order("zb_h2", "linear", ranks, checked_costs(costs), max_held)
    return as_transform(
        lambda program: (published_order if costs is None or program.microbatches >= max_held else searched)(program)
    )
