"""Refuse a trace whose modules have changed their mode since: what train or eval mode decided is in the graph for good.

net.train(); from_loss(..)  ;  net.eval(); step(..)        -->        ValueError: module 'net.1' was in training
"""

from __future__ import annotations

import threading
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from fpipe.graphs.purity.attributes import Modules
from fpipe.models.modules.known_modules import may_depend_on_mode


class TracedModes:
    """The modes of modules, as they are when a function that runs them is traced.

    Args:
        modules: with their paths.
        who, door: what errors call the function, and what has traced it.

    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> modes = TracedModes([*net.named_modules()], "the net", "from_module")
    >>> modes.now(), net.eval().training, modes.now()
    ((True,), False, (False,))
    """

    def __init__(self, modules: Modules, who: str, door: str) -> None:
        self.who, self.door = who, door
        self.modules = [(path, module) for path, module in modules if may_depend_on_mode(module)]
        self.traced = self.now()

    def now(self) -> tuple[bool, ...]:
        """Whether each is in training."""
        return tuple([module.training for _, module in self.modules])

    def check(self) -> None:
        """A ValueError if one of them has turned."""
        for (path, module), was in zip(self.modules, self.traced, strict=True):
            if module.training != was:
                words = ("training", "eval") if was else ("eval", "training")
                raise ValueError(
                    f"module {path!r} ({type(module).__name__}) was in {words[0]} when {self.who} was traced and is in "
                    f"{words[1]} now: the trace goes on as it was. Call {self.door} again in this mode."
                )


@contextmanager
def called_modules() -> Generator[dict[nn.Module, str]]:
    """The modules that this thread calls meanwhile, wherever a function has them from, each with its class's name."""
    found: dict[nn.Module, str] = {}
    thread = threading.get_ident()

    def note(module: nn.Module, _: Any) -> None:
        if threading.get_ident() == thread:
            found.setdefault(module, type(module).__name__)

    hook = register_module_forward_pre_hook(note)
    try:
        yield found
    finally:
        hook.remove()
