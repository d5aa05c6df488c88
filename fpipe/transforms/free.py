"""Drop each value after its last read: the last transform, which makes memory a part of the program.

0F0 1F0 1B0 0B0        -->        0F0 1F0 FREE(y[0,0]) 1B0 FREE(res[1,0]) 0B0 FREE(res[0,0])
"""

from __future__ import annotations

from collections import defaultdict

from fpipe.program import Op, Program, Value
from fpipe.transforms._rewrite import Transform, refuse_freed, transforming


def free() -> Transform:
    """Add a FREE behind the last reader of each value that an op wrote and that is no output.

    >>> import fpipe
    >>> program = fpipe.program(2)
    >>> program.table(comms=True)
    [['0F0', '1F0', '1B0', '0B0']]
    >>> program = fpipe.free()(program)
    >>> program.table(comms=True)
    [['0F0', '1F0', 'FREE(y[0,0])', '1B0', 'FREE(res[1,0])', '0B0', 'FREE(res[0,0])']]
    >>> print(*(op for op in program.ops if op.kind == "FREE"), sep="\\n")
    _ = FREE[1,0] y[0,0] @ 0
    _ = FREE[1,0] res[1,0] @ 0
    _ = FREE[0,0] res[0,0] dx[1,0] @ 0
    """

    @transforming
    def transform(program: Program) -> Program:
        refuse_freed(program)
        kept = {end.value for end in (*program.inputs, *program.outputs)}
        last = last_uses(program)
        dead: defaultdict[int, list[Value]] = defaultdict(list)
        for value, position in last.items():
            if value not in kept and not (value.at and ">" in value.at):
                dead[position].append(value)
        writer = program.writer
        ops: list[Op] = []
        for position, op in enumerate(program.ops):
            ops.append(op)
            ranks: defaultdict[int, list[Value]] = defaultdict(list)
            for value in dead.get(position, ()):
                ranks[program.ops[writer[value]].rank].append(value)
            ops.extend(Op("FREE", *op[1:4], rank, tuple(values), ()) for rank, values in sorted(ranks.items()))
        return Program.trusted(program.inputs, tuple(ops), program.outputs)

    return transform


def last_uses(program: Program) -> dict[Value, int]:
    """The position of the last op that reads each value, or of its writer where nobody does."""
    return {value: position for position, op in enumerate(program.ops) for value in (*op.writes, *op.reads)}
