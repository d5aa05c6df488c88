"""Measure how code reads: `python -m tests.words [FOLDER ..]` prints a row for each room.

A *vague* name says how a value was come by, or points at it, and not what it is: `found`, `each`, `made_one`. A
*riddle* is the first line of a docstring that leans on a word whose meaning stands elsewhere. Comments on lines of
their own are counted for each thousand lines, and the words of error messages where they are raised.

    room            lines   vague %   riddles %   comments   words of an error: median, 90th percentile, longest
"""

import ast
import io
import re
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

ROOT = Path(__file__).parent.parent

_VAGUE_TEXT = """
    one ones other others another each every all both some any none that this these those it them such same
    found made known given told said held handed asked kept seen heard left gone taken shown sent put got read written
    landed lost owed owing wanted due begun ended done here there now then before after again anew apart away beside
    behind within without between meanwhile what which who whose where when how why odd whole thing things rest late
    early last first next more most less least inner outer under over above below up down on off by to of in out only
    way ways word words place places sort like alike many much few likely else
    item items element elements entry entries object objects data info stuff tmp temp val vals
"""
VAGUE_WORDS = frozenset(_VAGUE_TEXT.split())
"""Words that say nothing by themselves; a name is vague if it has no other."""

POINTERS = re.compile(
    r"\b(of which|that of|those (that|of|which)|what (is|was|are|it|they|a|an|the|this|that)"
    r"|as (it|they) (is|are|was|were)|the same,|the other|others'|of them|it is over|everything else"
    r"|by (itself|themselves)|in (its|their) place)\b",
    re.IGNORECASE,
)
"""Words in a first line that can only be understood with something that stands elsewhere."""

TOOL_COMMENT = re.compile(r"#\s*(type|pyright|ruff|noqa)\b")
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


@dataclass
class RoomWords:
    """The measures of the files in one room."""

    lines: int = 0
    names: list[str] = field(default_factory=list[str])
    first_lines: list[str] = field(default_factory=list[str])
    comments: int = 0
    error_lengths: list[int] = field(default_factory=list[int])

    def add(self, words: Self) -> None:
        """Add the measures of a file."""
        self.lines += words.lines
        self.names += words.names
        self.first_lines += words.first_lines
        self.comments += words.comments
        self.error_lengths += words.error_lengths

    @property
    def vague(self) -> float:
        """Vague names, in percent of all bindings."""
        return _percentage(map(is_vague, self.names))

    @property
    def riddles(self) -> float:
        """First lines of docstrings that point elsewhere, in percent."""
        return _percentage(POINTERS.search(line) is not None for line in self.first_lines)

    @property
    def comments_per_thousand(self) -> float:
        """Comments on lines of their own, for each thousand lines."""
        return 1000 * self.comments / max(1, self.lines)

    def errors_at(self, share: float) -> int:
        """Return the number of words that this share of the error messages does not exceed."""
        lengths = sorted(self.error_lengths) or [0]
        return lengths[min(int(share * len(lengths)), len(lengths) - 1)]


def _percentage(flags: Iterable[bool]) -> float:
    flags = list(flags)
    return 100 * sum(flags) / max(1, len(flags))


def is_vague(name: str) -> bool:
    """Whether every word of a name is vague, as in `found` and `_made_one`, and not in `last_reader`."""
    parts = [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]
    return bool(parts) and VAGUE_WORDS.issuperset(parts)


def bound_names(nodes: Sequence[ast.AST]) -> Iterator[str]:
    """Yield each name that a module binds: variables, parameters, functions and classes."""
    for node in nodes:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, Definition):
            yield node.name


def error_lengths(nodes: Sequence[ast.AST]) -> Iterator[int]:
    """Yield the number of words of each message that stands in a `raise`; a placeholder counts as one word."""
    for node in nodes:
        if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args):
            continue
        message = node.exc.args[0]
        parts = message.values if isinstance(message, ast.JoinedStr) else [message]
        texts = [str(part.value) if isinstance(part, ast.Constant) else "{}" for part in parts]
        if any(isinstance(part, ast.Constant) and isinstance(part.value, str) for part in parts):
            yield len("".join(texts).split())


def measure(file: Path) -> RoomWords:
    """Measure one file."""
    source = file.read_text()
    nodes = [*ast.walk(ast.parse(source))]
    docstrings = (ast.get_docstring(node) for node in nodes if isinstance(node, ast.Module | Definition))
    return RoomWords(
        source.count("\n"),
        [name for name in bound_names(nodes) if name not in ("self", "cls", "_") and name[:2] != "__"],
        [docstring.partition("\n")[0] for docstring in docstrings if docstring],
        sum(
            token.line.lstrip().startswith("#") and TOOL_COMMENT.match(token.string) is None
            for token in tokenize.generate_tokens(io.StringIO(source).readline)
            if token.type == tokenize.COMMENT
        ),
        [*error_lengths(nodes)],
    )


def measure_rooms(folder: str) -> dict[str, RoomWords]:
    """Measure each room of a package, or of a folder of scripts, and all of them together under the folder's name."""
    rooms = defaultdict[str, RoomWords](RoomWords)
    for file in sorted((ROOT / folder).rglob("*.py")):
        parts, words = file.relative_to(ROOT).parts, measure(file)
        for room in (folder, "/".join(parts[:2]) if len(parts) > 2 else f"{folder}/*.py"):
            rooms[room].add(words)
    return dict(rooms)


def page_words(page: Path) -> int:
    """Count the words of a page outside its code blocks."""
    return len(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE).split())


def main() -> None:
    """Print the measures of the folders that the command names."""
    for folder in sys.argv[1:] or ("fpipe", "tests", "property_tests", "examples", "benchmarks"):
        for room, words in measure_rooms(folder).items():
            errors = [words.errors_at(share) for share in (0.5, 0.9, 1)]
            print(
                f"{room:24}{words.lines:7}{words.vague:7.1f} %{words.riddles:7.1f} %"
                f"{words.comments_per_thousand:8.1f}{errors[0]:6}{errors[1]:4}{errors[2]:4}"
            )


if __name__ == "__main__":
    main()
