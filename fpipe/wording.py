"""Say where an op stands, and what a value is, in the words and drawings of all errors about programs.

rank 1, step 4: 1B0 reads the residuals of 1F0
  rank 1 | 1F1 [1B0] 1F0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fpipe.program import Op, Program, ProgramError, Sources, Value, kind_of

_PHRASES = {
    "y": "the output of {s}F{m}",
    "loss": "the loss of {s}F{m}",
    "res": "the residuals of {s}F{m}",
    "wres": "what {s}I{m} leaves for the weight gradient",
    "dx": "the input gradient of stage {s} for microbatch {m}",
    "dy": "the output gradient of stage {s} for microbatch {m}",
    "g": "the weight gradient of stage {s} for microbatch {m}",
    "carry": "what {s}F{m} hands to its next slice",
    "state": "the module state of stage {s} after microbatch {m}",
    "params": "the parameters of stage {s} after microbatch {m}",
    "x": "the batch slice of stage {s} for microbatch {m}",
}
_REPAIRS = {
    "y": "Add {s}F{m}.",
    "res": "Add {s}F{m} (or, when its residuals are recomputed, {s}R{m}).",
    "wres": "Add {s}I{m} before {s}W{m}.",
    "dx": "Add the backward of stage {s}: {s}B{m}, or {s}I{m} and {s}W{m}.",
    "g": "Add {s}B{m}, or {s}W{m} after {s}I{m}.",
}
UNREAD = {
    "res": "its backward, {s}B{m} (or {s}I{m} and {s}W{m}), is missing",
    "wres": "{s}W{m} is missing: an I without its W leaves the weight gradient undone",
    "y": "the forward of the next stage is missing",
    "dx": "the backward of the stage before is missing",
    "g": "nobody adds it up",
}


def phrase(value: Value) -> str:
    """A value in words, as errors say it: 'the residuals of 1F0'."""
    words = _PHRASES.get(value.name)
    return f"{value} ({fill(words, value)})" if words and value.microbatch is not None else str(value)


def excerpt(rows: Sequence[Sequence[str]], marks: dict[int, int]) -> str:
    """Draw the marked cell of each marked rank between its neighbours: `rank 1 | 1F1 [1B0] 1F0`."""
    lines: list[str] = []
    for rank, mark in sorted(marks.items()):
        cells = [f"[{cell}]" if step == mark else cell for step, cell in enumerate(rows[rank])]
        low, high = max(0, mark - 6), mark + 7
        shown = [*(["..."] if low else []), *cells[low:high], *(["..."] if high < len(cells) else [])]
        lines.append(f"  rank {rank} | {' '.join(shown)}")
    return "\n".join(lines)


def fault(program: Program, position: int, words: str, mend: str = "") -> ProgramError:
    """Make the error about the op at a position: where it stands, the words, its drawn row, and what would mend it."""
    op = program.ops[position]
    row = [peer for peer in program.ops if peer.rank == op.rank and (kind_of(peer.kind).time or peer is op)]
    step = next(number for number, peer in enumerate(row) if peer is op)
    rows = [[] for _ in range(op.rank)] + [[peer.cell for peer in row]]
    lines = [f"rank {op.rank}, step {step}: {words}", excerpt(rows, {op.rank: step}), mend]
    return ProgramError("\n".join(filter(None, lines)))


def fill(words: str, value: Value) -> str:
    """Put the stage and microbatch of a value into words."""
    tail = "" if value.slice is None else f".{value.slice}"
    return words.format(s=value.stage, m=f"{value.microbatch}{tail}")


def repair(value: Value, otherwise: str) -> str:
    """Say which op to add so that a value is written."""
    if value.at:
        missing = "SEND" if value.at.rpartition("@")[2].find(">") >= 0 else "RECV"
        return f"Add the {missing} that makes {value}, or use fpipe.communicate()."
    return fill(_REPAIRS.get(value.name, f"Add the op that writes it, or {otherwise}."), value)


def stuck(
    ops: Sequence[Op],
    rows: Sequence[Sequence[int]],
    sources: Sequence[Sources],
    anchor: Mapping[int, int],
    at_cell: Sequence[int],
    blocked: Mapping[int, int],
) -> ProgramError:
    """Make the error that names ops that wait for each other, and draws where their ranks stand.

    A rank has come to `at_cell` of its row and waits for the op `blocked`; an op in no row stands before its `anchor`.
    """
    heads = {rank: row[at_cell[rank]] for rank, row in enumerate(rows) if at_cell[rank] < len(row)}

    def next_rank(rank: int) -> int:
        return ops[anchor.get(blocked[rank], blocked[rank])].rank

    path = [next(rank for rank in heads if rank in blocked)]
    while next_rank(path[-1]) not in path:
        path.append(next_rank(path[-1]))
    ranks = path[path.index(next_rank(path[-1])) :]
    cells = [[ops[position].cell for position in row] for row in rows]
    sentences: list[str] = []
    for rank in ranks:
        head, missing = ops[heads[rank]], ops[blocked[rank]]
        value = next((value for value in head.reads if value in missing.writes), None)
        reads = f"reads {phrase(value)}" if value else f"waits, through ops that no row names, for {missing.cell}"
        before = ops[heads[missing.rank]].cell
        place = "on the same rank" if missing.rank == rank else f"on rank {missing.rank}, behind {before}"
        sentences.append(f"rank {rank}, step {at_cell[rank]}: {head.cell} {reads}, which comes later {place}.")
    pairs = [(blocked[rank], heads[ops[blocked[rank]].rank]) for rank in ranks]
    wanted, head = next((pair for pair in pairs if not _needs_first(sources, *pair)), pairs[0])
    mend = f"Put {ops[wanted].cell} before {ops[head].cell}"
    if any(op.kind == "UPDATE" for op in ops):
        mend = (
            "A forward waits here for parameters that a backward behind it updates: put a schedule of single steps "
            f"before fpipe.steps(), and behind it, with stale=, one that streams.\n{mend}"
        )
    count = f"{len(ranks)} ops wait for each other in a circle; these orders have no common global order.\n  "
    text = count * (len(ranks) > 1) + "\n  ".join(sentences)
    drawn = excerpt(cells, {rank: at_cell[rank] for rank in ranks})
    return ProgramError(f"{text}\n{drawn}\n{mend}, or start from fpipe.schedules.one_f_one_b(ranks={len(rows)}).")


class StateOrderError(ProgramError):
    """Forwards of a stage with module state that do not run in microbatch order on one rank.

    Attributes:
        stage: the stage, and `order`, what its forwards do instead.
    """

    stage: int = 0
    order: str = ""


def state_order_error(stage: int, order: str, buffers: Sequence[str] = ()) -> StateOrderError:
    """Make the error for a stage with module state, with the names of its buffers where they are known.

    >>> print(state_order_error(2, "1F2 comes before 1F0 on rank 1", ["3.running_mean"]))
    stage 2 keeps '3.running_mean', so its forwards run in microbatch order on one rank; 1F2 comes before 1F0 on rank 1.
    """
    more = f" and {len(buffers) - _SHOWN_BUFFERS} more" if len(buffers) > _SHOWN_BUFFERS else ""
    kept = ", ".join(map(repr, buffers[:_SHOWN_BUFFERS])) + more if buffers else "module state"
    rule = f"stage {stage} keeps {kept}, so its forwards run in microbatch order on one rank"
    error = StateOrderError(f"{rule}; {order}.")
    error.stage, error.order = stage, order
    return error


_SHOWN_BUFFERS = 3


def circle(ops: Sequence[Op]) -> ProgramError:
    """Make the error for ops that no row names and each of which reads from the next, the last from the first."""
    lines = [
        f"{op.cell} on rank {op.rank} reads {next(value for value in op.reads if value in writer.writes)}, which "
        f"{writer.cell} writes.\n"
        for op, writer in zip(ops, (*ops[1:], ops[0]), strict=True)
    ]
    return ProgramError(
        "ops that no schedule places wait for each other in a circle, and can stand in no order.\n  "
        f"{'  '.join(lines)}Let one of them read a value that is written before."
    )


def _needs_first(sources: Sequence[Sources], position: int, ancestor: int) -> bool:
    """Whether an op needs what an ancestor writes, through whatever lies between."""
    seen, todo = {position}, [position]
    while todo:
        for source in sources[todo.pop()]:
            if source == ancestor:
                return True
            if source >= 0 and source not in seen:
                seen.add(source)
                todo.append(source)
    return False
