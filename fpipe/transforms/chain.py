"""The only glue: transforms one after the other are a transform."""

from __future__ import annotations

from fpipe.program import Program
from fpipe.transforms._rewrite import Transform, transforming


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
