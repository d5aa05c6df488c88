"""Rebuild a program from a rewritten list of ops, and place the ops that no schedule names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import is_, itemgetter

from fpipe.order import arrange, held_kinds, in_order, refuse_state_order, scheduled_kinds
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
    naming_buffers,
    pair,
    parts_of,
    the_program,
)
from fpipe.wording import StateOrderError, state_order_error

Transform = Callable[[Program], Program]

_new = tuple.__new__
_BACKWARD = frozenset("BIW")
_AT_HOME = frozenset(("grads", "state", "params", "opt"))


def transforming(rewrite: Transform) -> Transform:
    """A transform that refuses what is no program, and runs without the garbage collector."""

    def transform(program: Program) -> Program:
        buffers = the_program(program).buffers
        with building():
            try:
                made = rewrite(program)
            except StateOrderError as error:
                raise state_order_error(error.stage, error.order, buffers.get(error.stage, ())) from None
        return naming_buffers(made, buffers)

    return transform


def on_parts(change: Callable[[Op], Op], op: Op) -> Op:
    """A change of an op, or of each part of a PAIR."""
    return pair(*map(change, op.parts)) if op.parts else change(op)


def is_move(kind: str) -> bool:
    """Whether ops of a kind take a value from memory to memory."""
    return KINDS[kind].lane == "copy"


def moved(op: Op, rank: int) -> Op:
    """Move an op to another rank."""
    kind, stage, microbatch, piece, at, reads, writes, parts, how = op
    if parts:  # each may have been elsewhere
        parts = tuple([moved(part, rank) for part in parts])
    elif at == rank:
        return op
    return _new(Op, (kind, stage, microbatch, piece, rank, reads, writes, parts, how))


def rebuilt(
    program: Program,
    ops: Sequence[Op],
    *,
    inputs: tuple[Input, ...] | None = None,
    outputs: tuple[Output, ...] | None = None,
    sources: list[Sources] | None = None,
) -> Program:
    """A program from rewritten ops: those a schedule named keep their order, the rest find their place."""
    refuse_freed(program)
    inputs = program.inputs if inputs is None else inputs
    outputs = program.outputs if outputs is None else outputs
    return arrange(inputs, ops, outputs, held_kinds(program), sources or same_sources(program, inputs, ops))


def settled(program: Program, ops: Sequence[Op], outputs: Iterable[Output] | None = None) -> Program:
    """A program from ops some of which are new and keep to their data; stages live where they did."""
    placed, ends = at_data(program, ops, outputs)
    return rebuilt(program, placed, outputs=ends)


def at_data(
    program: Program, ops: Sequence[Op], outputs: Iterable[Output] | None = None
) -> tuple[list[Op], tuple[Output, ...]]:
    """The ops of `settled`, each on its rank, in no order yet."""
    ends = program.outputs if outputs is None else in_order(outputs)
    _, placed, ends = keep_to_data(program.inputs, ops, ends, homes_of(program))
    return placed, ends


def same_sources(program: Program, inputs: tuple[Input, ...], ops: Sequence[Op]) -> list[Sources] | None:
    """The sources of ops of which the first read and write what those of a program do, and the rest are new."""
    old = program.ops
    for part in (itemgetter(5), itemgetter(6)):
        if len(ops) < len(old) or not all(map(is_, map(part, old), map(part, ops))):
            return None
    added = ops[len(old) :]
    if not added:
        return program.sources
    new = {end.value: -1 for end in inputs}
    new |= {value: len(old) + at for at, op in enumerate(added) for value in op[6]}
    writer = program.writer
    return [
        *program.sources,
        *[tuple([new[value] if value in new else writer[value] for value in op[5]]) for op in added],
    ]


def refuse_freed(program: Program) -> None:
    """Rewrites come before free(): a freed value has no readers to add."""
    if "FREE" in map(itemgetter(0), program.ops):
        raise ProgramError(
            "this program already frees its values; apply fpipe.free() last, after every other transform."
        )


def refuse_sent(program: Program, transform: str) -> None:
    """A ProgramError for a rewrite that comes before transfers are placed."""
    if not {"SEND", "RECV"}.isdisjoint(map(itemgetter(0), program.ops)):
        raise ProgramError(
            f"this program has its transfers already; put fpipe.{transform}() before fpipe.communicate()."
        )


def refuse_updated(program: Program, transform: str = "") -> None:
    """A ProgramError for a transform of gradients behind update(), which has used them."""
    if "UPDATE" in map(itemgetter(0), program.ops):
        mend = f"put fpipe.{transform}() before fpipe.update()" if transform else "update them once"
        raise ProgramError(f"this program updates its parameters already; {mend}.")


def homes_of(program: Program) -> dict[int, tuple[int, ...]]:
    """Where each stage's parameters live."""
    return {
        end.value.stage: end.homes
        for end in program.inputs
        if end.value.name in PARAMETERS and end.value.stage is not None
    }


