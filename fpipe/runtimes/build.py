"""Bind a program to a model: the step that trains."""

from __future__ import annotations

from typing import Any, Literal

from fpipe.models import Model
from fpipe.program import Op, Program, Value, parts_of, the_program
from fpipe.runtimes.local import local
from fpipe.runtimes.walk import Step
from fpipe.training import program as program_of


def build(
    program: Program,
    model: Model,
    *,
    runtime: Literal["local"] = "local",
    trace: bool = True,
    example: tuple[Any, ...] | None = None,
    record: bool = False,
    check_finite: bool = False,
) -> Step:
    """Make a pure step of a program and a model.

    Args:
        program: what to do, in which order.
        model: the stages it is about.
        runtime: "local" walks the program in this process.
        trace: trace each stage once per signature (shapes, dtypes, strides), so that its Python runs no more, and cut
            its gradient into F, I and W. A stage that cannot be traced runs under autograd, with a warning; its I then
            computes what W hands over. False runs every stage so.
        example: `(params, batch)` or `(params, batch, state)` to trace for at once, tensors or on the meta device;
            without it the first step of each signature does.
        record: also return when each op ran and the most bytes each rank held, as `Result.timeline`.
        check_finite: raise `FloatingPointError` at the first op that writes NaN or an infinite number.

    Returns:
        `step(params, batch, *, state=None, key=None) -> Result`. It changes nothing that it is given.

    Raises:
        ValueError: the program is not one of this model, or the runtime is not known.

    >>> import fpipe, torch
    >>> model = fpipe.from_functions([lambda p, x: x * p["w"]], loss=lambda y, t: ((y - t) ** 2).mean())
    >>> program = fpipe.chain(fpipe.split(2), fpipe.schedules.gpipe(1), fpipe.merge())(fpipe.program(model))
    >>> step = fpipe.build(program, model)
    >>> result = step(({"w": torch.tensor(3.0)},), (torch.tensor([1.0, 2.0]), torch.tensor([0.0, 0.0])))
    >>> result.loss.item(), result.grads[0]["w"].item()
    (22.5, 15.0)
    """
    if runtime != "local":
        raise ValueError(f"runtime {runtime!r} is not known; there is 'local'.")
    _check_match(the_program(program), model)
    return local(program, model, trace=trace, example=example, record=record, check_finite=check_finite)


def _check_match(program: Program, model: Model) -> None:
    if not isinstance(model, Model):
        raise TypeError(f"a Model is wanted, as from_functions makes it; found {type(model).__name__}.")
    if program.stages != len(model.stages):
        raise ValueError(
            f"the program has {program.stages} stages and the model {len(model.stages)}; start from "
            f"fpipe.program(model)."
        )
    wanted = {(op.kind, op.stage): _read(op) for op in program_of(model).ops}
    for op in parts_of(program.ops):
        mine = wanted.get(("B" if op.kind == "I" else op.kind, op.stage))
        if op.kind in "FBI" and mine is not None and mine != _read(op):
            raise ValueError(
                f"stage {op.stage} of the model takes {' '.join(mine)}, in the program {op.cell} takes "
                f"{' '.join(_read(op))}; start from fpipe.program(model)."
            )


def _read(op: Op) -> list[str]:
    """What an op reads, whichever the microbatch and wherever the copy; not what a SPLIT or a slice adds."""
    words = {"x": "inputs", "t": "target"}
    whole = (value._replace(microbatch=None, slice=None, at="") for value in op.reads)
    named = (Value(words[v.name]) if v.name in words else v for v in whole)
    return [str(value) for value in named if value.name not in ("carry", "dcarry", "w")]
