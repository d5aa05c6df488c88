"""Watch which methods of torch's default generator one thread asks for, by `torch.random` or by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

_torch: Any = torch
_random: Any = torch.random
_NAME = "default_generator"


@contextmanager
def watching(generator: torch.Generator, asked: Callable[[str], None]) -> Generator[None]:
    """Meanwhile `asked` is told the name of each method of torch's default generator that this thread asks for.

    `torch.random` is handed what watches; so is this thread where it asks torch for its generator, and no other, which
    might hand it to an op (2.13: `torch.random.default_generator` and `torch.__getattr__`).
    """
    watched, others = _Watched(generator, asked), vars(torch)["__getattr__"]
    before, own = _random.default_generator, vars(torch).get(_NAME)  # no `own` where one outline is in another

    def found(name: str) -> Any:
        if name != _NAME:
            return others(name)
        return watched if threading.get_ident() == watched.thread else generator

    _random.default_generator, _torch.__getattr__ = watched, found
    _torch.__dict__.pop(_NAME, None)  # other threads find it all the while
    try:
        yield
    finally:
        _random.default_generator = before
        if own is not None:
            setattr(torch, _NAME, own)
        _torch.__getattr__ = others


class _Watched:
    """A generator that tells its thread's questions."""

    def __init__(self, generator: torch.Generator, asked: Callable[[str], None]) -> None:
        self.generator = generator
        self.asked = asked
        self.thread = threading.get_ident()

    def __getattr__(self, name: str) -> Any:
        if threading.get_ident() == self.thread:
            self.asked(name)
        return getattr(self.generator, name)