def keep_to_data(
    inputs: tuple[Input, ...],
    ops: Sequence[Op],
    outputs: tuple[Output, ...],
    homes: Mapping[int, tuple[int, ...]] | None = None,
) -> tuple[tuple[Input, ...], list[Op], tuple[Output, ...]]:
    """Give every op that no schedule names its rank, and every input and output its homes.

    A stage lives where `homes` says, else on the ranks of its scheduled ops. SPLIT and R go to their reader; what adds,
    scales or merges to where its inputs were made, if that is a home of its stage, else to the first home. What is made
    away from a home is added where it is made, so that one sum travels.
    """
    refuse_state_order(inputs, ops)
    ranks = _Ranks(ops, homes or {})
    placed = list(ops)
    table, moves = scheduled_kinds(), {kind for kind in KINDS if is_move(kind)}
    used: dict[Value, set[int]] = {end.value: set() for end in inputs if end.value.stage is None}
    for position, op in enumerate(ops):
        kind = op[0]
        if kind in _BACKWARD:  # most ops: they stay, and read nothing of the batch
            continue
        if kind not in table and op[1] is not None and kind not in moves:
            placed[position] = op = ranks.placed(op)
        elif kind == "OFFLOAD":
            ranks.refuse_moved(op)
        for value in op[5]:
            if value[1] is None and value in used:
                used[value].add(op[4])
    given = tuple([ranks.given(end, used) for end in inputs])
    return given, placed, tuple([ranks.wanted(end) for end in outputs])


def _on_several(stage: int, ops: Sequence[Op]) -> str:
    first = {op.rank: op for op in reversed(list(parts_of(ops))) if op.stage == stage and op.kind in scheduled_kinds()}
    cells = " and ".join(f"{op.cell} on rank {rank}" for rank, op in sorted(first.items()))
    return (
        f"stage {stage} is on several ranks: {cells}. If they are to hold replicas of its parameters, or it has none, "
        f"say so by homes={{{stage}: {sorted(first)}}} (from_table: replicated=True); if it is a slip, move one."
    )


