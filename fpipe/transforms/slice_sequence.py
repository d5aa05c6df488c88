"""Cut every sequence: an op of a microbatch becomes one for each slice of it (Seq1F1B, TeraPipe).

    0F0 1F0 1B0 0B0        --> slice_sequence(2) -->        0F0.0 0F0.1 1F0.0 1F0.1 1B0.1 1B0.0 0B0.1 0B0.0

A forward hands a `carry` to the next slice of its stage (keys and values, say), a backward hands its gradient back as
`dcarry`; so forwards go up the slices and backwards down. A stage that asks for no carry hands on one without leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

from fpipe.limits import whole
from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, rebuilt, refuse_freed, refuse_sent, refuse_updated, transforming
from fpipe.transforms.specs import batch_spec_text


def slice_sequence(slices: int, *, dim: int = 1, spec: object = None) -> Transform:
    """Cut the sequences of every microbatch into slices that follow each other through the pipeline.

    Results are there per microbatch and slice until `merge` joins them; gradients of inputs it puts together along the
    sequence. In a mean a slice weighs what it has of the sequence's length.

    Args:
        slices: how many. Of n positions in Q slices the first n mod Q get one more.
        dim: the dimension of sequences, in inputs, target and outputs.
        spec: what is sliced how, where that is not enough: `Chunk(dim)`, `Replicate()`, or a prefix tree of them for
            the inputs and the target as a pair.

    Returns:
        A transform. One slice leaves a program as it is.

    Raises:
        ValueError: not a number of slices.
        ProgramError: the program is sliced or merged already, or has pairs or transfers.

    Source: Sun et al. 2024 (Seq1F1B, arXiv 2406.03488), section 3.

    >>> import fpipe
    >>> program = fpipe.split(1)(fpipe.program(2))
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 1B0 0B0
    >>> program = fpipe.slice_sequence(2)(program)
    >>> print(fpipe.plot(program))
    rank 0 | 0F0.0 0F0.1 1F0.0 1F0.1 1B0.1 1B0.0 0B0.1 0B0.0
    >>> print(*(op for op in program.ops if op.kind in "FB" and op.stage == 0), sep="\\n")
    y[0,0.0] carry[0,0.0] res[0,0.0] = F[0,0.0] params[0] x[0,0.0] @ 0
    y[0,0.1] res[0,0.1] = F[0,0.1] params[0] x[0,0.1] carry[0,0.0] @ 0
    dcarry[0,0.1] g[0,0.1] = B[0,0.1] params[0] res[0,0.1] dx[1,0.1] @ 0
    g[0,0.0] = B[0,0.0] params[0] res[0,0.0] dx[1,0.0] dcarry[0,0.1] @ 0
    """
    whole("slices", slices)
    if type(dim) is not int:
        raise ValueError(f"dim is the dimension of sequences, a whole number; found {dim!r}.")
    how: tuple[tuple[str, object], ...] = (("slices", slices),)
    how += (("dim", dim),) if dim != 1 else ()
    how += (("sequence", batch_spec_text(spec)),) if spec is not None else ()

    @transforming
    def transform(program: Program) -> Program:
        if slices == 1:
            return program
        _refuse(program)
        ops = [of_slice for op in program.ops for of_slice in _slice_op(op, slices, how)]
        outputs = tuple(of_slice for end in program.outputs for of_slice in _slice_output(end, slices))
        return rebuilt(program, ops, outputs=outputs)

    return transform


def _refuse(program: Program) -> None:
    refuse_freed(program)
    refuse_updated(program, "slice_sequence")
    kinds = {op.kind for op in program.ops}
    if program.slices > 1:
        raise ProgramError(f"this program has {program.slices} slices already; slice it once.")
    if "SPLIT" not in kinds:
        raise ProgramError("slices are parts of microbatches: put fpipe.split() before, if only split(1).")
    if "PAIR" in kinds:
        raise ProgramError("this program has pairs, which are of whole microbatches; slice it before it is paired.")
    refuse_sent(program, "slice_sequence")
    if any(end.name.microbatch is None and end.name.name != "state" for end in program.outputs):
        raise ProgramError(
            "this program is merged already, and what is added in which order is fixed: slice it before "
            "fpipe.merge(), as by fpipe.split(8, slices=4)."
        )


def _slice_op(op: Op, slices: int, how: tuple[tuple[str, object], ...]) -> Iterator[Op]:
    """Copy an op for each slice: forwards up, backwards down."""
    for k in reversed(range(slices)) if op.kind in "BIW" else range(slices):
        reads = [_of_slice(value, k) if value.name != "state" else _state(value, op, k, slices) for value in op.reads]
        writes = [_of_slice(value, k) for value in op.writes]
        if op.kind in "FR" and k:
            reads.append(Value("carry", op.stage, op.microbatch, k - 1))
        if op.kind in "BI" and k < slices - 1:
            reads.append(Value("dcarry", op.stage, op.microbatch, k + 1))
        if op.kind == "F" and k < slices - 1:
            _insert(writes, Value("carry", op.stage, op.microbatch, k), "res")
        if op.kind in "BI" and k:
            _insert(writes, Value("dcarry", op.stage, op.microbatch, k), "g", "wres")
        how_of_op = (*op.how, *how) if op.kind == "SPLIT" else op.how
        yield Op(*op[:3], k, op.rank, tuple(reads), tuple(writes), (), how_of_op)


def _of_slice(value: Value, k: int) -> Value:
    return value if value.microbatch is None else value._replace(slice=k)


def _state(value: Value, op: Op, k: int, slices: int) -> Value:
    """The module state that a slice reads: that of the slice before, or of the last one of the microbatch before."""
    return value._replace(microbatch=op.microbatch, slice=k - 1) if k else _of_slice(value, slices - 1)


def _insert(writes: list[Value], value: Value, *before: str) -> None:
    """Insert a value in front of the first that has one of these names, or at the end."""
    place = next((place for place, written in enumerate(writes) if written.name in before), len(writes))
    writes.insert(place, value)


def _slice_output(end: Output, slices: int) -> Iterator[Output]:
    """Copy a result for each slice; of a module state only the last."""
    if end.name.microbatch is None:
        yield end._replace(value=_of_slice(end.value, slices - 1))
    else:
        for k in range(slices):
            yield end._replace(name=_of_slice(end.name, k), value=_of_slice(end.value, k))
