"""Cut the backward in two, where I gives the stage before what it waits for and W can wait; or drop it.

    2B0        --> split_backward() -->        2I0 2W0
    2I0 2W0    --> merge_backward() -->        2B0
    2F0 2B0    --> forward_only()   -->        2F0

I reads what B read and writes the input gradient and what the weight gradient still needs; W turns that into gradients.
The first stage has an I too: it writes what its W reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fpipe.program import Op, Output, Program, ProgramError, Value, is_exchange, kind_of, pair
from fpipe.transforms._rewrite import Transform, rebuilt, transforming

Where = Callable[[int, int], bool]

_new = tuple.__new__


def split_backward(where: Where | None = None) -> Transform:
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

    if where is not None and not callable(where):
        raise TypeError(f"where is f(stage, microbatch) -> bool or None, found {where!r}.")
    return transforming(lambda program: rebuilt(program, halved(program.ops, where)))


def halved(ops: Iterable[Op], where: Where | None) -> list[Op]:
    """Put I and W in the places of full backwards; the I of a paired one stays in the pair."""
    halves: list[Op] = []
    for op in ops:
        if op.parts:
            parts = halved(op.parts, where)
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
            how = op.how if is_exchange(op) else ()
            halves.append(_new(Op, ("W", *op[1:5], (*params, wres), gradients, (), how)))
        else:
            halves.append(op)
    return halves


def merge_backward() -> Transform:
    """Put I and W back together where nothing that a schedule names stands between them on their rank.

    >>> import fpipe
    >>> program = fpipe.split_backward()(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 1I0 1W0 0I0 0W0
    >>> print(fpipe.plot(fpipe.merge_backward()(program)))
    rank 0 | 0F0 1F0 1B0 0B0
    """

    @transforming
    def transform(program: Program) -> Program:
        merged: dict[int, Op | None] = {}
        open_at: dict[int, int] = {}  # rank -> position of an I that its next scheduled op may close
        for position, op in enumerate(program.ops):
            if not kind_of(op.kind).time:
                continue
            before = open_at.pop(op.rank, None)
            if op.kind == "I":
                open_at[op.rank] = position
            elif op.kind == "W" and before is not None and program.ops[before].writes[-1] in op.reads:
                first = program.ops[before]
                merged[before] = first._replace(kind="B", writes=(*first.writes[:-1], *op.writes))
                merged[position] = None
        ops = (merged.get(position, op) for position, op in enumerate(program.ops))
        return rebuilt(program, [op for op in ops if op is not None])

    return transform


def forward_only() -> Transform:
    """Evaluate: drop gradients, and all ops and values that only they need: backwards, recomputes, sums, residuals.

    Module state is not written. Before or after a schedule, the program is the same. The forwards that are left run the
    same graphs as in training, so their bits are those of the training step.

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

    @transforming
    def transform(program: Program) -> Program:
        ends = tuple(end for end in program.outputs if end.name.name not in _OF_TRAINING)
        if not ends:
            raise ProgramError("this program has neither outputs nor a loss; without gradients nothing is left of it.")
        if ends == program.outputs and not any(value.name == "res" for op in program.ops for value in op.writes):
            return program
        return _needed_for(program, ends)

    return transform


_OF_TRAINING = frozenset(("grads", "input_grads", "state", "params", "opt", "norm", "valid", "scale"))


def _needed_for(program: Program, ends: tuple[Output, ...]) -> Program:
    """Walk from the end up and keep the ops some of whose writes a result needs."""
    wanted = {end.value for end in ends}

    def needed(op: Op) -> Op | None:
        writes = tuple(value for value in op.writes if value in wanted)
        how = () if op.kind == "F" and not is_exchange(op) else op.how  # of F: how it was to be computed again
        return op._replace(writes=writes, how=how) if writes else None

    ops: list[Op] = []
    for op in reversed(program.ops):
        parts = [part for part in map(needed, op.parts or (op,)) if part]
        if parts:
            op = pair(*parts) if len(parts) > 1 else parts[0]
            wanted.update(op.reads)
            ops.append(op)
    inputs = tuple(end for end in program.inputs if end.value in wanted)
    return rebuilt(program, ops[::-1], inputs=inputs, outputs=ends)
