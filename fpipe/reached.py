"""Find the modules that a function reaches without being handed them, and see that it writes none of their buffers.

net = Sequential(...)
def loss_fn(params, batch): ... functional_call(net, params, batch[0]) ...        --> net, and the modules inside

What a function reaches: its closure, its defaults, the globals that its code names; the attributes of the objects among
them, and what their methods reach in turn. The standard library and torch hold nobody's nets, and are not searched.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from fpipe.buffers import Buffers


def modules_of(function: Any) -> list[tuple[str, nn.Module]]:
    """The modules that a function closes over or finds among its globals, as do those it calls, each by a name.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> [name for name, _ in modules_of(lambda x: net(x))]
    ['net', 'net.0']
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    seen: dict[int, Any] = {}  # the objects too, so that none made meanwhile has the id of another
    todo: list[tuple[str, Any]] = [("loss_fn", function)]
    while todo:
        name, one = todo.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if isinstance(one, nn.Module):
            for path, module in one.named_modules():
                found.setdefault(id(module), (f"{name}.{path}" if path else name, module))
        todo += _inside(name, one)
    return list(found.values())


def _inside(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """What is reached from an object at once, each by a name."""
    if isinstance(one, FunctionType):
        if _searched(one.__module__):
            yield from _named(one)
    elif isinstance(one, MethodType):
        yield from ((name, one.__func__), (name, one.__self__))
    elif isinstance(one, staticmethod | classmethod):
        yield name, one.__func__
    elif isinstance(one, property):
        yield name, one.fget
    elif isinstance(one, functools.partial):
        yield from ((name, one.func), *((name, arg) for arg in one.args), *one.keywords.items())
    elif isinstance(one, type):
        if _searched(one.__module__):
            yield from ((f"{name}.{key}", value) for key, value in vars(one).items())
    elif not isinstance(one, ModuleType):
        yield from _held(name, one)


def _held(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds: elements, attributes, and what its class has."""
    if isinstance(one, dict):
        yield from ((f"{name}.{key}", value) for key, value in one.items())
    elif isinstance(one, list | tuple | set | frozenset):
        yield from ((f"{name}.{at}", value) for at, value in enumerate(one))
    attributes = getattr(one, "__dict__", {})
    if "__wrapped__" in attributes:  # a function behind functools.cache
        yield name, attributes["__wrapped__"]
    own = [kind for kind in type(one).__mro__ if _searched(kind.__module__)]
    if own or isinstance(one, SimpleNamespace | nn.Module):
        yield from ((f"{name}.{key}", value) for key, value in attributes.items())
    for kind in own:
        yield name, kind
        for key, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and hasattr(one, key):
                yield f"{name}.{key}", getattr(one, key)


def _named(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """What the names in a function stand for; of a Python module what it names too is meant."""
    codes = [function.__code__]
    for code in codes:  # it grows
        codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
    names = dict.fromkeys(name for code in codes for name in code.co_names)
    known = [(name, function.__globals__[name]) for name in names if name in function.__globals__]
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            known.append((name, cell.cell_contents))
        except ValueError:  # a local that is assigned later
            continue
    known += [("loss_fn", value) for value in function.__defaults__ or ()]
    known += [*(function.__kwdefaults__ or {}).items(), *vars(function).items()]
    opened: set[str] = set()
    for name, one in known:  # it grows
        if isinstance(one, ModuleType) and _searched(one.__name__) and one.__name__ not in opened:
            opened.add(one.__name__)
            known += [(f"{name}.{key}", vars(one)[key]) for key in names if key in vars(one)]
    return iter(known)


def _searched(module: str | None) -> bool:
    """Whether what a Python module defines may hold somebody's nets."""
    root = (module or "").partition(".")[0]
    return root != "torch" and root not in sys.stdlib_module_names


@contextmanager
def unwritten(modules: Sequence[tuple[str, nn.Module]]) -> Generator[None]:
    """Put buffers back that are written meanwhile, and say so.

    Raises:
        ValueError: some were.
    """
    before = Buffers(modules)
    failed: Exception | None = None
    try:
        yield
    except Exception as error:  # what was written may well be its reason
        failed = error
    written = before.put_back()
    if written:
        raise ValueError(what_it_remembers(f"the buffer {written[0]!r} of a module")) from failed
    if failed is not None:
        raise failed


def what_it_remembers(what: str) -> str:
    """Why a loss function may not write it."""
    return (
        f"loss_fn writes {what} that it closes over (it is put back): what a module remembers is state, and a loss "
        "function has none. Call .eval() on the module, or cut the net by from_sequential."
    )
