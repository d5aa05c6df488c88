"""Refuse a trace whose modules have changed their mode since: what train or eval mode decided is in the graph for good.

net.train(); from_loss(..)  ;  net.eval(); step(..)        -->        ValueError: module 'net.1' was in training
"""

from __future__ import annotations

from typing import Any

from fpipe.graphs.closure import modules_of
from fpipe.models.known_modules import may_depend_on_mode


class TracedModes:
    """The modes of the modules that a function closes over, as they are when it is traced.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> modes = TracedModes(lambda x: net(x))
    >>> modes.now(), net.eval().training, modes.now()
    ((True,), False, (False,))
    """

    def __init__(self, function: Any) -> None:
        self.modules = [(path, module) for path, module in modules_of(function) if may_depend_on_mode(module)]
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
                    f"module {path!r} ({type(module).__name__}) was in {words[0]} when loss_fn was traced and is in "
                    f"{words[1]} now: the trace goes on as it was. Call from_loss again in this mode."
                )
