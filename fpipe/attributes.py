"""Notice a tensor that a module holds in a plain attribute and changes as it runs: it is state that nobody was told of.

self.mean = 0.9 * self.mean + x.mean(0)          reads it, and writes another        --> refused
self.mean.lerp_(x.mean(0), 0.1)                  changes it                          --> refused
self.last = x        self.pe = self.pe.to(x)     only writes; only moves it          --> left alone
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fpipe.tapes import METADATA, word_of


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


class _Reads(TorchFunctionMode):
    """Which of some tensors torch computes with. What is only moved, cast or detached is the same tensor still."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.places = {id(tensor): place for place, tensor in enumerate(tensors)}
        self.read: set[int] = set()
        self.kept: list[Tensor] = []  # so that no other gets its id

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        given = [*args, *(kwargs or {}).values()]
        given += [inner for one in given if isinstance(one, list | tuple) for inner in one]  # cat, stack
        found = {self.places[id(one)] for one in given if id(one) in self.places}
        word = word_of(func) if found else ""
        if word in _SAME and isinstance(made, Tensor) and id(given[0]) in self.places:
            self.places[id(made)] = self.places[id(given[0])]
            self.kept.append(made)
        elif word not in METADATA:
            self.read |= found
        return made


_SAME = ("to", "cpu", "cuda", "float", "double", "half", "bfloat16", "type", "type_as", "detach", "contiguous")
