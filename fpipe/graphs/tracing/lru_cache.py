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
    >>> known["a"]
    1
    >>> known["c"] = 3
    >>> "a" in known, "b" in known
    (True, False)
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self._kept: OrderedDict[K, V] = OrderedDict()

    def __contains__(self, key: K) -> bool:
        return key in self._kept

    def __getitem__(self, key: K) -> V:
        found = self._kept[key]
        with suppress(KeyError):  # another thread may have pushed it out since
            self._kept.move_to_end(key)
        return found

    def get(self, key: K, default: D = None) -> V | D:
        """The value of a key, or the default."""
        try:
            return self[key]
        except KeyError:
            return default

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
