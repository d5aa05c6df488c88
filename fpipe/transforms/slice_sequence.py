"""Cut sequences into slices: each op of a microbatch becomes one op a slice (Seq1F1B, TeraPipe).

    0F0 1F0 1B0 0B0        --> slice_sequence(2) -->        0F0.0 0F0.1 1F0.0 1F0.1 1B0.1 1B0.0 0B0.1 0B0.0

A forward hands a `carry` to the next slice of its stage (keys and values, say), a backward hands its gradient back as
`dcarry`; so forwards go up the slices and backwards down. A stage that asks for no carry hands on one without leaves.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fpipe.limits import check_whole_number
from fpipe.program import Op, Output, Program, ProgramError, Value
from fpipe.transforms._rewrite import Transform, as_transform, rebuild, refuse_freed, refuse_transfers, refuse_updated
from fpipe.transforms.specs import batch_spec_text


def slice_sequence(
    slices: int | None = None, *, sizes: Sequence[int] | None = None, dim: int = 1, spec: object = None
) -> Transform:
    """Cut the sequences of every microbatch into slices that follow each other through the pipeline.

    Results stay per microbatch and slice until `merge` joins them; it concatenates gradients of inputs along the
    sequence. In a mean a slice weighs its share of the sequence's length.

    Args:
        slices: how many. Of n positions in Q slices the first n mod Q get one more.
        sizes: instead, how many positions each slice has: a later slice of causal attention computes more for each of
            its positions, so that slices which get shorter take equally long.
        dim: the dimension of sequences, in inputs, target and outputs.
        spec: what is sliced how, where that is not enough: `Chunk(dim)`, `Replicate()`, or a prefix tree of them for
            the inputs and the target as a pair.

    Returns:
        A transform. One slice leaves a program as it is.

    Raises:
        ValueError: not a number of slices. A step refuses sequences of another length than the sum of the sizes.
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
    if (slices is None) == (sizes is None):
        raise ValueError("say either slice_sequence(2) or slice_sequence(sizes=[5, 3]).")
    sizes = tuple(check_whole_number("a size", size) for size in sizes or ())
    slices = check_whole_number("slices", len(sizes) if slices is None else slices)
    options: tuple[tuple[str, object], ...] = (("slices", slices),)
    options += (("sizes", sizes),) if sizes else ()
    options += (("dim", dim),) if dim != 1 else ()
    options += (("sequence", batch_spec_text(spec)),) if spec is not None else ()

    @as_transform
    def transform(program: Program) -> Program:
        if slices == 1:
            return program
        _refuse(program)
        ops = [slice_op for op in program.ops for slice_op in _slice_op(op, slices, options)]
        outputs = tuple(part for output in program.outputs for part in _slice_output(output, slices))
        return rebuild(program, ops, outputs=outputs)

    return transform


def _refuse(program: Program) -> None:
    refuse_freed(program)
    refuse_updated(program, "slice_sequence")
    kinds = {op.kind for op in program.ops}
    if program.slices > 1:
        raise ProgramError(f"this program has {program.slices} slices already; slice it once.")
    if "SPLIT" not in kinds:
        raise ProgramError("put fpipe.split(), at least split(1), before slices.")
    if "PAIR" in kinds:
        raise ProgramError("this program has pairs already; slice it before.")
    refuse_transfers(program, "slice_sequence")
    if any(output.name.microbatch is None and output.name.name != "state" for output in program.outputs):
        raise ProgramError(
            "this program is merged already: slice it before fpipe.merge(), as by fpipe.split(8, slices=4)."
        )


def _slice_op(op: Op, slices: int, options: tuple[tuple[str, object], ...]) -> Iterator[Op]:
    """Yield an op for each slice: forwards ascending, backwards descending."""
    # Slice k attends to the keys and values of slices 0..k, its carry. So the gradient of that carry comes from the
    # backward of slice k+1, and the last slice's backward runs first.
    for k in reversed(range(slices)) if op.kind in "BIW" else range(slices):
        reads = [
            _value_of_slice(value, k) if value.name != "state" else _state_of_slice(value, op, k, slices)
            for value in op.reads
        ]
        writes = [_value_of_slice(value, k) for value in op.writes]
        if op.kind in "FR" and k:
            reads.append(Value("carry", op.stage, op.microbatch, k - 1))
        if op.kind in "BI" and k < slices - 1:
            reads.append(Value("dcarry", op.stage, op.microbatch, k + 1))
        if op.kind == "F" and k < slices - 1:
            _insert_before(writes, Value("carry", op.stage, op.microbatch, k), "res")
        if op.kind in "BI" and k:
            _insert_before(writes, Value("dcarry", op.stage, op.microbatch, k), "g", "wres")
        op_options = (*op.options, *options) if op.kind == "SPLIT" else op.options
        yield Op(*op[:3], k, op.rank, tuple(reads), tuple(writes), (), op_options)


def _value_of_slice(value: Value, k: int) -> Value:
    return value if value.microbatch is None else value._replace(slice=k)


def _state_of_slice(value: Value, op: Op, k: int, slices: int) -> Value:
    """Return the module state that a slice reads: of the previous slice, or microbatch."""
    return value._replace(microbatch=op.microbatch, slice=k - 1) if k else _value_of_slice(value, slices - 1)


def _insert_before(writes: list[Value], value: Value, *names: str) -> None:
    # The order of an op's writes is its signature: residuals and gradients come last.
    index = next((index for index, write in enumerate(writes) if write.name in names), len(writes))
    writes.insert(index, value)


def _slice_output(output: Output, slices: int) -> Iterator[Output]:
    """Yield a result for each slice; of a module state only the last."""
    if output.name.microbatch is None:
        yield output._replace(value=_value_of_slice(output.value, slices - 1))
    else:
        for k in range(slices):
            yield output._replace(name=_value_of_slice(output.name, k), value=_value_of_slice(output.value, k))
