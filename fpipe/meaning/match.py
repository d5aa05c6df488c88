"""Refuse a program, a model or an example that do not belong together, before anything is made of them."""

from __future__ import annotations

from typing import Any

from fpipe.meaning.optimizers.optimizer_state import check_update
from fpipe.meaning.single_device.batches import refuse_meta
from fpipe.model import Model, the_model
from fpipe.positional_stage import PositionalStage
from fpipe.program import Op, Program, Value, parts_of, the_program
from fpipe.training import program as program_of


def check_match(program: Program, model: Model) -> None:
    """Refuse a program in which a stage reads or gives other values than in the model; the error names the stage."""
    the_program(program)
    the_model(model)
    if program.stages != len(model.stages):
        raise ValueError(
            f"the program has {program.stages} stages and the model {len(model.stages)}; start from "
            f"fpipe.program(model)."
        )
    own = {(op.kind, op.stage): (op, _read(op)) for op in program_of(model).ops}
    judged = any(value.name == "loss" for op in parts_of(program.ops) for value in op.writes)
    for op in parts_of(program.ops):
        mine, taken = own.get(("B" if op.kind == "I" else op.kind, op.stage), (None, []))
        if mine is None:
            continue
        if op.kind in "FBI" and taken != (found := _read(op)):
            raise ValueError(
                f"stage {op.stage} of the model takes {' '.join(map(str, taken))}, in the program {op.cell} takes "
                f"{' '.join(map(str, found))}; start from fpipe.program(model)."
            )
        gives, written = ({value.name for value in each.writes} & _BESIDE for each in (mine, op))
        if op.kind == "F" and not (gives if judged else set()) <= written <= gives:
            found, wanted = (" and ".join(sorted(names, reverse=True)) or "no loss" for names in (written, gives))
            raise ValueError(
                f"stage {op.stage} of the model gives {wanted}, in the program {op.cell} gives {found}; start from "
                "fpipe.program(model)."
            )
    of_modules = all(stage.names is not None for stage in model.stages)
    check_update(program, [leaf[0] for stage in model.stages for leaf in stage.names or ()] if of_modules else None)
    _refuse_mixed_rows(program, model)


def refuse_lost_constants(model: Model) -> None:
    """A ValueError for what stages read besides parameters and state, and has no values."""
    nets = [stage.forward for stage in model.stages if isinstance(stage.forward, PositionalStage)]
    for net in nets:
        held = dict(zip(net.fixed, net.constants(), strict=True))
        refuse_meta('give it some before the net is cut, or make it with device="cpu" in the constructor', net=held)


def _refuse_mixed_rows(program: Program, model: Model) -> None:
    """Gradients of single rows are put one behind the other, and others are added up; rows are those of dim 0."""
    joined = next((op for op in program.ops if op.kind == "MERGE" and op.writes[0].name == "rows"), None)
    if joined is not None and not model.per_example:
        raise ValueError(
            'merge(grads="rows") is for gradients of single rows; build it with the model that fpipe.per_example made, '
            "or merge() without it."
        )
    for op in parts_of(program.ops) if model.per_example else ():
        added = {value.microbatch for value in op.reads if value.name in ("g", "sum")}
        if op.kind == "ADD" and len(added) > 1:
            raise ValueError(
                f"{op.writes[0]} adds gradients of single rows, which are of others in each microbatch: say "
                'merge(grads="rows").'
            )
        if op.kind in ("REDUCE", "SCATTER"):
            door = "shard" if any(one.kind == "GATHER" for one in program.ops) else "data_parallel"
            raise ValueError(
                f"{op.writes[0]} adds up over replicas, whose single rows are not the same: leave {door} out, clip and "
                "add up the rows of each replica, and all-reduce that sum."
            )
        if op.kind == "SPLIT" and (odd := next((word for word, _ in op.how if word in ("spec", "slices")), None)):
            found = "slices of sequences" if odd == "slices" else f"the spec {dict(op.how)[odd]}"
            raise ValueError(f"per_example takes rows of dim 0 apart, of whole sequences; found {found} in split().")


def _read(op: Op) -> list[Value]:
    """Reads of an op, whichever the microbatch and copy, without what a SPLIT, a slice or a loss scale adds."""
    return [
        Value(_WHOLE[value.name]) if value.name in _WHOLE else Value(value.name, value.stage, port=value.port)
        for value in op.reads
        if value.name not in ("carry", "dcarry", "w", "scale")
    ]


_WHOLE = {"x": "inputs", "t": "target"}
_BESIDE = {"loss", "count", "aux"}  # a program without a loss may leave them out


def check_example(example: Any) -> tuple[Any, Any, Any]:
    """The params, batch, and state of an example, if it has one; a ValueError for anything else."""
    if not isinstance(example, tuple) or len(example) not in (2, 3):  # pyright: ignore[reportUnknownArgumentType]
        found = f"a tuple of {len(example)}" if isinstance(example, tuple) else type(example).__name__  # pyright: ignore[reportUnknownArgumentType]
        raise ValueError(f"example is (params, batch) or (params, batch, state), as a step takes them; found {found}.")
    params, batch, state = (*example, None)[:3]  # pyright: ignore[reportUnknownVariableType]
    return params, batch, state  # pyright: ignore[reportUnknownVariableType]
