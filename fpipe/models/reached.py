"""Find what a function reaches without being handed it, and see that it writes none of it, least of all buffers.

net = Sequential(...)
def loss_fn(params, batch): ... functional_call(net, params, batch[0]) ...        --> net, and the modules inside

What a function reaches: its closure, its defaults, the globals that its code names; the attributes of the objects among
them, and what their methods reach in turn. The standard library and torch hold nobody's nets, and are not searched, nor
is what else is installed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FunctionType, MemberDescriptorType, MethodType, ModuleType, SimpleNamespace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from fpipe.graphs.alike import Same
from fpipe.graphs.lru_cache import Recent
from fpipe.model import ByPlace
from fpipe.models.buffers import Buffers, own_buffers


def modules_of(function: Any, called: str = "loss_fn") -> list[tuple[str, nn.Module]]:
    """The modules that a function closes over or finds among its globals, as do those it calls, each by a name.

    >>> net = nn.Sequential(nn.Linear(2, 2))
    >>> [name for name, _ in modules_of(lambda x: net(x))]
    ['net', 'net.0']
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for name, one in everything(function, called):
        if isinstance(one, nn.Module):
            for path, module in one.named_modules():
                found.setdefault(id(module), (f"{name}.{path}" if path else name, module))
    return list(found.values())


def everything(function: Any, called: str) -> Iterator[tuple[str, Any]]:
    """All that a function reaches, each once."""
    home = _home(function)
    seen: dict[int, Any] = {}  # the objects too, so that none made meanwhile has the id of another
    todo: list[tuple[str, Any]] = [(called, function)]
    while todo:
        name, one = todo.pop()
        if id(one) not in seen:
            seen[id(one)] = one
            yield name, one
            todo += _inside(name, one, home)


def _inside(name: str, one: Any, home: str) -> Iterator[tuple[str, Any]]:
    """What is reached from an object at once, each by a name."""
    if isinstance(one, FunctionType):
        if _searched(one.__module__, home):
            yield from _named(name, one, home)
    elif isinstance(one, MethodType):
        yield from ((name, one.__func__), (name, one.__self__))
    elif isinstance(one, staticmethod | classmethod):
        yield name, one.__func__
    elif isinstance(one, property):
        yield name, one.fget
    elif isinstance(one, functools.partial):
        yield from ((name, one.func), *((name, arg) for arg in one.args), *one.keywords.items())
    elif isinstance(one, type):
        if _searched(one.__module__, home) and not _is_ours(one):
            yield from ((f"{name}.{key}", value) for key, value in vars(one).items())
    elif not isinstance(one, ModuleType):
        yield from _held(name, one, home)


def _held(name: str, one: Any, home: str) -> Iterator[tuple[str, Any]]:
    """What an object holds: elements, attributes, and what its class has."""
    if isinstance(one, dict):
        yield from ((f"{name}.{key}", value) for key, value in one.items() if not isinstance(value, _PLAIN))
    elif isinstance(one, list | tuple | set | frozenset):
        yield from ((f"{name}.{at}", value) for at, value in enumerate(one) if not isinstance(value, _PLAIN))
    attributes = getattr(one, "__dict__", {})
    if "__wrapped__" in attributes:  # a function behind functools.cache
        yield name, attributes["__wrapped__"]
    own = [kind for kind in type(one).__mro__ if _searched(kind.__module__, home)]
    if isinstance(one, nn.Module):
        attributes = {key: value for key, value in attributes.items() if key not in _OF_MODULES or value}
    if own or isinstance(one, SimpleNamespace | nn.Module):
        yield from ((f"{name}.{key}", value) for key, value in attributes.items())
    for kind in own:
        yield name, kind
        for key, slot in vars(kind).items():
            if isinstance(slot, MemberDescriptorType) and hasattr(one, key):
                yield f"{name}.{key}", getattr(one, key)


_OF_MODULES = frozenset(vars(nn.Module()))
"""What each module has: its hooks, say, which there are few of."""


def _named(called: str, function: FunctionType, home: str) -> Iterator[tuple[str, Any]]:
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
    known += [(called, value) for value in function.__defaults__ or ()]
    known += [*(function.__kwdefaults__ or {}).items(), *vars(function).items()]
    opened: set[str] = set()
    for name, one in known:  # it grows
        if isinstance(one, ModuleType) and _searched(one.__name__, home) and one.__name__ not in opened:
            opened.add(one.__name__)
            known += [(f"{name}.{key}", vars(one)[key]) for key in names if key in vars(one)]
    return iter(known)


