"""Find the tensors and modules that a function closes over, by name: through functions, containers and objects.

def loss(self, y, target):                          -->      'criterion' of the trainer, not its 'optimizer'
    return self.criterion(y, target)
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn

from fpipe.meaning.purity.alike import content_of, named_in, slots_of
from fpipe.meaning.purity.attributes import Modules
from fpipe.positional_stage import PositionalStage

Home = tuple[Any, str]
"""An object, and its attribute that has a value."""

_OF_OTHERS = frozenset(("torch", *sys.stdlib_module_names))
"""Packages whose functions lead on to nothing of the user's."""


def closed_over(function: Any) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a function closes over, with those of the modules that it does, each by a name."""
    for name, one, _ in reached(function):
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
    for name, one, _ in reached(function):
        for path, module in one.named_modules() if isinstance(one, nn.Module) else ():
            found.setdefault(module, f"{name}.{path}" if path else name)
    return [(path, module) for module, path in found.items()]


def reached(function: Any) -> Iterator[tuple[str, Any, Home | None]]:
    """Tensors and modules that a function closes over or names, by name; of an object the attributes that the code
    around it names, with the object and the attribute."""
    seen: dict[Any, Any] = {}  # the objects too, so that none that is made meanwhile has the id of another
    todo: list[tuple[str, Any, tuple[str, ...], Home | None]] = [("it", function, ("__call__",), None)]
    while todo:
        name, one, words, home = todo.pop()
        if (id(one), id(words)) in seen:
            continue
        seen[id(one), id(words)] = one, words
        more: Iterable[tuple[str, Any]] = ()
        if isinstance(one, Tensor | nn.Module):
            yield name, one, home
        elif isinstance(one, FunctionType):
            if one.__module__ and one.__module__.partition(".")[0] not in _OF_OTHERS:
                code, around = one.__code__, one.__globals__
                words = _words(code)
                more = [(word, around[word]) for word in named_in(code) if word in around]
                more += zip(code.co_freevars, map(content_of, one.__closure__ or ()), strict=True)
                more += [(name, value) for value in one.__defaults__ or ()] + [*(one.__kwdefaults__ or {}).items()]
        elif isinstance(one, MethodType):
            if isinstance(one.__func__, FunctionType):
                words = _words(one.__func__.__code__)
            more = [(name, one.__func__), (name, one.__self__)]
        elif isinstance(one, partial):
            more = [(name, one.func), *((name, value) for value in one.args), *one.keywords.items()]
        elif isinstance(one, dict):
            more = [(f"{name}.{key}", value) for key, value in one.items()]
        elif isinstance(one, list | tuple):
            more = [(f"{name}.{at}", value) for at, value in enumerate(one)]
        elif hasattr(one, "__dict__") or hasattr(one, "__slots__"):
            todo += [(path, value, words, (one, word)) for path, value, word in _attributes(name, one, words)]
        todo += [(path, value, words, None) for path, value in more]


@cache  # by which `reached` tells what it has seen
def _words(code: CodeType) -> tuple[str, ...]:
    """Attributes that code may read, in an order that is the same in every process."""
    return tuple(dict.fromkeys((*named_in(code), "__call__")))


def _attributes(name: str, one: Any, words: tuple[str, ...]) -> Iterator[tuple[str, Any, str]]:
    """Attributes of an object that have these names, its methods bound; nothing of it is run. Classes and Python's
    modules lead on to everything, so of these only tensors and modules count."""
    shared = isinstance(one, type | ModuleType)
    slots = {} if shared else slots_of(one)
    for word in words:
        value = vars(one).get(word) if isinstance(one, ModuleType) else inspect.getattr_static(one, word, None)
        value = slots.get(word) if isinstance(value, MemberDescriptorType) else value
        if shared and not isinstance(value, Tensor | nn.Module):
            continue
        if isinstance(value, FunctionType) and word not in slots and word not in getattr(one, "__dict__", ()):
            yield name, MethodType(value, one), word
        elif value is not None:
            yield word if name == "it" else f"{name}.{word}", value, word
