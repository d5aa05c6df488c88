"""Bind a program to a model: the step that trains."""

from __future__ import annotations

from typing import Literal

from fpipe.models import Model
from fpipe.program import Program
from fpipe.runtimes.local import Step, local
from fpipe.training import program as program_of


def build(
    program: Program,
    model: Model,
    *,
    runtime: Literal["local"] = "local",
    record: bool = False,
    check_finite: bool = False,
) -> Step:
    """Make a pure step of a program and a model.

    Args:
        program: what to do, in which order.
        model: the stages it is about.
        runtime: "local" walks the program in this process.
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
    _check_match(program, model)
    return local(program, model, record=record, check_finite=check_finite)


def _check_match(program: Program, model: Model) -> None:
    if program.stages != len(model.stages):
        raise ValueError(
            f"the program has {program.stages} stages and the model {len(model.stages)}; start from "
            f"fpipe.program(model)."
        )
    odd = {end.value for end in program_of(model).inputs} ^ {end.value for end in program.inputs}
    if odd:
        named = ", ".join(sorted(map(str, odd)))
        raise ValueError(f"the program and the model differ in {named}; start from fpipe.program(model).")
