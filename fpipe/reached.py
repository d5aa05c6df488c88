"""Find the modules that a function reaches without being handed them, and see that it writes none of their buffers.

net = Sequential(...)
def loss_fn(params, batch): ... functional_call(net, params, batch[0]) ...        --> net, and the modules inside
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from types import FunctionType, MethodType
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
    seen: set[int] = set()
    todo: list[tuple[str, Any]] = [("loss_fn", function)]
    while todo:
        name, one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, nn.Module):
            for path, module in one.named_modules():
                found.setdefault(id(module), (f"{name}.{path}" if path else name, module))
        elif isinstance(one, FunctionType) and not (one.__module__ or "").startswith("torch."):
            known = inspect.getclosurevars(one)
            todo += [*known.nonlocals.items(), *known.globals.items()]
        elif isinstance(one, MethodType):
            todo += [(name, one.__func__), (name, one.__self__)]
        elif isinstance(one, functools.partial):
            todo += [(name, one.func), *((name, arg) for arg in one.args), *one.keywords.items()]
        elif isinstance(one, list | tuple | dict):
            pairs = one.items() if isinstance(one, dict) else enumerate(one)
            todo += [(f"{name}.{key}", inner) for key, inner in pairs]
        elif one is function and hasattr(one, "__dict__"):
            todo += [(type(one).__name__, type(one).__call__), *vars(one).items()]
    return list(found.values())


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
        raise ValueError(
            f"loss_fn writes the buffer {written[0]!r} of a module that it closes over (it is put back): what a module "
            "remembers is state, and a loss function has none. Call .eval() on the module, or cut the net by "
            "from_sequential."
        ) from failed
    if failed is not None:
        raise failed
