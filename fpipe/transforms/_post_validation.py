"""Know programs whose updates do not wait for the norm that clips them, and let them wait."""

from __future__ import annotations

from fpipe.program import Op, Program, Value
from fpipe.transforms._rewrite import rebuilt
from fpipe.transforms.communicate import communicate, without_frees


def is_post_validated(program: Program) -> bool:
    """Whether its updates do not wait for the norm that clips them."""
    if "post_validated" not in program.__dict__:
        checked = any(op.kind == "VALIDATE" and op.reads[0].name == "norm" for op in program.ops)
        updates = (op for op in program.ops if op.kind == "UPDATE")
        program.__dict__["post_validated"] = checked and not any(
            value.name == "norm" for op in updates for value in op.reads
        )
    return program.__dict__["post_validated"]


def behind_norms(program: Program) -> Program:
    """Steps whose updates wait for their norms, else as they are."""
    bare = Program.trusted(program.inputs, without_frees(program), program.outputs)
    waiting = rebuilt(bare, [_behind_its_norm(op) for op in bare.ops])
    return communicate()(waiting) if any(op.kind == "SEND" for op in program.ops) else waiting


def _behind_its_norm(op: Op) -> Op:
    if op.kind != "UPDATE":
        return op
    return op._replace(reads=(*op.reads[:3], Value("norm", None, op.microbatch), *op.reads[3:]))
