"""A value that a notebook shows as a picture, without knowing who paints it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar


class Shown:
    """What programs and timelines have in common: a notebook asks for HTML, and the painter gives it.

    `fpipe.plot`, two floors up, puts the painter here when fpipe is imported.

    >>> import fpipe
    >>> fpipe.program(2)._repr_html_()[:27]
    '<div style="overflow-x:auto'
    """

    painter: ClassVar[Callable[[Any], str] | None] = None

    def _repr_html_(self) -> str | None:
        return None if Shown.painter is None else Shown.painter(self)
