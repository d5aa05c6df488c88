"""Make and chain transforms, rebuild a program from rewritten ops, and place the ops that no schedule names."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from operator import is_, itemgetter
from typing import Any, NoReturn

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
    """Make a transform that refuses what is no program, and runs without the garbage collector."""

    def transform(program: Program) -> Program:
        buffers = the_program(program).buffers
        with building():
            try:
                rewritten = rewrite(program)
            except StateOrderError as error:
                raise state_order_error(error.stage, error.order, buffers.get(error.stage, ())) from None
        return naming_buffers(rewritten, buffers)

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
        if not callable(step):
            raise TypeError(f"number {number} of the chain is no transform, found {type(step).__name__}; {rule}")
        name = getattr(step, "__qualname__", "<locals>")
        if str(getattr(step, "__module__", "")).startswith("fpipe.") and "<locals>" not in name:
            raise TypeError(f"number {number} of the chain is {name} itself, which makes a transform: say {name}(...).")

    @transforming
    def transform(program: Program) -> Program:
        for number, step in enumerate(transforms):
            program = step(program)
            if not isinstance(program, Program):
                raise TypeError(f"number {number} of the chain gave a {type(program).__name__}, no Program; {rule}")
        return program

    return transform


def identity() -> Transform:
    """Leave a program as it is.

    >>> import fpipe
    >>> fpipe.identity()(fpipe.program(2)) == fpipe.program(2)
    True
    """
    return transforming(lambda program: program)


def on_parts(change: Callable[[Op], Op], op: Op) -> Op:
    """Change an op, or each part of a PAIR."""
    return pair(*map(change, op.parts)) if op.parts else change(op)


def is_move(kind: str) -> bool:
    """Whether ops of a kind take a value from memory to memory."""
    return KINDS[kind].lane == "copy"


def moved(op: Op, rank: int) -> Op:
    """Move an op to another rank."""
    kind, stage, microbatch, piece, before, reads, writes, parts, how = op
    if parts:  # each may have been elsewhere
        parts = tuple([moved(part, rank) for part in parts])
    elif before == rank:
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
    """Make a program from rewritten ops: those that a schedule named keep their order, the rest find their place."""
    refuse_freed(program)
    inputs = program.inputs if inputs is None else inputs
    outputs = program.outputs if outputs is None else outputs
    return arrange(inputs, ops, outputs, held_kinds(program), sources or same_sources(program, inputs, ops))


def settled(program: Program, ops: Sequence[Op], outputs: Iterable[Output] | None = None) -> Program:
    """Make a program from ops some of which are new and keep to their data; stages live where they did."""
    placed, ends = at_data(program, ops, outputs)
    return rebuilt(program, placed, outputs=ends)


def at_data(
    program: Program, ops: Sequence[Op], outputs: Iterable[Output] | None = None
) -> tuple[list[Op], tuple[Output, ...]]:
    """Place the ops and outputs of `settled` on ranks, in no order yet."""
    ends = program.outputs if outputs is None else in_order(outputs)
    _, placed, ends = keep_to_data(program.inputs, ops, ends, homes_of(program))
    return placed, ends


def same_sources(program: Program, inputs: tuple[Input, ...], ops: Sequence[Op]) -> list[Sources] | None:
    """The sources of ops the first of which read and write what those of a program do, and the rest are new."""
    old = program.ops
    for field in (itemgetter(5), itemgetter(6)):
        if len(ops) < len(old) or not all(map(is_, map(field, old), map(field, ops))):
            return None
    added = ops[len(old) :]
    if not added:
        return program.sources
    new = {end.value: -1 for end in inputs}
    new |= {value: position for position, op in enumerate(added, len(old)) for value in op[6]}
    writer = program.writer
    sources = [tuple([new[value] if value in new else writer[value] for value in op[5]]) for op in added]
    return [*program.sources, *sources]


def refuse_freed(program: Program) -> None:
    """Refuse a rewrite behind free(): a freed value has no readers to add."""
    if "FREE" in map(itemgetter(0), program.ops):
        mend = "apply fpipe.free() last, after every other transform."
        raise ProgramError(f"this program already frees its values; {mend}")


def refuse_sent(program: Program, transform: str) -> None:
    """Refuse a rewrite behind communicate(), which has placed the transfers."""
    if not {"SEND", "RECV"}.isdisjoint(map(itemgetter(0), program.ops)):
        mend = f"put fpipe.{transform}() before fpipe.communicate()."
        raise ProgramError(f"this program has its transfers already; {mend}")


def refuse_updated(program: Program, transform: str = "") -> None:
    """Refuse a transform of gradients behind update(), which has used them."""
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
    """Place every op that no schedule names on its rank, and every input and output at its homes.

    A stage lives where `homes` says, else on the ranks of its scheduled ops. SPLIT and R go to their reader; what adds,
    scales or merges to where its inputs were made, if that is a home of its stage, else to the first home. What is made
    away from a home is added where it is made, so that one sum travels.
    """
    refuse_state_order(inputs, ops)
    ranks = _Ranks(ops, homes or {})
    placed = list(ops)
    table, moves = scheduled_kinds(), {kind for kind in KINDS if is_move(kind)}
    readers: dict[Value, set[int]] = {end.value: set() for end in inputs if end.value.stage is None}
    for position, op in enumerate(ops):
        kind = op[0]
        if kind in _BACKWARD:  # most ops: they stay, and read nothing of the batch
            continue
        if kind not in table and op[1] is not None and kind not in moves:
            placed[position] = op = ranks.place(op)
        elif kind == "OFFLOAD":
            ranks.refuse_moved(op)
        for value in op[5]:
            if value[1] is None and value in readers:
                readers[value].add(op[4])
    placed_inputs = tuple([ranks.place_input(end, readers) for end in inputs])
    return placed_inputs, placed, tuple([ranks.place_output(end) for end in outputs])


def _refuse_several(stage: int, ops: Sequence[Op]) -> NoReturn:
    first = {op.rank: op for op in reversed(list(parts_of(ops))) if op.stage == stage and op.kind in scheduled_kinds()}
    cells = " and ".join(f"{op.cell} on rank {rank}" for rank, op in sorted(first.items()))
    raise ProgramError(
        f"stage {stage} is on several ranks: {cells}. If they are to hold replicas of its parameters, or it has none, "
        f"say so by homes={{{stage}: {sorted(first)}}} (from_table: replicated=True); if it is a slip, move one."
    )


class _Ranks:
    """Which rank does what: looked up by stage where a stage is on one rank, else by microbatch and by value."""

    def __init__(self, ops: Sequence[Op], homes: Mapping[int, tuple[int, ...]]) -> None:
        self.ops = ops
        self.of_stage: defaultdict[int, set[int]] = defaultdict(set)
        self.of_unscheduled: dict[Value, int] = {}  # the ranks of values that unscheduled ops write
        table = scheduled_kinds()
        places = set(map(itemgetter(0, 1, 4), parts_of(ops)))
        for stage, rank in sorted({place[1:] for place in places if place[0] in table and place[1] is not None}):
            self.of_stage[stage].add(rank)
        for stage, ranks in self.of_stage.items():
            if len(ranks) > 1 and stage not in homes:
                _refuse_several(stage, ops)
        self.homes = {stage: tuple(sorted(ranks)) for stage, ranks in self.of_stage.items()} | dict(homes)

    def place(self, op: Op) -> Op:
        kind, writes = op[0], op[6]
        if kind == "SPLIT":
            rank = self.rank_of_pass("F", op)
        elif kind == "R":
            rank = self.rank_of_pass("B", op)
            self.refuse_split_group(op, rank)
        elif writes and writes[0][0] == "dy":
            rank = self.rank_of_pass("B", op)
        elif kind == "GATHER" and writes[0].at:  # for some uses on its rank, whose names say it
            rank = op.rank
            if rank not in self.homes.get(op.stage or 0, (rank,)):
                raise ProgramError(
                    f"{op.cell} is on rank {rank}, and stage {op.stage} moves away from it: put "
                    "fpipe.shard(gather=...) after what places the program."
                )
        else:
            rank = self.rank_at_home(op)
        for value in writes:
            self.of_unscheduled[value] = rank
        return op if op[4] == rank else moved(op, rank)

    def rank_at_home(self, op: Op) -> int:
        """The rank of an op that adds, scales or merges: where its inputs are, or the first home of its stage."""
        stage = op[1] or 0
        homes: tuple[int, ...] = self.homes.get(stage, (op[4],))
        travels = op[0] == "ADD" and homes[0] not in self.of_stage.get(stage, homes)  # weights that live elsewhere
        if len(homes) == 1 and not travels:
            return homes[0]
        writers = {self.writer(value) for value in op[5]}
        if travels and len(writers) == 1:
            return writers.pop() or 0
        return next((rank for rank in homes if writers - {None} == {rank}), min(homes))

    def rank_of_pass(self, direction: str, op: Op) -> int:
        """The rank of the forward or backward of a stage for a microbatch (and slice)."""
        ranks = self.of_stage.get(op.stage or 0, {op.rank})
        return min(ranks) if len(ranks) == 1 else self._passes.get((direction, *op[1:4]), op.rank)

    @cached_property
    def _passes(self) -> dict[tuple[Any, ...], int]:
        ops = [op for op in parts_of(self.ops) if op.kind in "FBI"]
        return {("F" if op.kind == "F" else "B", *op[1:4]): op.rank for op in ops}

    def writer(self, value: Value) -> int | None:
        if value in self.of_unscheduled:
            return self.of_unscheduled[value]
        ranks = self.of_stage.get(-1 if value.stage is None else value.stage, ())
        return min(ranks) if len(ranks) == 1 and value.microbatch is not None else self._writers.get(value)

    @cached_property
    def _writers(self) -> dict[Value, int]:
        return {value: op.rank for op in self.ops for value in op.writes}

    def place_input(self, end: Input, readers: Mapping[Value, set[int]]) -> Input:
        """Put an input of the batch on the ranks that read it, one of a stage where its parameters live."""
        stage = end.value.stage
        homes = tuple(sorted(readers[end.value])) if stage is None else self.homes.get(stage, end.homes)
        return end._replace(homes=homes or (0,))

    def place_output(self, end: Output) -> Output:
        """Put an output that belongs to a stage's parameters where these live, another where it is written."""
        name, value, homes = end
        stage = name[1]
        if stage is not None and name[0] in _AT_HOME:
            now = self.homes.get(stage, homes)
        else:
            rank = self.writer(value)
            now = homes if rank is None else (rank,)
        return end if now == homes else _new(Output, (name, value, now))

    def refuse_moved(self, offload: Op) -> None:
        """A value is offloaded on the rank that writes it; a copy of a copy goes where it likes."""
        value = offload.reads[0]
        if not value.at and (rank := self.writer(value)) not in (None, offload.rank):
            raise ProgramError(
                f"{offload.cell} is on rank {offload.rank}, and what it reads moves to rank {rank}: put "
                "fpipe.offload() after what places the program."
            )

    def refuse_split_group(self, op: Op, rank: int) -> None:
        """The stages of a checkpoint group are on one rank: an R reads what the one before it recomputed."""
        if any(self.writer(value) != rank for value in op.reads if value.name == "again"):
            raise ProgramError(
                f"{op.cell} is on rank {rank} and recomputes from what its group recomputes on another; the "
                "stages of a checkpoint group are on one rank."
            )