class _Ranks:
    """Which rank does what: looked up by stage where a stage is on one rank, else by microbatch and by value."""

    def __init__(self, ops: Sequence[Op], homes: Mapping[int, tuple[int, ...]]) -> None:
        self.ops = ops
        self.of_stage: dict[int, set[int]] = {}
        self.readers: dict[tuple[str, int | None, int | None, int | None], int] = {}
        self.late: dict[Value, int] = {}  # what unscheduled ops write
        table = scheduled_kinds()
        found = set(map(itemgetter(0, 1, 4), parts_of(ops)))
        scheduled = {(stage, rank) for kind, stage, rank in found if kind in table and stage is not None}
        for stage, rank in sorted(scheduled):
            self.of_stage.setdefault(stage, set()).add(rank)
        several = next((stage for stage, found in self.of_stage.items() if len(found) > 1 and stage not in homes), None)
        if several is not None:
            raise ProgramError(_on_several(several, ops))
        self.home = {stage: tuple(sorted(found)) for stage, found in self.of_stage.items()} | dict(homes)

    def placed(self, op: Op) -> Op:
        """An op that no schedule names, on its rank."""
        kind, writes = op[0], op[6]
        if kind == "SPLIT":
            rank = self.reader("F", op)
        elif kind == "R":
            rank = self.reader("B", op)
            self.refuse_split_group(op, rank)
        elif writes and writes[0][0] == "dy":
            rank = self.reader("B", op)
        elif kind == "GATHER" and writes[0].at:
            rank = self.where_gathered(op)
        else:
            rank = self.at_home(op)
        for value in writes:
            self.late[value] = rank
        return op if op[4] == rank else moved(op, rank)

    def at_home(self, op: Op) -> int:
        """The rank of an op that adds, scales or merges: where its inputs were made, or the first home of its stage."""
        stage = op[1] or 0
        at: tuple[int, ...] = self.home.get(stage, (op[4],))
        travels = op[0] == "ADD" and at[0] not in self.of_stage.get(stage, at)  # weights that live elsewhere
        if len(at) == 1 and not travels:
            return at[0]
        made = {self.made(value) for value in op[5]}
        if travels and len(made) == 1:
            return made.pop() or 0
        return next((rank for rank in at if made - {None} == {rank}), min(at))

    def where_gathered(self, op: Op) -> int:
        """The rank of a GATHER for some uses there, whose names say it."""
        if op.rank not in self.home.get(op.stage or 0, (op.rank,)):
            raise ProgramError(
                f"{op.cell} is on rank {op.rank}, and stage {op.stage} moves away from it: put fpipe.shard(gather=...) "
                "after what places the program."
            )
        return op.rank

    def reader(self, direction: str, op: Op) -> int:
        """The rank of the forward or backward of a stage for a microbatch (and slice)."""
        found = self.of_stage.get(op.stage or 0, {op.rank})
        if len(found) == 1:
            return next(iter(found))
        if not self.readers:
            for other in parts_of(self.ops):
                if other.kind in "FBI":
                    self.readers["F" if other.kind == "F" else "B", *other[1:4]] = other.rank
        return self.readers.get((direction, *op[1:4]), op.rank)

    def made(self, value: Value) -> int | None:
        """The rank that writes a value."""
        if value in self.late:
            return self.late[value]
        found = self.of_stage.get(-1 if value.stage is None else value.stage, set())
        if len(found) == 1 and value.microbatch is not None:
            return next(iter(found))
        return self._scheduled.get(value)

    def given(self, end: Input, used: Mapping[Value, set[int]]) -> Input:
        """An input at its homes: of the batch the ranks that read it, of a stage those of its parameters."""
        stage = end.value.stage
        at = tuple(sorted(used[end.value])) if stage is None else self.home.get(stage, end.homes)
        return end._replace(homes=at or (0,))

    def wanted(self, end: Output) -> Output:
        """An output at its homes: of what belongs to a stage's parameters theirs, else where it is made."""
        name, value, homes = end
        stage = name[1]
        if stage is not None and name[0] in _AT_HOME:
            now = self.home.get(stage, homes)
        else:
            rank = self.made(value)
            now = homes if rank is None else (rank,)
        return end if now == homes else _new(Output, (name, value, now))

    def refuse_moved(self, offload: Op) -> None:
        """A value is offloaded on the rank that makes it; a copy of a copy goes where it likes."""
        value = offload.reads[0]
        if not value.at and (rank := self.made(value)) not in (None, offload.rank):
            raise ProgramError(
                f"{offload.cell} is on rank {offload.rank}, and what it reads moves to rank {rank}: put "
                "fpipe.offload() after what places the program."
            )

    def refuse_split_group(self, op: Op, rank: int) -> None:
        """The stages of a checkpoint group are on one rank: an R reads what the one before it recomputed."""
        if any(self.made(value) != rank for value in op.reads if value.name == "again"):
            raise ProgramError(
                f"{op.cell} is on rank {rank} and recomputes from what its group recomputes on another; the "
                "stages of a checkpoint group are on one rank."
            )

    @cached_property
    def _scheduled(self) -> dict[Value, int]:
        return {value: op.rank for op in self.ops for value in op.writes}
