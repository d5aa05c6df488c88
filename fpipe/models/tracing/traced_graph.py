"""Say what any trace of a whole function shares: what it may not draw, what it does not recompute, its literals, and
what it asked of its sizes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint as checkpoints


class NoGenerators(TorchFunctionMode):
    """Refuses random numbers from a generator, which follow from no key.

    Args:
        who: what errors call the function that is traced.
    """

    def __init__(self, who: str) -> None:
        super().__init__()
        self.who = who

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (kwargs or {}).get("generator") is not None:
            name = getattr(func, "__name__", "")
            raise ValueError(
                f"{self.who} draws from a generator of its own ({name}), which is in no key; draw without it."
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def without_checkpoints() -> Generator[None]:
    """Meanwhile torch.utils.checkpoint calls its function and no more: a program says what recomputes, and of what is
    in two of them a trace would lose the gradient. The old way is refused: a backward within a backward, which no trace
    sees."""

    class Refused:
        @staticmethod
        def apply(*_: Any) -> Any:
            raise ValueError(
                "torch.utils.checkpoint(use_reentrant=True) has a backward that no trace above autograd captures; say "
                "use_reentrant=False, or leave it out and let fpipe.checkpoint() recompute"
            )

    def around(*_: Any, **__: Any) -> Generator[None]:
        yield

    torchs: Any = checkpoints
    before = torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator
    torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator = Refused, around
    try:
        yield
    finally:
        torchs.CheckpointFunction, torchs._checkpoint_without_reentrant_generator = before


def make_literals_pure(graph: fx.Graph) -> None:
    """torch.tensor(4) is traced as a copy that is then detached in place, though nothing is mutated."""
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach_.default):
        (copy,) = node.args
        if isinstance(copy, fx.Node) and copy.target is torch.ops.aten.lift_fresh_copy.default:
            node.replace_all_uses_with(copy)
            graph.erase_node(node)


def asked_of_sizes(sizes: Any) -> tuple[Any, ...]:
    """The conditions on open sizes that the function itself decided by, from the ShapeEnv of its trace.

    What compares the rows of two leaves is told by their having one symbol from then on.
    """
    asked = (sizes.replace(guard.expr) for guard in sizes.guards if _is_its_own(guard))
    return tuple(expr for expr in dict.fromkeys(asked) if expr.free_symbols)


def _is_its_own(guard: Any) -> bool:
    """Whether the function itself asked for a size; torch asks too, to choose a layout, as each stage does again."""
    where = guard.sloc.framework_loc
    return where is None or not Path(where.filename).is_relative_to(Path(torch.__file__).parent)
