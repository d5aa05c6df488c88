"""Tell by the code of modules which buffers they read only to write them: then nothing else waits for what those hold.

    self.count += 1                        count is unread
    self.mean.lerp_(x.mean(0), 0.1)        mean is unread
    return x - self.mean                   mean is read

A buffer is read if what it holds may flow anywhere but into such buffers. All are read of a module that hands itself
over, or asks for attributes by names that are made as it runs. What this misses is noticed as the module runs, and
refused by name.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fpipe.graphs.alike import named_in
from fpipe.models.flows import ANY, Found, found_in
from fpipe.models.writers import codes_of


def read_buffers(
    modules: Collection[nn.Module], written: Collection[tuple[nn.Module, str]]
) -> set[tuple[nn.Module, str]]:
    """Those of the buffers that modules write which something may read that does not end up in such a buffer.

    >>> import torch
    >>> class Counter(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.register_buffer("seen", torch.zeros(()))
    ...         self.register_buffer("twice", torch.zeros(()))
    ...
    ...     def forward(self, x):
    ...         self.seen += len(x)
    ...         self.twice.copy_(self.seen * 2)
    ...         return x if self.training else x * self.twice
    >>> counter = Counter()
    >>> read_buffers([counter], [(counter, "seen"), (counter, "twice")])
    set()
    >>> sorted(name for _, name in read_buffers([counter.eval()], [(counter, "seen"), (counter, "twice")]))
    ['seen', 'twice']
    """
    concerned = [module for module in modules if _concerns(module, written)]
    each = [found for module in concerned for found in _found_in(module)]
    flows = {flow for found in each for flow in found.flows}
    names = {name for _, name in written}
    if (ANY, None) in flows:
        return set(written)
    read = {source for source, end in flows if end not in names}
    lent, changes = {name for found in each for name in found.lent}, {name for found in each for name in found.changes}
    read |= lent if ANY in changes else lent & changes  # what is changed is another tensor too
    while more := {source for source, end in flows if end in read} - read:
        read |= more
    return {(owner, name) for owner, name in written if name in read or _is_asked(owner, concerned)}


def names_any(modules: Iterable[nn.Module], names: Collection[str]) -> bool:
    """Whether the code of modules, torch's own aside, names one of these attributes, whosever it is."""
    codes = (code for module in modules for code in codes_of(module) if not code.co_filename.startswith(_TORCH))
    return any(not {*names}.isdisjoint(named_in(code)) for code in codes)


_TORCH = str(Path(torch.__file__).parent)


def _is_asked(owner: nn.Module, modules: Collection[nn.Module]) -> bool:
    """Whether a module around it names what only its class has, a property or a method, which may read for that module:
    `x - self.ema.average`. The flows of the module itself show no more than what its forward runs."""
    own = {name for kind in type(owner).__mro__ if not issubclass(nn.Module, kind) for name in vars(kind)}
    own = {name for name in own if not name.startswith("__")} - {"forward"}
    around = (one for one in modules if one is not owner and any(owner is inner for inner in one.modules()))
    return any(not own.isdisjoint(code.co_names) for one in around for code in codes_of(one))


def _concerns(module: nn.Module, written: Collection[tuple[nn.Module, str]]) -> bool:
    """Whether the code of a module could name one of the buffers: torch's own knows none but those of its module."""
    if not type(module).__module__.startswith(("torch.nn.", "fpipe.")) or _hooked(module):
        return True
    return any(owner is module for owner, _ in written)


def _hooked(module: nn.Module) -> bool:
    return bool(vars(module)["_forward_pre_hooks"] or vars(module)["_forward_hooks"] or "forward" in vars(module))


def _found_in(module: nn.Module, training: bool | None = None) -> list[Found]:
    mode = module.training if training is None else training
    return [found_in(code, mode) for code in codes_of(module)]


def asks_for_mode(module: nn.Module, written: Collection[tuple[nn.Module, str]]) -> bool:
    """Whether what its code does with these buffers is another matter in the other mode."""
    if not _concerns(module, written):
        return False
    names = {name for _, name in written} | {ANY}
    shown = [
        [
            (names.intersection(found.changes), {flow for flow in found.flows if names.intersection(flow)})
            for found in each
        ]
        for each in (_found_in(module, True), _found_in(module, False))
    ]
    return shown[0] != shown[1]


def changes_others(modules: Collection[nn.Module], written: Collection[tuple[nn.Module, str]]) -> bool:
    """Whether modules may write in place what is none of these buffers, such as a tensor that one of them was given."""
    names = {name for _, name in written}
    for module in modules:
        switch: Any = getattr(module, "inplace", False)
        own = _concerns(module, written) and any(not found.changes <= names for found in _found_in(module))
        if switch is not False or own:
            return True
    return False
