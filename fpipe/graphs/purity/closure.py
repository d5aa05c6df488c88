"""Find the tensors and modules that a function closes over, by name: through functions and containers, not objects."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

from fpipe.graphs.purity.alike import content_of, named_in
from fpipe.graphs.purity.attributes import Modules
from fpipe.positional_stage import PositionalStage


def closed_over(function: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a function closes over, with those of the modules that it does, each by a name."""
    for name, one in _reached(function):
        if isinstance(one, nn.Module):
            yield from ((f"{name}.{path}", leaf) for path, leaf in (*one.named_buffers(), *one.named_parameters()))
        elif isinstance(one, Tensor):
            yield name, one


def modules_of(function: Any) -> Modules:
    """The modules that a function closes over or names, with those inside.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> [path for path, _ in modules_of(lambda x: net(x))]
    ['net', 'net.0']
    """
    found: dict[nn.Module, str] = {}
    if isinstance(function, PositionalStage):
        return function.modules
    for name, one in _reached(function):
        for path, module in one.named_modules() if isinstance(one, nn.Module) else ():
            found.setdefault(module, f"{name}.{path}" if path else name)
    return [(path, module) for module, path in found.items()]


def _reached(function: Any) -> Iterator[tuple[str, Any]]:
    """Values that a function closes over or names: through other functions and containers, and not through objects."""
    seen: dict[int, Any] = {}  # the objects too, so that none that is made meanwhile has the id of another
    todo: list[tuple[str, Any]] = [("it", function)]
    while todo:
        name, one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, Tensor | nn.Module):
            yield name, one
        elif isinstance(one, FunctionType):
            if one.__module__ and one.__module__.partition(".")[0] not in ("torch", *sys.stdlib_module_names):
                code, around = one.__code__, one.__globals__
                todo += [(word, around[word]) for word in named_in(code) if word in around]
                todo += zip(code.co_freevars, map(content_of, one.__closure__ or ()), strict=True)
                todo += [(name, value) for value in one.__defaults__ or ()] + [*(one.__kwdefaults__ or {}).items()]
        elif isinstance(one, MethodType):
            todo += [(name, one.__func__), (name, one.__self__)]
        elif isinstance(one, partial):
            todo += [(name, one.func), *((name, value) for value in one.args), *one.keywords.items()]
        elif isinstance(one, dict):
            todo += [(f"{name}.{key}", value) for key, value in one.items()]
        elif isinstance(one, list | tuple):
            todo += [(f"{name}.{at}", value) for at, value in enumerate(one)]
