"""Scale the loss so that small gradients do not vanish in float16, as torch's GradScaler does.

B[1,0] res[1,0]        -->        B[1,0] res[1,0] scale
                                  real[1,1] found[1,1] = UNSCALE sum[1,1] scale
                                  valid[,1] scale[,1] = VALIDATE found[0,1] found[1,1] scale
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from fpipe.program import Op, Output, Program, Value, parts_of
from fpipe.transforms._rewrite import on_parts

Words = tuple[tuple[str, Any], ...]
SCALE = Value("scale")
_SETTINGS = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": 2000}


def words_of_scale(said: Literal["dynamic"] | Mapping[str, float]) -> Words:
    """How a scale goes on, in the words of a VALIDATE."""
    given = {} if said == "dynamic" else said
    if not isinstance(given, Mapping) or not {*given} <= {*_SETTINGS}:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ValueError(f"loss_scale is 'dynamic', or a dict with some of {', '.join(_SETTINGS)}; found {said!r}.")
    odd = next((word for word, value in given.items() if isinstance(value, bool) or not value > 0), None)
    if odd is not None:
        raise ValueError(f"{odd} of loss_scale= is a number above 0; found {given[odd]!r}.")
    return tuple((_SETTINGS | dict(given)).items())


def scaled_backwards(program: Program) -> list[Op]:
    """The ops of a program, of which those read the scale where a gradient of a loss begins."""
    starts = {op.stage for op in parts_of(program.ops) if op.kind == "F" and any(v.name == "loss" for v in op.writes)}

    def scaled(op: Op) -> Op:
        return op._replace(reads=(*op.reads, SCALE)) if op.kind in "BI" and op.stage in starts else op

    return [on_parts(scaled, op) for op in program.ops]


def unscaled(
    gradients: Sequence[Output], after: int, axis: Words, words: Words
) -> tuple[list[Op], list[Output], Value]:
    """Ops that divide gradients by the scale, over replicas too; the gradients then, and whether all are finite."""
    ops, ends, flags = list[Op](), list[Output](), list[Value]()
    for end in gradients:
        stage, port = end.name.stage, end.name.port
        place = (stage, after, None, 0)
        made, found = Value("real", stage, after, port=port), Value("found", stage, after, port=port)
        ops.append(Op("UNSCALE", *place, (end.value, SCALE), (made, found)))
        if axis:
            everywhere = found._replace(name="all_found")
            ops.append(Op("REDUCE", *place, (found,), (everywhere,), (), axis))
        flags.append(ops[-1].writes[-1])
        ends.append(end._replace(value=made))
    valid = Value("valid", None, after)
    home = min(end.name.stage or 0 for end in gradients)
    reads, writes = (*flags, SCALE), (valid, SCALE._replace(microbatch=after))
    ops.append(Op("VALIDATE", home, after, None, 0, reads, writes, (), words))
    return ops, ends, valid
