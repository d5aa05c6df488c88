"""Choose the program of a step by the number of microbatches in its batch.

lambda m: program        --> step(params, [a, b, c]) -->        the step of program(3), built at its first call
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, cast

from fpipe.meaning.single_device.result import Result
from fpipe.meaning.step import Step
from fpipe.program import Program, require_program

ProgramOfCount = Callable[[int], Program]
"""A function that returns the program for a number of microbatches."""

MOST_COUNTS = 128


def count_microbatches(batch: Any) -> int:
    """Return the number of microbatches of a batch that is cut already; 0 for None, or a pair of None.

    >>> count_microbatches([("x0", "t0"), ("x1", "t1")]), count_microbatches((["x0"], None)), count_microbatches(None)
    (2, 1, 0)
    """
    if isinstance(batch, list):
        return len(batch)  # pyright: ignore[reportUnknownArgumentType]
    streams: Any = (None, None) if batch is None else batch
    is_pair = isinstance(streams, tuple) and len(streams) == 2  # pyright: ignore[reportUnknownArgumentType]
    if not is_pair or not all(stream is None or isinstance(stream, list | tuple) for stream in streams):
        raise ValueError(f"a batch is a list of pairs (inputs, target); found {type(batch).__name__}.")
    return max(0 if stream is None else len(stream) for stream in streams)


def program_of_count(make_program: ProgramOfCount, count: int) -> Program:
    """Return the program for a number of microbatches.

    Raises:
        ValueError: it is not split into so many, or cuts the batch itself.
    """
    if not count:
        raise ValueError("the batch has no microbatches.")
    program = require_program(make_program(count))
    split_settings = next((dict(op.options) for op in program.ops if op.kind == "SPLIT"), {})
    if program.microbatches != count:
        raise ValueError(f"the function made a program of {program.microbatches} microbatches, not {count}.")
    if "presplit" not in split_settings:
        raise ValueError("the program cuts the batch: say split(m, presplit=True).")
    return program


def build_by_count(make_program: ProgramOfCount, build_program: Callable[[Program], Step], example_count: int) -> Step:
    """Return a step that runs the program of its batch's number of microbatches.

    Args:
        make_program: returns the program for a number.
        build_program: builds the step of one program.
        example_count: the number whose step is built at once; 0 for none.
    """

    @lru_cache(MOST_COUNTS)
    def step_of(count: int) -> Step:
        return build_program(program_of_count(make_program, count))

    def step(params: Sequence[Any], batch: Any, *args: Any, **kwargs: Any) -> Result:
        return step_of(count_microbatches(batch))(params, batch, *args, **kwargs)

    if example_count:
        step_of(example_count)
    return cast("Step", step)
