"""Take out again what a function has cached while it ran on tensors without data: real runs would find it later.

tables[n] = torch.arange(n)      self.cos = angles.cos()      @functools.cache      global TABLE      --> as before
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from types import FunctionType, ModuleType
from typing import Any

from torch import Tensor

from fpipe import tree
from fpipe.models.reached import everything


class Caches:
    """Where a function may keep what it makes: containers and attributes of what it reaches, globals that it names, and
    functions behind a `functools.cache`."""

    def __init__(self, function: Any) -> None:
        self.mappings: list[tuple[dict[Any, Any], frozenset[str] | None]] = []
        self.lists: list[list[Any]] = []
        self.cached: list[Any] = []
        for _, one in everything(function, "it"):
            if isinstance(one, dict):
                self.mappings.append((one, None))
            elif isinstance(one, list):
                self.lists.append(one)
            elif isinstance(one, FunctionType):
                self.mappings.append((one.__globals__, frozenset(one.__code__.co_names)))
            elif hasattr(type(one), "cache_clear") and hasattr(type(one), "cache_info"):
                self.cached.append(one)
            elif not isinstance(one, type | ModuleType) and isinstance(getattr(one, "__dict__", None), dict):
                self.mappings.append((vars(one), None))

    @contextmanager
    def clean(self) -> Generator[None]:
        """While it lasts the function runs on tensors without data; those are nowhere afterwards where none was."""
        mappings = [dict(_items(mapping, names)) for mapping, names in self.mappings]
        lists = [[*one] for one in self.lists]
        misses = [one.cache_info().misses for one in self.cached]
        try:
            yield
        finally:
            for (mapping, names), before in zip(self.mappings, mappings, strict=True):
                for key, value in [*_items(mapping, names)]:
                    if (key not in before or before[key] is not value) and _has_no_data(value):
                        mapping.pop(key)
                        mapping.update({key: before[key]} if key in before else {})
            for one, before in zip(self.lists, lists, strict=True):
                if _has_no_data([value for value in one if not any(value is old for old in before)]):
                    one[:] = before
            for one, known in zip(self.cached, misses, strict=True):
                if one.cache_info().misses != known:
                    one.cache_clear()


def _items(mapping: dict[Any, Any], names: frozenset[str] | None) -> Iterator[tuple[Any, Any]]:
    keys = mapping if names is None else names & mapping.keys()
    return ((key, mapping[key]) for key in keys)


def _has_no_data(value: Any) -> bool:
    """Whether a tensor of a FakeTensorMode is among the leaves of something."""
    return any(isinstance(leaf, Tensor) and hasattr(leaf, "fake_mode") for leaf in tree.leaves(value))
