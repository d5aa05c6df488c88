"""Split the backward B into an input gradient I and a weight gradient W, merge them again, or drop gradients.

    2B0        --> split_backward() -->        2I0 2W0
    2I0 2W0    --> merge_backward() -->        2B0
    2F0 2B0    --> forward_only()   -->        2F0

The previous stage waits for I, and nothing waits for W, which a schedule may put into a bubble. I reads what B read. It
writes the input gradient, and `wres`, from which W computes the weight gradients. The first stage has an I too: it
writes what its W reads.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from fpipe.program import Op, Program, ProgramError, Value, is_exchange, kind_of, pair
from fpipe.transforms._rewrite import Transform, as_transform, rebuild

Choice = Callable[[int, int], bool]

_new = tuple.__new__


def split_backward(where: Choice | None = None) -> Transform:
    """Turn each full backward B into an input gradient I and a weight gradient W.

    Args:
        where: `f(stage, microbatch) -> bool`, which ones; all by default.

    >>> import fpipe
    >>> program = fpipe.program(2)
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 1B0 0B0
    >>> print(fpipe.plot(fpipe.split_backward()(program)))
    rank 0 | 0F0 1F0 1I0 1W0 0I0 0W0
    """
    return as_transform(lambda program: rebuild(program, split_backwards(program.ops, where)))


def split_backwards(ops: Iterable[Op], where: Choice | None) -> list[Op]:
    """Replace each chosen B by I and W; of a B in a PAIR the I stays in the pair, and W stands behind it."""
    halves: list[Op] = []
    for op in ops:
        # In a PAIR the I stays with its partner. W depends on I through `wres`, and parts may not depend on each other.
        if op.parts:
            parts = split_backwards(op.parts, where)
            if len(parts) == len(op.parts):
                halves.append(op)
            else:
                halves.append(pair(*(part for part in parts if part.kind != "W")))
                halves += [part for part in parts if part.kind == "W"]
        elif op.kind == "B" and (where is None or where(op.stage or 0, op.microbatch or 0)):
            wres = Value("wres", *op[1:4])
            cotangents = [value for value in op.writes if value.name != "g"]
            halves.append(_new(Op, ("I", *op[1:6], (*cotangents, wres), *op[7:])))
            params = [value for value in op.reads if value.name == "params"]
            gradients = tuple([value for value in op.writes if value.name == "g"])
            options = op.options if is_exchange(op) else ()
            halves.append(_new(Op, ("W", *op[1:5], (*params, wres), gradients, (), options)))
        else:
            halves.append(op)
    return halves


def merge_backward() -> Transform:
    """Merge I and W into B where no other op of the schedule stands between them on their rank.

    >>> import fpipe
    >>> program = fpipe.split_backward()(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 1I0 1W0 0I0 0W0
    >>> print(fpipe.plot(fpipe.merge_backward()(program)))
    rank 0 | 0F0 1F0 1B0 0B0
    """

    @as_transform
    def transform(program: Program) -> Program:
        op_by_position: dict[int, Op | None] = {}
        # An I is merged with the next timed op of its rank, if that is its W; any other op in between keeps them apart.
        open_position_by_rank: dict[int, int] = {}
        for position, op in enumerate(program.ops):
            if not kind_of(op.kind).time:
                continue
            open_position = open_position_by_rank.pop(op.rank, None)
            if op.kind == "I":
                open_position_by_rank[op.rank] = position
            elif op.kind == "W" and open_position is not None and program.ops[open_position].writes[-1] in op.reads:
                input_half = program.ops[open_position]
                writes = (*input_half.writes[:-1], *op.writes)
                op_by_position[open_position] = input_half._replace(kind="B", writes=writes)
                op_by_position[position] = None
        ops = (op_by_position.get(position, op) for position, op in enumerate(program.ops))
        return rebuild(program, [op for op in ops if op is not None])

    return transform


def forward_only() -> Transform:
    """Drop gradients, and all ops and values that only they need: backwards, recomputes, sums and residuals.

    For evaluation: module state is not written. The program is the same whether this stands before or after a schedule.
    The forwards that are left run the graphs of training, so their bits are those of the training step.

    Raises:
        ProgramError: the program has no outputs and no loss, so that nothing would be left.

    >>> import fpipe
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(2), fpipe.merge())(fpipe.program(2))
    >>> print(fpipe.plot(fpipe.forward_only()(program)))
    rank 0 | 0F0 0F1  .
    rank 1 |  .  1F0 1F1
    >>> print(*fpipe.forward_only()(fpipe.program(1)).ops)
    y[0,0] loss[0,0] = F[0,0] params[0] inputs target @ 0
    """

    @as_transform
    def transform(program: Program) -> Program:
        names = {output.name.name for output in program.outputs} - _TRAINING_RESULTS
        if not names:
            raise ProgramError("this program has neither outputs nor a loss to keep.")
        return keep_outputs(program, names)

    return transform


_TRAINING_RESULTS = frozenset(("grads", "input_grads", "state", "params", "opt", "norm", "valid", "scale"))


def keep_outputs(program: Program, names: Collection[str]) -> Program:
    """Keep only the outputs with some names, and the ops and values that they need."""
    outputs = tuple(output for output in program.outputs if output.name.name in names)
    # Nothing to drop: equal programs stay the very same object.
    if outputs == program.outputs and not any(value.name == "res" for op in program.ops for value in op.writes):
        return program
    # Dead code elimination: walk from the last op up, and keep an op if a kept op or an output reads a write of it.
    # The sources are not handed on: positions change where ops go.
    needed_values = {program_input.value for program_input in outputs}

    def keep_writes(op: Op) -> Op | None:
        writes = tuple(value for value in op.writes if value in needed_values)
        options = () if op.kind == "F" and not is_exchange(op) else op.options  # of F: how it was to be computed again
        return op._replace(writes=writes, options=options) if writes else None

    ops: list[Op] = []
    for op in reversed(program.ops):
        parts = [part for part in map(keep_writes, op.parts or (op,)) if part]
        if parts:
            op = pair(*parts) if len(parts) > 1 else parts[0]
            needed_values.update(op.reads)
            ops.append(op)
    inputs = tuple(program_input for program_input in program.inputs if program_input.value in needed_values)
    return rebuild(program, ops[::-1], inputs=inputs, outputs=outputs)
