"""Refuse a program, a model or an example that do not belong together, before anything is made of them."""

from __future__ import annotations

from typing import Any

from fpipe.models import Model, the_model
from fpipe.program import Op, Program, Value, parts_of, the_program
from fpipe.training import program as program_of


def check_match(program: Program, model: Model) -> None:
    """A program is about a model's stages if each reads in it what it takes in the model.

    Raises:
        TypeError: one of them is something else.
        ValueError: they do not belong together; the stage is named.
    """
    the_program(program)
    the_model(model)
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


def check_example(example: Any) -> tuple[Any, Any, Any]:
    """An example is what a step is handed: params, batch, and state if there is one.

    Raises:
        ValueError: it is something else.
    """
    if not isinstance(example, tuple) or len(example) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        found = f"a tuple of {len(example)}" if isinstance(example, tuple) else type(example).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"example is (params, batch) or (params, batch, state), as a step takes them; found {found}.")
    params, batch, state = (*example, None)[:3]  # pyright: ignore[reportUnknownVariableType]
    return params, batch, state  # pyright: ignore[reportUnknownVariableType]
