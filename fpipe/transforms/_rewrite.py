"""Make and chain transforms, rebuild a program from rewritten ops, and place the ops that no schedule names.

    ops of a program --rewrite--> new ops --place_by_data--> ops on ranks --rebuild--> Program

A schedule names F, B, I and W, and only these keep their ranks and their order through a rewrite. Every other op has
its rank from the ops whose values it reads or writes, and its place in the list from `fpipe.order`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import is_, itemgetter
from typing import Any, NoReturn

from fpipe.order import arrange, fixed_kinds, refuse_state_order, scheduled_kinds, sort_outputs
from fpipe.program import (
    KINDS,
    PARAMETERS,
    Input,
    Op,
    Output,
    Program,
    ProgramError,
    Sources,
    Value,
    building,
    pair,
    parts_of,
    require_program,
    with_buffer_names,
)
from fpipe.wording import StateOrderError, state_order_error

Transform = Callable[[Program], Program]

# A program may have a million ops. The loops over all of them read op[5], as map(itemgetter(5), ops) does in C, and
# make an op by tuple.__new__: 0.13 us, where Op(...) takes 0.29 us and _replace 0.94 us.
_new = tuple.__new__
_BACKWARD = frozenset("BIW")
_RESULTS_AT_HOME = frozenset(("grads", "state", "params", "opt"))


def as_transform(rewrite: Transform) -> Transform:
    """Wrap a rewrite: check that its argument is a Program, and keep the garbage collector off while it runs."""

    def transform(program: Program) -> Program:
        # The names of module buffers are for errors alone. They are no part of a program's value, so each rewrite
        # would lose them, and they are handed on here.
        buffers = require_program(program).buffers
        with building():
            try:
                rewritten = rewrite(program)
            except StateOrderError as error:
                raise state_order_error(error.stage, error.order, buffers.get(error.stage, ())) from None
        return with_buffer_names(rewritten, buffers)

    return transform


def chain(*transforms: Transform) -> Transform:
    """Apply transforms from left to right.

    >>> import fpipe
    >>> program = fpipe.program(1)
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 0B0
    >>> print(fpipe.plot(fpipe.chain(fpipe.split(2), fpipe.split_backward())(program)))
    rank 0 | 0F0 0I0 0W0 0F1 0I1 0W1
    """

    rule = "a transform is made by a call, such as fpipe.schedules.gpipe(4)."
    for number, step in enumerate(transforms):
        name = getattr(step, "__qualname__", "<locals>")
        if str(getattr(step, "__module__", "")).partition(".")[0] == "fpipe" and "<locals>" not in name:
            raise TypeError(f"number {number} of the chain is {name} itself, which makes a transform: say {name}(...).")

    @as_transform
    def transform(program: Program) -> Program:
        for number, step in enumerate(transforms):
            program = step(program)
            if not isinstance(program, Program):
                raise TypeError(f"number {number} of the chain gave a {type(program).__name__}, no Program; {rule}")
        return program

    return transform


def identity() -> Transform:
    """Return the program unchanged.

    >>> import fpipe
    >>> fpipe.identity()(fpipe.program(2)) == fpipe.program(2)
    True
    """
    return as_transform(lambda program: program)


def map_parts(change: Callable[[Op], Op], op: Op) -> Op:
    """Apply `change` to an op, or to each part of a PAIR."""
    return pair(*map(change, op.parts)) if op.parts else change(op)


def is_move(kind: str) -> bool:
    """Whether ops of this kind copy a value from one memory to another: SEND, RECV, OFFLOAD and LOAD."""
    return KINDS[kind].lane == "copy"


def with_rank(op: Op, rank: int) -> Op:
    kind, stage, microbatch, slice_index, old_rank, reads, writes, parts, options = op
    # The parts of a PAIR are moved even where the PAIR itself stays: each may have been on another rank.
    if parts:
        parts = tuple([with_rank(part, rank) for part in parts])
    elif old_rank == rank:
        return op
    return _new(Op, (kind, stage, microbatch, slice_index, rank, reads, writes, parts, options))


def rebuild(
    program: Program,
    ops: Sequence[Op],
    *,
    inputs: tuple[Input, ...] | None = None,
    outputs: tuple[Output, ...] | None = None,
    sources: list[Sources] | None = None,
) -> Program:
    """Build a program from rewritten ops, in the one global order.

    Ops that a schedule has named keep their order on their rank, all others are placed by their data.
    """
    refuse_freed(program)
    inputs = program.inputs if inputs is None else inputs
    outputs = program.outputs if outputs is None else outputs
    return arrange(inputs, ops, outputs, fixed_kinds(program), sources or extended_sources(program, inputs, ops))


def place_and_rebuild(program: Program, ops: Sequence[Op], outputs: Iterable[Output] | None = None) -> Program:
    """Place new ops on the ranks of their data, and build the program; the homes of stages stay."""
    placed_ops, placed_outputs = place_by_data_of(program, ops, outputs)
    return rebuild(program, placed_ops, outputs=placed_outputs)


def place_by_data_of(
    program: Program, ops: Sequence[Op], outputs: Iterable[Output] | None = None
) -> tuple[list[Op], tuple[Output, ...]]:
    """Place rewritten ops and outputs of a program on ranks by their data, without ordering them."""
    placed_outputs = program.outputs if outputs is None else sort_outputs(outputs)
    _, placed_ops, placed_outputs = place_by_data(program.inputs, ops, placed_outputs, homes_of(program))
    return placed_ops, placed_outputs


def extended_sources(program: Program, inputs: tuple[Input, ...], ops: Sequence[Op]) -> list[Sources] | None:
    """Return the sources of `ops` where they begin with all ops of the program, else None.

    A quarter of a rewrite's time goes into the search for the writer of each read. A rewrite that only appends ops, or
    gives them other ranks, leaves the known positions as they are.
    """
    old_ops = program.ops
    # Unchanged reads and writes are the very tuples of the old op, so `is` suffices; comparing a million tuples value
    # by value would take as long as the search.
    for tuple_field in (itemgetter(5), itemgetter(6)):
        if len(ops) < len(old_ops) or not all(map(is_, map(tuple_field, old_ops), map(tuple_field, ops))):
            return None
    new_ops = ops[len(old_ops) :]
    if not new_ops:
        return program.sources
    new_writer = {program_input.value: -1 for program_input in inputs}  # -1: handed in by the caller
    new_writer |= {value: position for position, op in enumerate(new_ops, len(old_ops)) for value in op[6]}
    writer = program.writer
    new_sources = [
        tuple([new_writer[value] if value in new_writer else writer[value] for value in op[5]]) for op in new_ops
    ]
    return [*program.sources, *new_sources]


def refuse_freed(program: Program) -> None:
    """Raise ProgramError for a program that frees its values: no reader may be added behind a FREE."""
    if "FREE" in map(itemgetter(0), program.ops):
        mend = "apply fpipe.free() last, after every other transform."
        raise ProgramError(f"this program already frees its values; {mend}")


def refuse_transfers(program: Program, transform: str) -> None:
    """Raise ProgramError for a program that communicate() has given its transfers."""
    if not {"SEND", "RECV"}.isdisjoint(map(itemgetter(0), program.ops)):
        mend = f"put fpipe.{transform}() before fpipe.communicate()."
        raise ProgramError(f"this program has its transfers already; {mend}")


def refuse_updated(program: Program, transform: str = "") -> None:
    """Raise ProgramError for a program that update() has let use up its gradients."""
    if "UPDATE" in map(itemgetter(0), program.ops):
        mend = f"put fpipe.{transform}() before fpipe.update()" if transform else "update them once"
        raise ProgramError(f"this program updates its parameters already; {mend}.")


def homes_of(program: Program) -> dict[int, tuple[int, ...]]:
    """Return the ranks where each stage's parameters live."""
    parameters = (end for end in program.inputs if end.value.name in PARAMETERS)
    return {end.value.stage: end.homes for end in parameters if end.value.stage is not None}


