"""Hold which stages run under autograd, since they cannot be traced."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Untraced:
    """The stages that run under autograd.

    Attributes:
        stages: their numbers, each with the reason.
        known_only: whether only traces are used that were made before.
    """

    stages: dict[int, str] = field(default_factory=dict[int, str])
    known_only: bool = False


UNDER_AUTOGRAD = "a stage runs under autograd, without a trace, and its I computes what W hands over"
