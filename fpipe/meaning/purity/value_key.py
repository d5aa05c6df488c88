"""Compare values that Python holds: plain ones and their containers by value, all others by identity."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch


def value_key(value: Any, unsupported: list[Any], ancestors: tuple[int, ...] = ()) -> Any:
    """Return a key to compare and hash a value by; it keeps nothing alive that can be referred to weakly.

    Args:
        value: anything. Functions, classes and Python's modules count as what they are when a trace sees them.
        unsupported: takes every other object, which may change and stay the same object.
        ancestors: the ids of the containers that the value is in: one that contains itself ends there.

    >>> value_key([1, 0.0], []) == value_key([True, -0.0], []), value_key({"a": (1,)}, []) == value_key({"a": (1,)}, [])
    (False, True)
    """
    if isinstance(value, _PLAIN):
        return type(value), value
    if isinstance(value, float | complex):
        return type(value), repr(value)  # -0.0 is not 0.0, and NaN is NaN
    if isinstance(value, list | tuple | set | frozenset | Mapping):
        if id(value) in ancestors:
            return "ancestor", ancestors.index(id(value))
        items: Any = value.items() if isinstance(value, Mapping) else value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        keys = (value_key(item, unsupported, (*ancestors, id(value))) for item in items)
        return type(value), frozenset(keys) if isinstance(value, set | frozenset) else tuple(keys)
    if not isinstance(value, _CODE):
        unsupported.append(value)
    return Same(value)


_PLAIN = (type(None), bool, int, str, bytes, torch.dtype, torch.device)
_CODE = (type, FunctionType, BuiltinFunctionType, MethodType, ModuleType, partial)


class Same:
    """Equal for one object and no other."""

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
