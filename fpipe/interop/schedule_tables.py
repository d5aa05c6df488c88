"""Write programs as the schedule tables of Megatron-LM and of Primus, which name an op by its chunk on its rank.

    Megatron-LM   one table of (microbatch, chunk) for all ranks; a rank differs by its number of warm-up forwards
    Primus        a list of nodes for each rank: F|0|0, SF|0|0, RB|0|0, BW|0|0, ..., in the order in which they run

The chunks of a rank are its stages, from the first to the last.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from fpipe.interop._torch_tables import KINDS_WITHOUT_CELL
from fpipe.program import Op, Program, ProgramError, require_program


def to_megatron(program: Program) -> str:
    """Write a program as the schedule table of Megatron-LM's interleaved 1F1B.

    Args:
        program: forwards and full backwards, stages in turns over the ranks. Each rank runs some forwards, then one
            forward and one backward in turn, then the rest of its backwards. All ranks have the same order of forwards,
            and the mirror image of it as the order of backwards.

    Returns:
        JSON: `schedule_table`, pairs of microbatch and chunk as `get_schedule_table` returns them, and
        `num_warmup_microbatches`, a number for each rank.

    Raises:
        ProgramError: an op or an order that such a table cannot say.

    Source: Megatron-LM, `megatron/core/pipeline_parallel/schedules.py`.

    >>> import fpipe
    >>> print(to_megatron(fpipe.chain(fpipe.split(2), fpipe.schedules.interleaved(2))(fpipe.program(4))))
    {"schedule_table": [[0, 0], [1, 0], [0, 1], [1, 1]], "num_warmup_microbatches": [3, 2]}
    """
    ops_by_rank = _compute_ops(program, "FB", "Megatron-LM")
    ranks, chunk_count = program.ranks, program.stages // program.ranks
    if program.stages % ranks:
        raise ProgramError(f"{program.stages} stages on {ranks} ranks; Megatron-LM has equally many on each.")
    for op in (op for rank_ops in ops_by_rank for op in rank_ops):
        if op.rank != (op.stage or 0) % ranks:
            raise ProgramError(f"{op.cell} is on rank {op.rank}; Megatron-LM has it on rank {(op.stage or 0) % ranks}.")
    table = [(op.microbatch, (op.stage or 0) // ranks) for op in ops_by_rank[0] if op.kind == "F"]
    warmup_counts: list[int] = []
    for rank, rank_ops in enumerate(ops_by_rank):
        first_backward = next((index for index, op in enumerate(rank_ops) if op.kind == "B"), 0)
        # The last forward before the first backward belongs to the steady part, which begins with a forward.
        warmup_counts.append(max(0, first_backward - 1))
        # The k-th backward is that of the k-th forward, with the chunks counted from the last one.
        forwards = [f"{chunk * ranks + rank}F{microbatch}" for microbatch, chunk in table]
        backwards = [f"{(chunk_count - 1 - chunk) * ranks + rank}B{microbatch}" for microbatch, chunk in table]
        steady = zip(forwards[warmup_counts[-1] :], backwards, strict=False)
        cells = [*forwards[: warmup_counts[-1]], *(cell for pair in steady for cell in pair)]
        cells += backwards[len(forwards) - warmup_counts[-1] :]
        for op_cell, cell in zip_longest((op.cell for op in rank_ops), cells, fillvalue="nothing"):
            if op_cell != cell:
                raise ProgramError(f"rank {rank} runs {op_cell} where Megatron-LM runs {cell}: its order is 1F1B.")
    return json.dumps({"schedule_table": table, "num_warmup_microbatches": warmup_counts})


def to_primus(program: Program) -> str:
    """Write a program as the schedule table of AMD's Primus.

    Args:
        program: a chain of stages with one rank a stage; F with B, or with I and W, which Primus calls BW, B and W.

    Returns:
        JSON, a list of nodes for each rank, with the fields of Primus' `SchedulerNode`; `func_type` is the name of a
        `FuncType`. Each op receives right before it runs and sends right after, also between two chunks of one rank.

    Raises:
        ProgramError: an op or a placement that such a table cannot say.

    Source: Primus, `primus/core/pipeline_parallel/scheduler`.

    >>> import fpipe, json
    >>> rows = json.loads(to_primus(fpipe.schedules.gpipe(2)(fpipe.program(2))))
    >>> [" ".join(node["func_type"] for node in row) for row in rows]
    ['F SF RB BW', 'RF F BW SB']
    >>> rows[1][0]
    {'func_type': 'RF', 'mini_batch': 0, 'chunk': 0, 'args': {'from_pp_rank': 0, 'to_pp_rank': 1, 'recv_from_chunk': 0}}
    """
    ops_by_rank = _compute_ops(program, "FBIW", "Primus")
    homes = [(rank, stages.index(stage)) for stage, rank, stages in _homes(program)]
    return json.dumps([[node for op in rank_ops for node in _primus_nodes(op, homes)] for rank_ops in ops_by_rank])


def _primus_nodes(op: Op, homes: Sequence[tuple[int, int]]) -> list[dict[str, Any]]:
    """Return the nodes of an op: a receive, the op and a send, the outer two where there is a stage next to it."""
    stage = op.stage or 0
    rank, chunk = homes[stage]
    # Primus writes B for an input gradient, as the zero-bubble papers do.
    kind = {"B": "BW", "I": "B"}.get(op.kind, op.kind)
    nodes: list[dict[str, Any]] = [{"func_type": kind, "mini_batch": op.microbatch, "chunk": chunk, "args": None}]
    if op.kind == "W":
        return nodes
    # Outputs go one stage up, and cotangents one down.
    step, letter = (1, "F") if op.kind == "F" else (-1, "B")
    if 0 <= stage - step < len(homes):
        source, source_chunk = homes[stage - step]
        args = {"from_pp_rank": source, "to_pp_rank": rank, "recv_from_chunk": source_chunk}
        nodes.insert(0, nodes[0] | {"func_type": f"R{letter}", "args": args})
    if 0 <= stage + step < len(homes):
        target, target_chunk = homes[stage + step]
        args = {"from_pp_rank": rank, "to_pp_rank": target, "send_to_chunk": target_chunk}
        nodes.append(nodes[-1] | {"func_type": f"S{letter}", "args": args})
    return nodes


def _homes(program: Program) -> list[tuple[int, int, list[int]]]:
    """Return each stage with its rank and all stages of that rank."""
    ranks: list[int] = []
    for stage, rank in enumerate(program.placement):
        if isinstance(rank, tuple):
            raise ProgramError(f"stage {stage} is on ranks {rank}; Primus has one rank a stage.")
        ranks.append(rank)
    return [(stage, rank, [i for i, home in enumerate(ranks) if home == rank]) for stage, rank in enumerate(ranks)]


def _compute_ops(program: Program, kinds: str, runtime: str) -> list[list[Op]]:
    """Return the ops of each rank that a table names; raise ProgramError for ops that it has no word for."""
    ops_by_rank: list[list[Op]] = [[] for _ in range(require_program(program).ranks)]
    for op in program.ops:
        if op.kind in kinds and op.slice is None:
            ops_by_rank[op.rank].append(op)
        elif op.kind not in KINDS_WITHOUT_CELL:
            raise ProgramError(f"{op.cell}: {runtime}'s table has no {op.kind if op.slice is None else 'slices'}.")
    # A table says which stage is next to which by their numbers alone.
    for op in (op for rank_ops in ops_by_rank for op in rank_ops):
        for value in op.reads:
            if value.name == "y" and (value.stage or 0) != (op.stage or 0) - 1:
                raise ProgramError(f"{op.cell} reads {value}; {runtime}'s stages read the stage before them alone.")
    return ops_by_rank
