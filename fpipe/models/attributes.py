"""Notice a tensor that a module holds in a plain attribute and changes as it runs: it is state that nobody was told of.

self.mean = 0.9 * self.mean + x.mean(0)          reads it, and writes another        --> refused
self.mean.lerp_(x.mean(0), 0.1)                  changes it                          --> refused
self.last = x        self.pe = self.pe.to(x)     only writes; only moves it          --> left alone
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fpipe import tree


class Attributes:
    """The tensors that modules hold as plain attributes, to tell afterwards which of them are state."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        self.held = [
            (path, module, name, value, value._version)
            for path, module in modules
            for name, value in vars(module).items()
            if isinstance(value, Tensor) and not value.is_inference()
        ]

    @contextmanager
    def watched(self, who: str) -> Generator[None]:
        """While it lasts the modules run.

        Raises:
            RuntimeError: one is read, and another is in its place now, or it is changed in place.
        """
        if not self.held:
            yield
            return
        with _Reads([value for _, _, _, value, _ in self.held]) as reads:
            yield
        for place, (path, module, name, value, version) in enumerate(self.held):
            now = vars(module).get(name)
            another = now is not value and place in reads.read and id(now) not in reads.places
            if another or value._version != version:
                vars(module)[name] = value
                raise RuntimeError(
                    f"{who} changes {name!r} of module {path!r} ({type(module).__name__}) as it runs, a tensor that is "
                    f"no buffer: what a module remembers is state. Say self.register_buffer({name!r}, ...)."
                )


class _Reads(TorchDispatchMode):
    """Which of some tensors torch computes with. What is only moved, cast or detached is the same tensor still.

    A mode for torch's functions would show it too, but where one is on attention leaves its fast path: other bits.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self.read: set[int] = set()
        self.kept: list[Tensor] = []  # so that no other gets its id

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        found = {self.places[id(leaf)] for leaf in tree.leaves((args, kwargs)) if id(leaf) in self.places}
        if found and func in _SAME:
            self.places[id(made)] = found.pop()
            self.kept.append(made)
        self.read |= found
        return made


_aten: Any = torch.ops.aten
_SAME = (_aten._to_copy.default, _aten.detach.default, _aten.alias.default)
