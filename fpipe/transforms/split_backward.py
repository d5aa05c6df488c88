"""Cut the backward in two: I gives the stage before what it waits for, W can wait.

    2B0        --> split_backward() -->        2I0 2W0
    2I0 2W0    --> merge_backward() -->        2B0

I reads what B read and writes the input gradient and what the weight gradient still needs; W turns that into gradients.
The first stage has an I too: it writes what its W reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fpipe.program import Op, Program, Value, is_exchange, kind_of, pair
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
    """The ops with I and W in the places of the full backwards; the I of a paired one stays in the pair."""
    made: list[Op] = []
    for op in ops:
        if op.parts:
            parts = halved(op.parts, where)
            if len(parts) == len(op.parts):
                made.append(op)
            else:
                made.append(pair(*(part for part in parts if part.kind != "W")))
                made += [part for part in parts if part.kind == "W"]
        elif op.kind == "B" and (where is None or where(op.stage or 0, op.microbatch or 0)):
            handed = Value("wres", *op[1:4])
            cotangents = [value for value in op.writes if value.name != "g"]
            made.append(_new(Op, ("I", *op[1:6], (*cotangents, handed), *op[7:])))
            params = [value for value in op.reads if value.name == "params"]
            gradients = tuple([value for value in op.writes if value.name == "g"])
            how = op.how if is_exchange(op) else ()
            made.append(_new(Op, ("W", *op[1:5], (*params, handed), gradients, (), how)))
        else:
            made.append(op)
    return made


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
