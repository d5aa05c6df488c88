"""Cache values in a dict that drops the least recently used."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")
D = TypeVar("D")


class LRUCache(Generic[K, V]):
    """At most so many values: those that were put in or looked up last.

    >>> known = LRUCache(2)
    >>> known["a"], known["b"] = 1, 2
    >>> known.get("a")
    1
    >>> known["c"] = 3
    >>> known.get("b", "gone")
    'gone'
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[K, V] = OrderedDict()

    def get(self, key: K, default: D = None) -> V | D:
        """The value of a key, or the default."""
        found = self._kept.get(key, default)
        with suppress(KeyError):  # it is not there, or another thread has pushed it out since
            self._kept.move_to_end(key)
        return found

    def once(self, key: K, make: Callable[[], V]) -> V:
        """The value of a key, made if there is none yet."""
        found = self.get(key)
        if found is None:
            found = self[key] = make()
        return found

    def __setitem__(self, key: K, value: V) -> None:
        self._kept[key] = value
        with suppress(KeyError):
            self._kept.move_to_end(key)
        if len(self._kept) > self.most:
            self._kept.popitem(last=False)
