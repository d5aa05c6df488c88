"""Build the errors about programs: descriptions of values, drawings of rows, and remedies.

rank 1, step 4: 1B0 reads the residuals of 1F0
  rank 1 | 1F1 [1B0] 1F0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fpipe.program import Op, Program, ProgramError, Sources, Value, kind_of

_PHRASE_BY_NAME = {
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
_REMEDY_BY_NAME = {
    "y": "Add {s}F{m}.",
    "res": "Add {s}F{m} (or, when its residuals are recomputed, {s}R{m}).",
    "wres": "Add {s}I{m} before {s}W{m}.",
    "dx": "Add the backward of stage {s}: {s}B{m}, or {s}I{m} and {s}W{m}.",
    "g": "Add {s}B{m}, or {s}W{m} after {s}I{m}.",
}
REASON_UNREAD = {
    "res": "its backward, {s}B{m} (or {s}I{m} and {s}W{m}), is missing",
    "wres": "{s}W{m} is missing: an I without its W leaves the weight gradient undone",
    "y": "the forward of the next stage is missing",
    "dx": "the backward of the stage before is missing",
    "g": "nobody adds it up",
}


def describe_value(value: Value) -> str:
    """Return a value with its description: "res[1,0] (the residuals of 1F0)"."""
    phrase = _PHRASE_BY_NAME.get(value.name)
    return f"{value} ({fill_in(phrase, value)})" if phrase and value.microbatch is not None else str(value)


def draw_rows(rows: Sequence[Sequence[str]], step_by_rank: dict[int, int]) -> str:
    """Draw the marked cell of each marked rank between its neighbours: `rank 1 | 1F1 [1B0] 1F0`."""
    lines: list[str] = []
    for rank, marked_step in sorted(step_by_rank.items()):
        cells = [f"[{cell}]" if step == marked_step else cell for step, cell in enumerate(rows[rank])]
        first_shown, end_shown = max(0, marked_step - 6), marked_step + 7
        cut_before, cut_after = ["..."] * (first_shown > 0), ["..."] * (end_shown < len(cells))
        shown_cells = [*cut_before, *cells[first_shown:end_shown], *cut_after]
        lines.append(f"  rank {rank} | {' '.join(shown_cells)}")
    return "\n".join(lines)


def error_at(program: Program, position: int, sentence: str, remedy: str = "") -> ProgramError:
    """Return the error about the op at a position, with its rank and step, its drawn row, and the remedy."""
    op = program.ops[position]
    row = [peer for peer in program.ops if peer.rank == op.rank and (kind_of(peer.kind).time or peer is op)]
    # Steps count what a grid shows: timed ops, and the op itself if it is none.
    step = next(number for number, peer in enumerate(row) if peer is op)
    rows = [[] for _ in range(op.rank)] + [[peer.cell for peer in row]]
    lines = [f"rank {op.rank}, step {step}: {sentence}", draw_rows(rows, {op.rank: step}), remedy]
    return ProgramError("\n".join(filter(None, lines)))


def fill_in(template: str, value: Value) -> str:
    """Fill the stage and microbatch of a value into a template."""
    slice_suffix = "" if value.slice is None else f".{value.slice}"
    return template.format(s=value.stage, m=f"{value.microbatch}{slice_suffix}")


def remedy_for(value: Value, otherwise: str) -> str:
    """Return the sentence that says which op to add so that a value is written."""
    if value.location:
        missing = "SEND" if value.location.rpartition("@")[2].find(">") >= 0 else "RECV"
        return f"Add the {missing} that makes {value}, or use fpipe.communicate()."
    return fill_in(_REMEDY_BY_NAME.get(value.name, f"Add the op that writes it, or {otherwise}."), value)


def deadlock_error(
    ops: Sequence[Op],
    rows: Sequence[Sequence[int]],
    sources: Sequence[Sources],
    anchor: Mapping[int, int],
    at_cell: Sequence[int],
    blocked: Mapping[int, int],
) -> ProgramError:
    """Return the error about ops that wait for each other, with a drawing of where their ranks stand.

    A rank has come to `at_cell` of its row and waits for the op `blocked`; an op in no row stands before its `anchor`.
    """
    # 1) Follow "waits for an op of rank .." from rank to rank until one comes back: the cycle.
    head_by_rank = {rank: row[at_cell[rank]] for rank, row in enumerate(rows) if at_cell[rank] < len(row)}

    def next_rank(rank: int) -> int:
        return ops[anchor.get(blocked[rank], blocked[rank])].rank

    path = [next(rank for rank in head_by_rank if rank in blocked)]
    while next_rank(path[-1]) not in path:
        path.append(next_rank(path[-1]))
    ranks = path[path.index(next_rank(path[-1])) :]
    # 2) One sentence for each rank of the cycle: what its next op waits for, and where that stands.
    cells = [[ops[position].cell for position in row] for row in rows]
    sentences: list[str] = []
    for rank in ranks:
        head, missing = ops[head_by_rank[rank]], ops[blocked[rank]]
        value = next((value for value in head.reads if value in missing.writes), None)
        reason = f"reads {describe_value(value)}" if value else f"waits, through unnamed ops, for {missing.cell}"
        blocking_head = ops[head_by_rank[missing.rank]].cell
        where = "on the same rank" if missing.rank == rank else f"on rank {missing.rank}, behind {blocking_head}"
        sentences.append(f"rank {rank}, step {at_cell[rank]}: {head.cell} {reason}, which comes later {where}.")
    # 3) The remedy: move an op before the head of its rank. Choose one that does not itself depend on that head, since
    # moving such an op would only make another cycle.
    blocking_and_head = [(blocked[rank], head_by_rank[ops[blocked[rank]].rank]) for rank in ranks]
    blocking_position, head = next(
        (pair for pair in blocking_and_head if not _depends_on(sources, *pair)), blocking_and_head[0]
    )
    remedy = f"Put {ops[blocking_position].cell} before {ops[head].cell}"
    if any(op.kind == "UPDATE" for op in ops):
        remedy = (
            "A forward waits here for parameters that a backward behind it updates: put a schedule of single steps "
            f"before fpipe.steps(), and behind it, with stale=, one that streams.\n{remedy}"
        )
    count = f"{len(ranks)} ops wait for each other in a circle; these orders have no common global order.\n  "
    text = count * (len(ranks) > 1) + "\n  ".join(sentences)
    drawn = draw_rows(cells, {rank: at_cell[rank] for rank in ranks})
    return ProgramError(f"{text}\n{drawn}\n{remedy}, or start from fpipe.schedules.one_f_one_b(ranks={len(rows)}).")


class StateOrderError(ProgramError):
    """Forwards of a stage with module state that do not run in microbatch order on one rank.

    Attributes:
        stage: the stage, and `order`, what its forwards do instead.
    """

    stage: int = 0
    order: str = ""


def state_order_error(stage: int, order: str, buffers: Sequence[str] = ()) -> StateOrderError:
    """Return the error about a stage with module state, with the names of its buffers where they are known.

    >>> print(state_order_error(2, "1F2 comes before 1F0 on rank 1", ["3.running_mean"]))
    stage 2 keeps '3.running_mean', so its forwards run in microbatch order on one rank; 1F2 comes before 1F0 on rank 1.
    """
    more_names = f" and {len(buffers) - _SHOWN_BUFFERS} more" if len(buffers) > _SHOWN_BUFFERS else ""
    state_names = ", ".join(map(repr, buffers[:_SHOWN_BUFFERS])) + more_names if buffers else "module state"
    rule = f"stage {stage} keeps {state_names}, so its forwards run in microbatch order on one rank"
    error = StateOrderError(f"{rule}; {order}.")
    error.stage, error.order = stage, order
    return error


_SHOWN_BUFFERS = 3


def cycle_error(ops: Sequence[Op]) -> ProgramError:
    """Return the error about a cycle of ops in no row: each reads from the next, the last from the first."""
    lines = [
        f"{op.cell} on rank {op.rank} reads {next(value for value in op.reads if value in writer.writes)}, which "
        f"{writer.cell} writes.\n"
        for op, writer in zip(ops, (*ops[1:], ops[0]), strict=True)
    ]
    return ProgramError(
        "ops that no schedule places wait for each other in a circle, and can stand in no order.\n  "
        f"{'  '.join(lines)}Let one of them read a value that is written before."
    )


def _depends_on(sources: Sequence[Sources], position: int, ancestor: int) -> bool:
    """Whether an op depends on an ancestor, directly or through other ops."""
    visited, pending = {position}, [position]
    while pending:
        for source in sources[pending.pop()]:
            if source == ancestor:
                return True
            if source >= 0 and source not in visited:
                visited.add(source)
                pending.append(source)
    return False
