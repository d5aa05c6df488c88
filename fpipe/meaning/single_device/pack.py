"""Pack documents of any length into microbatches, each one long row without padding.

documents of 2 5 3 2 tokens        --> pack(tokens=6) -->        [2 2] [5] [3]
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import ceil, inf
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.limits import check_whole_number


def pack(rows: Sequence[Any], tokens: int, *, multiple: int = 1) -> list[Any]:
    """Pack rows of any length into microbatches of at most `tokens` tokens, for `split(m, presplit=True)`.

    Rows go, the longest first, into the microbatch with the fewest tokens. Of all numbers of microbatches that are
    multiples of `multiple`, the first with room for all rows is taken.

    Args:
        rows: documents, each a tensor or a dict of tensors whose dim 0 is the document's length, or a pair
            `(inputs, target)` of these. A target may be None.
        tokens: the most tokens of a microbatch.
        multiple: what the number of microbatches is a multiple of, such as the number of ranks.

    Returns:
        A list of microbatches: dicts, or pairs `(dict, target)` if rows are pairs. Tensors are joined to one row,
        `[1, length, ...]`; a plain tensor of inputs is called `input_ids`. A dict also has `cu_seqlens` (int32,
        borders of documents, for varlen kernels), and for each token, `[1, length]`, its `position_ids` in its
        document and its `document_ids`: the document's index in `rows`, which a mask compares.

    Raises:
        ValueError: a row is longer than `tokens` or empty, its tensors have several lengths, rows are of several kinds,
            or too few for `multiple`.
        TypeError: a row holds something else than tensors.

    >>> import torch
    >>> documents = [(torch.full((length,), length), torch.zeros(length)) for length in (2, 5, 3, 2)]
    >>> for inputs, target in pack(documents, tokens=6):
    ...     print(*inputs["input_ids"].tolist(), inputs["cu_seqlens"].tolist(), *inputs["position_ids"].tolist())
    [2, 2, 2, 2] [0, 2, 4] [0, 1, 0, 1]
    [5, 5, 5, 5, 5] [0, 5] [0, 1, 2, 3, 4]
    [3, 3, 3] [0, 3] [0, 1, 2]
    """
    check_whole_number("tokens", tokens, maximum=inf)
    check_whole_number("multiple", multiple)
    flat_rows = [tree.flatten(_name_inputs(row)) for row in rows]
    if not flat_rows:
        raise ValueError("there are no rows to pack.")
    lengths = [_length_of_row(rows, index, tokens) for index in range(len(rows))]
    for index, (leaves, containers) in enumerate(flat_rows):
        first_leaves, first_containers = flat_rows[0]
        if containers != first_containers or [*map(_kind_of, leaves)] != [*map(_kind_of, first_leaves)]:
            raise ValueError(f"row {index} has other names, dtypes or widths than row 0.")
    microbatches: list[Any] = []
    for documents in _assign_rows(lengths, tokens, multiple):
        columns = zip(*(flat_rows[index][0] for index in documents), strict=True)
        leaves = [None if column[0] is None else torch.cat(column)[None] for column in columns]
        joined = tree.unflatten(flat_rows[0][1], leaves)
        inputs = joined[0] if isinstance(joined, tuple) else joined
        device = next(leaf.device for leaf in tree.leaves(inputs))
        inputs |= _describe_documents(documents, [lengths[index] for index in documents], device)
        microbatches.append(joined)
    return microbatches


def _name_inputs(row: Any) -> Any:
    inputs = row[0] if isinstance(row, tuple) and len(row) == 2 else row  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
    inputs = {"input_ids": inputs} if isinstance(inputs, Tensor) else inputs
    if not isinstance(inputs, dict):
        raise TypeError(f"a row is a tensor, dict or pair; found {type(inputs).__name__}.")  # pyright: ignore[reportUnknownArgumentType]
    for name in _DOCUMENT_LEAVES:
        if name in inputs:
            raise ValueError(f"a row has {name!r}, which pack adds.")
    return inputs if inputs is row else (inputs, row[1]) if isinstance(row, tuple) else inputs


_DOCUMENT_LEAVES = ("cu_seqlens", "position_ids", "document_ids")


def _length_of_row(rows: Sequence[Any], index: int, tokens: int) -> int:
    """Return the length of a row, which all of its tensors have."""
    length_by_path = dict[str, int]()
    for path, leaf in tree.paths(rows[index]):
        if leaf is None:
            continue
        if not isinstance(leaf, Tensor) or not leaf.ndim:
            raise TypeError(f"row {index}{path} is no tensor with a length: {leaf!r}.")
        length_by_path[path] = len(leaf)
    lengths = {*length_by_path.values()}
    if len(lengths) != 1:
        raise ValueError(f"row {index} has several lengths: {length_by_path}.")
    (length,) = lengths
    if not 0 < length <= tokens:
        raise ValueError(f"row {index} has {length} tokens, not 1 to {tokens}: cut it.")
    return length


def _kind_of(leaf: Any) -> Any:
    return None if leaf is None else (leaf.dtype, leaf.shape[1:], leaf.device)


def _assign_rows(lengths: Sequence[int], tokens: int, multiple: int) -> list[list[int]]:
    """Return the rows of each microbatch, ascending, in the order of their first rows.

    >>> _assign_rows([2, 5, 3, 2], 6, 1)
    [[0, 3], [1], [2]]
    """
    longest_first = sorted(range(len(lengths)), key=lambda index: -lengths[index])
    count = -(-ceil(sum(lengths) / tokens) // multiple) * multiple
    while count <= len(lengths):
        # A row that does not fit into the emptiest microbatch fits into none: then there have to be more.
        emptiest_first, rows_by_part = [(0, part) for part in range(count)], [list[int]() for _ in range(count)]
        for index in longest_first:
            filled, part = emptiest_first[0]
            if filled + lengths[index] > tokens:
                break
            heapq.heapreplace(emptiest_first, (filled + lengths[index], part))
            rows_by_part[part].append(index)
        else:
            return sorted(map(sorted, rows_by_part))
        count += multiple
    raise ValueError(f"{len(lengths)} rows cannot fill {count} microbatches, a multiple of {multiple}.")


def _describe_documents(documents: Sequence[int], lengths: Sequence[int], device: torch.device) -> dict[str, Tensor]:
    lengths_tensor = torch.tensor(lengths)
    ends = lengths_tensor.cumsum(0)
    borders = torch.cat([ends.new_zeros(1), ends])
    starts = torch.repeat_interleave(borders[:-1], lengths_tensor)
    leaves = (
        borders.to(torch.int32),
        (torch.arange(len(starts)) - starts)[None],
        torch.repeat_interleave(torch.tensor(documents), lengths_tensor)[None],
    )
    return dict(zip(_DOCUMENT_LEAVES, (leaf.to(device) for leaf in leaves), strict=True))
