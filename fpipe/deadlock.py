"""Say which ops wait for each other in a circle, where the orders of ranks have no common global order.

rank 0 |[0B0] 0F0         0B0 reads what 0F0 makes, which comes later on the same rank
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fpipe.check import excerpt, phrase
from fpipe.program import Op, ProgramError, Sources


def stuck(
    ops: Sequence[Op],
    rows: Sequence[Sequence[int]],
    sources: Sequence[Sources],
    anchor: Mapping[int, int],
    at_cell: Sequence[int],
    blocked: Mapping[int, int],
) -> ProgramError:
    """The error that names the ops, and draws where their ranks stand.

    Args:
        ops, sources: the ops in any order, and where each finds what it reads.
        rows: the positions of each rank's ops, in its order.
        anchor: for an op that no row names the one it stands just before.
        at_cell: how far each rank has come.
        blocked: for each rank that cannot go on, the op it waits for.
    """
    heads = {rank: row[at_cell[rank]] for rank, row in enumerate(rows) if at_cell[rank] < len(row)}

    def next_rank(rank: int) -> int:
        missing = anchor.get(blocked[rank], blocked[rank])
        return ops[missing].rank

    path = [next(rank for rank in heads if rank in blocked)]
    while next_rank(path[-1]) not in path:
        path.append(next_rank(path[-1]))
    circle = path[path.index(next_rank(path[-1])) :]
    cells = [[ops[position].cell for position in row] for row in rows]
    drawn = excerpt(cells, {rank: at_cell[rank] for rank in circle})
    sentences: list[str] = []
    for rank in circle:
        head, missing = ops[heads[rank]], ops[blocked[rank]]
        value = next((value for value in head.reads if value in missing.writes), None)
        reads = (
            f"reads {phrase(value)}, which"
            if value
            else f"waits, through ops that no row names, for {missing.cell}, which"
        )
        other = heads[missing.rank]
        place = "on the same rank" if missing.rank == rank else f"on rank {missing.rank}, behind {ops[other].cell}"
        sentences.append(f"rank {rank}, step {at_cell[rank]}: {head.cell} {reads} comes later {place}.")
    pairs = [(blocked[rank], heads[ops[blocked[rank]].rank]) for rank in circle]
    wanted, head = next((pair for pair in pairs if not _needs_first(sources, *pair)), pairs[0])
    mend = f"Put {ops[wanted].cell} before {ops[head].cell}"
    count = f"{len(circle)} ops wait for each other in a circle; these orders have no common global order.\n  "
    opening = count if len(circle) > 1 else ""
    text = opening + "\n  ".join(sentences)
    return ProgramError(f"{text}\n{drawn}\n{mend}, or start from fpipe.schedules.one_f_one_b(ranks={len(rows)}).")


def _needs_first(sources: Sequence[Sources], position: int, other: int) -> bool:
    """Whether an op needs what another makes, through whatever lies between."""
    seen, todo = {position}, [position]
    while todo:
        for source in sources[todo.pop()]:
            if source == other:
                return True
            if source >= 0 and source not in seen:
                seen.add(source)
                todo.append(source)
    return False