def place_by_data(
    inputs: tuple[Input, ...],
    ops: Sequence[Op],
    outputs: tuple[Output, ...],
    homes: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[tuple[Input, ...], list[Op], tuple[Output, ...]]:
    """Place every op that no schedule names on its rank, and every input and output at its homes.

    A stage lives where `homes` says, else on the ranks of its scheduled ops. SPLIT and R go to the rank of their
    reader. ADD, SCALE and MERGE go to the rank that writes what they read if it is a home of their stage, else to the
    first home.
    """
    refuse_state_order(inputs, ops)
    finder = _RankFinder(ops, homes or {})
    placed_ops = list(ops)
    named_kinds, move_kinds = scheduled_kinds(), {kind for kind in KINDS if is_move(kind)}
    batch_readers: dict[Value, set[int]] = {value: set() for value, _ in inputs if value.stage is None}
    for position, op in enumerate(ops):
        kind = op[0]
        # B, I and W are the most of the ops. They keep their rank, and read nothing of the batch.
        if kind in _BACKWARD:
            continue
        # Transfers stay where they are as well: SEND and RECV on their two ranks, OFFLOAD and LOAD on one.
        if kind not in named_kinds and op[1] is not None and kind not in move_kinds:
            placed_ops[position] = op = finder.place_op(op)
        elif kind == "OFFLOAD":
            finder.refuse_foreign_offload(op)
        for value in op[5]:
            if value[1] is None and value in batch_readers:
                batch_readers[value].add(op[4])
    placed_inputs = tuple([finder.place_input(program_input, batch_readers) for program_input in inputs])
    return placed_inputs, placed_ops, tuple([finder.place_output(output) for output in outputs])


def _refuse_several_ranks(stage: int, ops: Sequence[Op]) -> NoReturn:
    ops_of_stage = [op for op in parts_of(ops) if op.stage == stage and op.kind in scheduled_kinds()]
    first_op_by_rank = {op.rank: op for op in reversed(ops_of_stage)}
    cells = " and ".join(f"{op.cell} on rank {rank}" for rank, op in sorted(first_op_by_rank.items()))
    homes = f"homes={{{stage}: {sorted(first_op_by_rank)}}}"
    raise ProgramError(
        f"stage {stage} is on several ranks: {cells}. Move one; or, with replicas of its parameters or without any, "
        f"say {homes} (from_table: replicated=True)."
    )


class _RankFinder:
    """The ranks of unscheduled ops, inputs and outputs.

    Nearly always a stage is on one rank, and a look-up by stage answers. The tables by pass and by value hold every op
    of the program, so they are made only when a stage with several ranks asks for them.
    """

    def __init__(self, ops: Sequence[Op], homes: Mapping[int, tuple[int, ...]]) -> None:
        self.ops = ops
        self.ranks_by_stage: defaultdict[int, set[int]] = defaultdict(set)
        self.rank_by_unscheduled_value: dict[Value, int] = {}  # filled by place_op, in the order of the ops
        named_kinds = scheduled_kinds()
        # A set of (kind, stage, rank) made in C is far smaller than the ops; only this set is walked in Python.
        placements = set(map(itemgetter(0, 1, 4), parts_of(ops)))
        for stage, rank in sorted({(s, rank) for kind, s, rank in placements if kind in named_kinds and s is not None}):
            self.ranks_by_stage[stage].add(rank)
        for stage, ranks in self.ranks_by_stage.items():
            if len(ranks) > 1 and stage not in homes:
                _refuse_several_ranks(stage, ops)
        self.homes = {stage: tuple(sorted(ranks)) for stage, ranks in self.ranks_by_stage.items()} | dict(homes)

    def place_op(self, op: Op) -> Op:
        kind, writes = op[0], op[6]
        if kind == "SPLIT":
            rank = self.rank_of_pass("F", op)
        elif kind == "R":
            rank = self.rank_of_pass("B", op)
            self.refuse_split_group(op, rank)
        elif writes and writes[0][0] == "dy":
            rank = self.rank_of_pass("B", op)
        elif kind == "GATHER" and writes[0].location:
            # The name of the gathered copy contains the rank of its readers, so this GATHER cannot follow its stage.
            rank = op.rank
            if rank not in self.homes.get(op.stage or 0, (rank,)):
                mend = "put fpipe.shard(gather=...) after what places the program."
                raise ProgramError(f"{op.cell} is on rank {rank}, which stage {op.stage} leaves: {mend}")
        else:
            rank = self.rank_at_home(op)
        for value in writes:
            self.rank_by_unscheduled_value[value] = rank
        return op if op[4] == rank else with_rank(op, rank)

    def rank_at_home(self, op: Op) -> int:
        """Return the rank of an op that adds, scales or merges: the home that writes its reads, or the first home."""
        stage = op.stage or 0
        homes: tuple[int, ...] = self.homes.get(stage, (op.rank,))
        # Where the weights live on a rank that does not compute the stage (a weight server), gradients are added on
        # the rank that computes them: one sum travels, instead of the gradient of each microbatch.
        sum_travels = op.kind == "ADD" and homes[0] not in self.ranks_by_stage.get(stage, homes)
        if len(homes) == 1 and not sum_travels:
            return homes[0]
        writer_ranks = {self.rank_of_writer(value) for value in op.reads}
        if sum_travels and len(writer_ranks) == 1:
            return writer_ranks.pop() or 0
        return next((rank for rank in homes if writer_ranks - {None} == {rank}), min(homes))

    def rank_of_pass(self, direction: str, op: Op) -> int:
        """Return the rank that runs the forward ("F") or backward ("B") of the op's stage, microbatch and slice."""
        ranks = self.ranks_by_stage.get(op.stage or 0, {op.rank})
        return min(ranks) if len(ranks) == 1 else self._rank_by_pass.get((direction, *op[1:4]), op.rank)

    @cached_property
    def _rank_by_pass(self) -> dict[tuple[Any, ...], int]:
        passes = [op for op in parts_of(self.ops) if op.kind in "FBI"]
        return {("F" if op.kind == "F" else "B", *op[1:4]): op.rank for op in passes}

    def rank_of_writer(self, value: Value) -> int | None:
        if value in self.rank_by_unscheduled_value:
            return self.rank_by_unscheduled_value[value]
        # Only values of a microbatch are sure to be written where their stage runs: sums are made at its home.
        ranks = self.ranks_by_stage.get(-1 if value.stage is None else value.stage, ())
        return min(ranks) if len(ranks) == 1 and value.microbatch is not None else self._rank_by_value.get(value)

    @cached_property
    def _rank_by_value(self) -> dict[Value, int]:
        return {value: op.rank for op in self.ops for value in op.writes}

    def place_input(self, program_input: Input, reading_ranks: Mapping[Value, set[int]]) -> Input:
        """Give an input of the batch the ranks that read it as homes, and an input of a stage the stage's homes."""
        value, homes = program_input
        homes = tuple(sorted(reading_ranks[value])) if value.stage is None else self.homes.get(value.stage, homes)
        return Input(value, homes or (0,))

    def place_output(self, output: Output) -> Output:
        """Give an output the homes of the stage's parameters if it belongs to them, else the rank that writes it."""
        name, value, homes = output
        stage = name[1]
        if stage is not None and name[0] in _RESULTS_AT_HOME:
            new_homes = self.homes.get(stage, homes)
        else:
            rank = self.rank_of_writer(value)
            new_homes = homes if rank is None else (rank,)
        return output if new_homes == homes else _new(Output, (name, value, new_homes))

    def refuse_foreign_offload(self, offload: Op) -> None:
        """Raise ProgramError where the writer of an offloaded value moves to another rank than its OFFLOAD."""
        # A value with a place in its name is a copy already, which a rank may move on from wherever it was put.
        value = offload.reads[0]
        if not value.location and (rank := self.rank_of_writer(value)) not in (None, offload.rank):
            mend = "put fpipe.offload() after what places the program."
            raise ProgramError(f"{offload.cell} is on rank {offload.rank}, its value moves to rank {rank}: {mend}")

    def refuse_split_group(self, op: Op, rank: int) -> None:
        """Raise ProgramError where stages of one checkpoint group are on several ranks."""
        # An R passes its recomputed output, `again`, on to the R of the next stage of the group, and no SEND does.
        if any(self.rank_of_writer(value) != rank for value in op.reads if value.name == "again"):
            raise ProgramError(f"{op.cell} is on rank {rank}; the stages of a checkpoint group are on one rank.")
