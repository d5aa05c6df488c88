"""Notice what a call binds instead of writing it: attributes of modules, and Python's and numpy's random state.

self.calls += 1                     seen after a trace, by comparing
self.mean = 0.9 * self.mean         seen too where it is a plain attribute: what a module remembers is a buffer
numpy.random.rand()                 seen after a trace, by the state of the generator
"""

from __future__ import annotations

import pickle
import random
import sys
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import Tensor, nn

from fpipe.meaning.purity.alike import alike
from fpipe.meaning.purity.ambient import Untraceable
from fpipe.meaning.purity.own_memory import memory
from fpipe.torch_internals import WEIGHT_LISTS

Modules = Sequence[tuple[str, nn.Module]]
"""Modules with their paths."""


class Attributes:
    """The plain attributes of modules, to tell after a call which of them it has moved: tensors, and if `every` also
    numbers, words and containers."""

    def __init__(self, modules: Modules, who: str, every: bool = False) -> None:
        self.who = who
        self.before = [(path, module, dict(vars(module))) for path, module in modules]
        values = [value for _, _, attributes in self.before for value in attributes.values()]
        self.containers = [(one, copy(one)) for one in values if every and type(one) in _CONTAINERS]
        self.drawn = [(one, state) for one in values if every for state in [_hidden(one)] if state is not None]
        self.plain = [plain_attributes(attributes) for _, _, attributes in self.before] if every else None

    def moved(self, read: set[Any]) -> str | None:
        """Describe the first change in words; `read` are the storages that the call read."""
        for at, (path, module, attributes) in enumerate(self.before):
            what = f"of module {path!r} ({type(module).__name__})"
            for name, value in attributes.items():
                if isinstance(value, Tensor) and vars(module).get(name) is not value and memory(value) in read:
                    return (
                        f"{self.who} changes {name!r} {what} as it runs, a tensor that is no buffer: what a module "
                        f"remembers is state. Say self.register_buffer({name!r}, ...)."
                    )
            if self.plain is not None:
                now, known = plain_attributes(vars(module)), self.plain[at]
                other = next((name for name in now if name in known and now[name] != known[name]), None)
                if other is not None:
                    return f"{self.who} changes {other!r} {what}"
        return None

    def put_back(self) -> None:
        """Everything as it was."""
        for _, module, attributes in self.before:
            for name in [*vars(module)]:
                if name not in attributes:
                    del vars(module)[name]
            vars(module).update(attributes)
        for container, content in self.containers:
            if isinstance(container, list):
                container[:] = content
            else:
                container.clear()
                container.update(content)
        for one, state in self.drawn:
            _restore(one, state)


# A module's hooks are in an ordered dict each.
_CONTAINERS = (dict, OrderedDict, list, set)

# What every module has, its hooks say, and an RNN's lists of its weights.
_NOT_PLAIN = frozenset((*vars(nn.Module()), *WEIGHT_LISTS)) - {"training"}


def plain_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Attributes that are no tensors, without those that every module has, as values to compare."""
    return {
        name: alike(value) if (state := _hidden(value)) is None else pickle.dumps(state)
        for name, value in attributes.items()
        if name not in _NOT_PLAIN and not isinstance(value, Tensor)
    }


def _hidden(value: Any) -> Any:
    """The content of a random generator or a numpy array, for which it has no attributes; None for others."""
    if isinstance(value, random.Random):
        return value.getstate()
    numpy: Any = sys.modules.get("numpy")
    if numpy is None:
        return None
    if isinstance(value, numpy.random.Generator):
        return value.bit_generator.state
    plain = isinstance(value, numpy.ndarray) and value.dtype != object and value.flags.writeable
    return value.copy() if plain else None


def _restore(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif hasattr(value, "bit_generator"):
        value.bit_generator.state = state
    else:
        value[...] = state


@contextmanager
def unmoved_random_numbers() -> Generator[None]:
    """Python's and numpy's own random numbers are as they were; a trace would repeat what it drew of them for ever, and
    so may draw none."""
    before, numpy = random.getstate(), sys.modules.get("numpy.random")
    ours = None if numpy is None else numpy.get_state()
    yield
    moved = "Python's" if random.getstate() != before else None
    random.setstate(before)
    if numpy is not None:
        moved = "numpy's" if pickle.dumps(numpy.get_state()) != pickle.dumps(ours) else moved
        numpy.set_state(ours)
    if moved:
        raise Untraceable(f"it draws {moved} random numbers, which follow from no key and which a trace would repeat")
