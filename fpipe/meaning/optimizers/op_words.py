"""Read the words of an UPDATE: its rule, its clip, and the settings of each parameter by its name.

{by='AdamW', clip=1.0, groups=(('*bias', (('weight_decay', 0.0),)),), weight_decay=0.1}
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, NamedTuple

from fpipe import tree
from fpipe.meaning.optimizers.rules import Words
from fpipe.program import Op, Program


class UpdateWords(NamedTuple):
    """Words of an UPDATE: by which rule, the largest norm, and settings, some by patterns of parameters' names."""

    by: str
    clip: float | None
    groups: tuple[tuple[str, Words], ...]
    settings: Words

    def of(self, names: Sequence[str]) -> list[Words]:
        """The settings of each of some parameters: those of the first group of its name in place of all others'."""
        owns = (next((words for pattern, words in self.groups if fnmatchcase(name, pattern)), ()) for name in names)
        return [tuple((dict(self.settings) | dict(own)).items()) if own else self.settings for own in owns]


@lru_cache(maxsize=1024)
def words_of(how: tuple[tuple[str, Any], ...]) -> UpdateWords:
    """The words of an UPDATE, in their places."""
    said = dict(how)
    by, clip, groups = said.pop("by"), said.pop("clip", None), said.pop("groups", ())
    return UpdateWords(by, None if clip is None else float(clip), groups, tuple(said.items()))


def update_of(program: Program) -> Op | None:
    """The first UPDATE of a program; the others say the same. Each step asks, so it is looked for once."""
    if "update_of" not in program.__dict__:
        program.__dict__["update_of"] = next((op for op in program.ops if op.kind == "UPDATE"), None)
    return program.__dict__["update_of"]


def names_of(spec: tree.Spec) -> list[str]:
    """The names of leaves: the keys on the way to each, with dots between."""
    return [".".join(map(str, path)) for path in spec.paths()]
