"""Tell whether two values would compute the same: plain ones by value, functions by their code and what it names.

    def f(x): return x * k        k = 2: alike(f) == alike(f)        k = 3: not alike(f) as it was

Any other object is equal to itself only, with the numbers and words that are its attributes.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MemberDescriptorType,
    MethodType,
    ModuleType,
)
from typing import Any

import torch


def alike(value: Any, odd: list[Any] | None = None) -> Any:
    """A key to compare a value by, and to hash. It keeps alive nothing that can be referred to weakly.

    Args:
        value: anything; of a function the code, defaults, closure and the globals it names, of an object the numbers
            and words that are its attributes, as they are now.
        odd: takes what is neither plain, nor a class, nor a function of such: it may change and stay the same object.

    >>> alike([1, 0.0]) == alike([True, -0.0]), alike({"a": (1,)}) == alike({"a": (1,)})
    (False, True)
    """
    if isinstance(value, _PLAIN):  # as most of what is asked for is
        return type(value), value
    return _alike(value, [] if odd is None else odd, (), {})


Known = dict[tuple[int, bool], int]
"""The functions that were spelt out, and whether what is odd in them was noted: each is spelt out once."""


def _alike(value: Any, odd: list[Any] | None, within: tuple[int, ...], known: Known) -> Any:
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # -0.0 is not 0.0
    if id(value) in within:
        return "above", within.index(id(value))
    inner = (*within, id(value))
    if isinstance(value, _CONTAINERS) and not value:
        return type(value), ()
    if isinstance(value, list | tuple):
        return type(value), tuple(_alike(one, odd, inner, known) for one in value)
    if isinstance(value, set | frozenset):
        return type(value), frozenset(_alike(one, odd, inner, known) for one in value)
    if isinstance(value, Mapping):
        return type(value), tuple(
            (_alike(key, odd, inner, known), _alike(one, odd, inner, known)) for key, one in value.items()
        )
    if isinstance(value, FunctionType):
        named = _named(value) if (id(value), odd is None) not in known else []
        own = _function(value, odd, inner, known)
        spelt = (_function if isinstance(one, FunctionType) else _alike for _, one in named)
        return *own, *((name, spell(one, None, inner, known)) for (name, one), spell in zip(named, spelt, strict=True))
    if isinstance(value, MethodType):
        return MethodType, _alike(value.__func__, odd, inner, known), _alike(value.__self__, odd, inner, known)
    if isinstance(value, partial):
        return partial, *(_alike(part, odd, inner, known) for part in (value.func, value.args, value.keywords))
    if odd is not None and not isinstance(value, type | BuiltinFunctionType):
        odd.append(value)
    attributes = {} if isinstance(value, type | ModuleType) else {**getattr(value, "__dict__", {}), **slots_of(value)}
    plain = ((name, _alike(one, None, inner, known)) for name, one in attributes.items() if isinstance(one, _NUMBERS))
    return Same(value), *plain


_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device, CodeType)
_NUMBERS = (*_PLAIN, float, complex)
_CONTAINERS = (list, tuple, dict, set, frozenset)


def _function(value: FunctionType, odd: list[Any] | None, within: tuple[int, ...], known: Known) -> tuple[Any, ...]:
    """A function without the globals that it names; its number where it was spelt out before."""
    key = id(value), odd is None
    if key in known:
        return "known", known[key]
    known[key] = len(known)
    cells = [content_of(cell) for cell in value.__closure__ or ()]
    parts = (value.__code__, value.__defaults__, value.__kwdefaults__, cells)
    return Same(value), *(_alike(part, odd, within, known) for part in parts)


def _named(function: FunctionType) -> list[tuple[str, Any]]:
    """The globals that a function names, and those of the functions among them, each once; torch's own stay."""
    found: list[tuple[str, Any]] = []
    todo, seen = [function], {id(function)}
    while todo:
        one = todo.pop()
        around = one.__globals__
        if str(around.get("__name__")).partition(".")[0] == "torch":
            continue
        for name in named_in(one.__code__):
            if name not in around or id(around[name]) in seen:
                continue
            found.append((name, around[name]))
            if isinstance(around[name], FunctionType):
                seen.add(id(around[name]))
                todo.append(around[name])
    return found


def named_in(code: CodeType) -> Iterator[str]:
    """Names in code, that of inner functions too: attributes, globals, and words, of which some are for getattr."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from named_in(inner)
        elif isinstance(inner, str):
            yield inner


def slots_of(value: Any) -> dict[str, Any]:
    """Attributes that an object has by `__slots__`; nothing of it is run."""
    found: dict[str, Any] = {}
    for own in (vars(kind) for kind in type(value).__mro__ if "__slots__" in vars(kind)):
        for name, one in own.items():
            with suppress(AttributeError):  # nothing yet
                if isinstance(one, MemberDescriptorType):
                    found.setdefault(name, one.__get__(value))
    return found


def content_of(cell: CellType) -> Any:
    """The content of a closure's cell; a class where it is empty."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return CellType


class Same:
    """One object and no other."""

    def __init__(self, what: Any) -> None:
        try:
            self._what: Any = weakref.ref(what)
        except TypeError:
            self._what = lambda: what
        self._number = id(what)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self._what() is not None and self._what() is other._what()

    def __hash__(self) -> int:
        return self._number
