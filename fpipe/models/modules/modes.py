"""Refuse modules that have changed their mode: what train or eval mode decided at a cut is in the program for good.

net.train(); from_loss(..)  ;  net.eval(); step(..)        -->        ValueError: module 'net.1' was in training
"""

from __future__ import annotations

from fpipe.meaning.purity.attributes import Modules


class Modes:
    """The modes of modules as they are now; errors say what was `done` then, and `why` they may not be others.

    >>> from torch import nn
    >>> net = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    >>> modes = Modes([*net.named_modules()], "the net was traced", "call from_module again.")
    >>> modes.now(), net.eval().training, modes.now()
    ((True, True, True), False, (False, False, False))
    """

    def __init__(self, modules: Modules, done: str, why: str) -> None:
        self.modules, self.done, self.why = modules, done, why
        self.then = self.now()

    def now(self) -> tuple[bool, ...]:
        """Whether each is in training."""
        return tuple([module.training for _, module in self.modules])

    def check(self) -> None:
        """A ValueError if one of them has turned."""
        for (path, module), was in zip(self.modules, self.then, strict=True):
            if module.training != was:
                before, now = ("training", "eval") if was else ("eval", "training")
                raise ValueError(
                    f"module {path!r} ({type(module).__name__}) was in {before} when {self.done} and is in {now} now: "
                    f"{self.why}"
                )
