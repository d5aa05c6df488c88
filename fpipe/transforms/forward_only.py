"""Evaluate: keep what the outputs and the loss need, and drop everything that is there for gradients.

    0F0 1F0 1R0 1B0 0R0 0B0        --> forward_only() -->        0F0 1F0

The forwards that are left run the same graphs as in training, so their bits are those of the training step.
"""

from __future__ import annotations

from fpipe.program import Op, Output, Program, ProgramError, Value, is_exchange, pair
from fpipe.transforms._rewrite import Transform, rebuilt, transforming


def forward_only() -> Transform:
    """Drop gradients, and all ops and values that only they need: backwards, recomputes, sums, residuals.

    Module state is not written. Before or after a schedule, the program is the same.

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
    """The program with only what its results need: from the end up, an op stays if somebody wants what it writes."""
    wanted = {end.value for end in ends}
    kept: list[Op] = []
    for op in reversed(program.ops):
        parts = [part for part in (_useful(part, wanted) for part in op.parts or (op,)) if part]
        if parts:
            op = pair(*parts) if len(parts) > 1 else parts[0]
            wanted.update(op.reads)
            kept.append(op)
    inputs = tuple(end for end in program.inputs if end.value in wanted)
    return rebuilt(program, kept[::-1], inputs=inputs, outputs=ends)


def _useful(op: Op, wanted: set[Value]) -> Op | None:
    """The op with what is wanted of its writes; None if nothing is."""
    writes = tuple(value for value in op.writes if value in wanted)
    again = op.kind == "F" and not is_exchange(op)  # how it was to be computed again
    how = () if again else op.how
    return op._replace(writes=writes, how=how) if writes else None
