"""Read from a program in which dtypes it computes and adds up, so that plain autograd can do so too.

GATHER {cast='bfloat16'}  SCATTER {cast='float32'}        -->        params.bfloat16(),  grads.float() before a sum
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fpipe import tree
from fpipe.program import Program
from fpipe.runtimes.definition.meaning import cast_of

Cast = Callable[[Any], Any]


def cast_by(program: Program, kind: str) -> Cast:
    """The cast that the program's GATHERs, or SCATTERs, make of each leaf: one for all of them."""
    op = next((op for op in program.ops if op.kind == kind), None)
    return _itself if op is None else cast_of(op)


def like_params(params: Sequence[Any], grads: Any) -> Any:
    """Gradients in the dtypes of their parameters."""
    leaves, spec = tree.flatten(grads)
    dtypes = [getattr(leaf, "dtype", None) for leaf in tree.leaves(params)]
    return tree.unflatten(spec, [*map(_in, leaves, dtypes)])


def computed(program: Program, params: Sequence[Any]) -> tuple[Any, ...]:
    """Parameters as the program computes with them."""
    return tuple(tree.tree_map(cast_by(program, "GATHER"), stage) for stage in params)


def _itself(leaf: Any) -> Any:
    return leaf


def _in(leaf: Any, dtype: torch.dtype | None) -> Any:
    return leaf if dtype is None or not isinstance(leaf, Tensor) else leaf.to(dtype)
