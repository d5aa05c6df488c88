"""Cut the batch: one training step becomes one for each microbatch.

    0F0 1F0 1B0 0B0        --> split(2) -->        0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1

Each stage that takes from the batch gets a SPLIT of its own, which writes its slice; where there is a loss, it also
writes the microbatch's weight in the mean. Sizes are fixed only when a step sees a batch: the first n mod m of n rows
in m microbatches are one larger. Nothing is joined: every result is there per microbatch until `merge` joins it.
"""

from __future__ import annotations

import math

from fpipe.limits import LARGEST_SIZE, MOST_OPS, whole
from fpipe.program import Program, ProgramError, kind_of
from fpipe.transforms._copies import copies
from fpipe.transforms._rewrite import Transform, rebuilt, refuse_updated, transforming
from fpipe.transforms.slice_sequence import slice_sequence
from fpipe.transforms.specs import batch_spec_text


def split(
    microbatches: int | None = None,
    spec: object = None,
    *,
    size: int | None = None,
    rows: int | None = None,
    allow_fewer: bool = False,
    slices: int = 1,
    presplit: bool = False,
) -> Transform:
    """Cut the batch into microbatches.

    Args:
        microbatches: how many.
        spec: how leaves are cut: None (rows of dim 0; scalars and non-tensors go to every microbatch), `Chunk(dim)`,
            `Replicate()`, a function of a leaf that says one of these and has a name (`register_spec`), or a prefix
            tree of them for the inputs and the target as a pair.
        size: rows of a microbatch, instead of their number; needs `rows`.
        rows: rows of a batch, if they are known.
        allow_fewer: with `rows`, make at most one microbatch per row instead of refusing.
        slices: how many slices the sequences (dim 1) of each microbatch are cut into; `slice_sequence` says more.
        presplit: whether the batch is cut already: a step then takes two streams `(inputs, target)`, each a list with
            an entry for each microbatch, or a list of pairs. Their shapes may differ.

    Raises:
        ValueError: neither or both of `microbatches` and `size`; fewer rows than microbatches; not positive.
        ProgramError: the program is split already, is on several ranks, or frees its values.

    >>> import fpipe
    >>> program = fpipe.program(2)
    >>> print(fpipe.plot(program))
    rank 0 | 0F0 1F0 1B0 0B0
    >>> print(fpipe.plot(fpipe.split(2)(program)))
    rank 0 | 0F0 1F0 1B0 0B0 0F1 1F1 1B1 0B1
    """
    many, how = _sizes(microbatches, size, rows, allow_fewer)
    sliced = slice_sequence(slices)
    if spec is not None:
        how = (*how, ("spec", batch_spec_text(spec)))
    if presplit:
        if size is not None or rows is not None:
            raise ValueError("microbatches that are cut already have their own rows: say presplit=True without rows=.")
        how = (*how, ("presplit", True))

    @transforming
    def transform(program: Program) -> Program:
        refuse_updated(program, "split")
        if any(op.kind == "SPLIT" for op in program.ops) or program.microbatches > 1:
            raise ProgramError(
                f"this program is split into {program.microbatches} microbatches already; split it once."
            )
        if any(kind_of(op.kind).lane != "main" for op in program.ops):
            raise ProgramError("this program has its transfers already; put fpipe.split() before fpipe.communicate().")
        if program.ranks > 1 or any(op.parts for op in program.ops):
            raise ProgramError(
                f"this program has an order of its own already, on {program.ranks} ranks: its microbatches would "
                "follow each other and overlap nowhere. Put fpipe.split() before fpipe.place() and the schedule."
            )
        if len(program.ops) * many * slices > MOST_OPS:
            each = len(program.ops) * slices
            raise ProgramError(f"{many} microbatches of {each} ops are more than the {MOST_OPS} ops of a program.")
        ops, outputs, sources = copies(program, many, how)
        if all(kind_of(op.kind).time for op in program.ops):  # each copy is in order, and they follow each other
            return sliced(Program.trusted(program.inputs, tuple(ops), outputs, sources))
        return sliced(rebuilt(program, ops, outputs=outputs, sources=sources))

    return transform


def _sizes(
    count: int | None, size: int | None, rows: int | None, allow_fewer: bool
) -> tuple[int, tuple[tuple[str, object], ...]]:
    if (count is None) == (size is None):
        raise ValueError("say either the number of microbatches, split(8), or their size, split(size=4, rows=32).")
    for word, given in (("microbatches", count), ("size", size), ("rows", rows)):
        if given is not None:
            whole(word, given, most=LARGEST_SIZE if word == "microbatches" else math.inf)
    if size is not None:
        if rows is None:
            raise ValueError(
                f"split(size={size}) needs rows=, the rows of a batch: a program has a fixed number of ops."
            )
        return -(-rows // size), (("size", size),)
    assert count is not None
    if allow_fewer and rows is None:
        raise ValueError("allow_fewer needs rows=, the rows of a batch: a program has a fixed number of ops.")
    if rows is not None and rows < count:
        if not allow_fewer:
            raise ValueError(f"{rows} rows cannot fill {count} microbatches; use at most {rows}, or allow_fewer=True.")
        count = rows
    return count, ()