_PLAIN = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)
"""What nothing is reached from; a list of numbers may be long."""


def _home(function: Any) -> str:
    """The package that a function is of."""
    while isinstance(function, functools.partial):
        function = function.func
    return _root(getattr(function, "__module__", None))


def _root(module: str | None) -> str:
    return (module or "").partition(".")[0]


@functools.lru_cache(maxsize=4096)
def _searched(module: str | None, home: str) -> bool:
    """Whether what a Python module defines may hold somebody's nets: not what is installed, which may hold all there
    is, as a testing library does, if the function is not of it."""
    root = _root(module)
    if root == "torch" or root in sys.stdlib_module_names:
        return False
    place = getattr(sys.modules.get(root), "__file__", None) or ""
    return root in ("fpipe", home) or _INSTALLED.isdisjoint(Path(place).parts)


_INSTALLED = frozenset(("site-packages", "dist-packages"))


def _is_ours(kind: type) -> bool:
    """Whether it is a class of this library: what is behind one of those is held by the objects."""
    return kind.__module__.startswith("fpipe.")


@contextmanager
def unwritten(
    modules: Sequence[tuple[str, nn.Module]], who: str = "loss_fn", of_a_stage: bool = False
) -> Generator[None]:
    """Put buffers back that are written meanwhile, by a loss_fn or by a stage or a loss of its own, and say so.

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
        raise ValueError(what_it_remembers(f"the buffer {written[0]!r} of a module", who, of_a_stage)) from failed
    if failed is not None:
        raise failed


@contextmanager
def closed_over(function: Any, who: str) -> Generator[None]:
    """The same while a stage or a loss runs, for all tensors that it reaches. What it reaches is looked for once.

    Raises:
        ValueError: it writes a buffer.
        RuntimeError: it changes another tensor.
    """
    if isinstance(function, ByPlace):  # it looks after what it has
        yield
        return
    modules, tensors = _found(function, who.split(" (")[0])
    versions = [one._version for _, one in tensors]
    with unwritten(modules, who, of_a_stage=True) if modules else nullcontext():
        yield
    pairs = zip(tensors, versions, strict=True)
    changed = next((name for (name, one), version in pairs if one._version != version), None)
    if changed is not None:
        raise RuntimeError(
            f"{who} changed {changed!r} in place, a tensor that it closes over, and it stays so; a stage and a loss "
            "are pure functions. Hand it in, among params or as state."
        )


def _found(function: Any, called: str) -> tuple[list[tuple[str, nn.Module]], list[tuple[str, Tensor]]]:
    """The modules that a function reaches, and the tensors that are no buffers of theirs."""
    method = isinstance(function, MethodType)  # which is another object each time that it is asked for
    key = (Same(function.__self__), Same(function.__func__)) if method else Same(function)
    found = _FOUND.get(key)
    if found is None:
        modules = modules_of(function, called)
        buffers = {id(one) for _, module in modules for one in own_buffers(module).values()}
        each = ((name, one) for name, one in everything(function, called) if isinstance(one, Tensor))
        tensors = [(_said(name), one) for name, one in each if id(one) not in buffers and not one.is_inference()]
        found = _FOUND[key] = [(name, ref(one)) for name, one in (*modules, *tensors)]
    alive = [(name, one()) for name, one in found]
    modules = [(name, one) for name, one in alive if isinstance(one, nn.Module)]
    return modules, [(name, one) for name, one in alive if isinstance(one, Tensor)]


# Weakly, since what a function reaches may hold the function.
_FOUND: Recent[Any, list[tuple[str, ref[Any]]]] = Recent(512)


def _said(name: str) -> str:
    return name.replace("._modules", "").replace("._parameters", "")


def what_it_remembers(what: str, who: str = "loss_fn", of_a_stage: bool = False) -> str:
    """Why a function may not write it."""
    said = f"{who} writes {what} that it closes over (it is put back): what a module remembers is state, "
    if of_a_stage:
        return said + (
            "which a stage is handed and returns. Call .eval() on the module, cut the net by from_sequential, or ask "
            "for state."
        )
    return said + "and a loss function has none. Call .eval() on the module, or cut the net by from_sequential."
