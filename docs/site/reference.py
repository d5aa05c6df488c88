"""The reference: lists of names on pages become directives, docstrings reStructuredText, names in text links to them.

A page lists names in a fence, "```{names} fpipe" above them, and each becomes its docstring; "```{help} show" becomes
what `python -m fpipe show --help` prints. No part of this imports Sphinx, so that the tests can look at it without.
"""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "reference"
NAMES = re.compile(r"^```\{names\} (?P<home>[\w.]+)\n(?P<names>.*?)^```$", re.M | re.S)
HELP = re.compile(r"^```\{help\}(?P<words>[^\n]*)\n```$", re.M)
# A page may be a file at the root; what pages and these say of each other is then a link within the site.
WHOLE = re.compile(r"^```\{include\} \.\./(?P<file>\w+\.md)\n```$", re.M)
AT_ROOT = {"README": "tour", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog", "SECURITY": "security"}
LINK = re.compile(rf"\]\((?:\.\./)?(?P<file>{'|'.join(AT_ROOT)})\.md")
SECTIONS = {"Args:": "Arguments", "Attributes:": "Attributes", "Returns:": "Returns", "Raises:": "Raises"}
FACT = re.compile(r"(Source|Idle|Peak|Accepts): ")
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"(?:fpipe\.)?(?P<name>[A-Za-z]\w*(?:\.[A-Za-z]\w*)*)(?P<call>\(.*\))?", re.S)


@cache
def public() -> dict[str, str]:
    """Every name on a page of the reference: `{"simulate": "fpipe.simulate", "zb_h1": "fpipe.schedules.zb_h1"}`."""
    found: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")):
        for block in NAMES.finditer(page.read_text(encoding="utf-8")):
            for name in block["names"].split():
                full = f"{block['home']}.{name}"
                found[full.removeprefix("fpipe.")] = full
                if name not in found or len(full) < len(found[name]):
                    found[name] = full
    return found


def commands() -> list[str]:
    """The commands of the shell of which a page shows the help."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    return [block["words"].strip() for page in pages for block in HELP.finditer(page)]


def named(full: str) -> Any:
    """The object of a name such as "fpipe.schedules.zb_h1"; None where there is none."""
    home, _, name = full.rpartition(".")
    value = getattr(importlib.import_module(home), name, None)
    if value is None:  # a package does not import all of its modules
        with suppress(ModuleNotFoundError):
            value = importlib.import_module(full)
    return value


def expand(app: Any, page: str, source: list[str]) -> None:
    """Lists of names as directives of autodoc, commands as what their --help prints, and files at the root."""
    source[0] = WHOLE.sub(lambda whole: (ROOT / whole["file"]).read_text(encoding="utf-8"), source[0])
    source[0] = source[0].replace("](docs/", "](")
    source[0] = LINK.sub(lambda link: f"]({AT_ROOT[link['file']]}.md", source[0])
    source[0] = NAMES.sub(lambda block: "\n".join(_directives(block["home"], block["names"].split())), source[0])
    source[0] = HELP.sub(lambda block: f"```text\n{help_of(block['words'].split())}\n```", source[0])


def _directives(home: str, names: list[str]) -> Iterator[str]:
    yield "```{eval-rst}"
    for name in names:
        found = getattr(importlib.import_module(home), name)
        kind = "class" if inspect.isclass(found) else "function"
        kind = "exception" if inspect.isclass(found) and issubclass(found, BaseException) else kind
        yield f".. auto{kind}:: {home}::{name}"
        yield from ["   :members:", "   :special-members: __call__"] * inspect.isclass(found)
        yield ""
    yield "```"


def help_of(words: list[str]) -> str:
    """What a command prints with --help."""
    import typer

    from fpipe.cli.app import app

    command, context = typer.main.get_command(app), None
    for word in ("python -m fpipe", *words):
        command = command if context is None else command.commands[word]
        context = command.make_context(word, [], context, resilient_parsing=True, terminal_width=100)
    return command.get_help(context)


def restructure(app: Any, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring of ours as reStructuredText, in place."""
    blocks = "\n".join(lines).split("\n\n")
    lines[:] = "\n\n".join(_block(block) for block in blocks).split("\n")


def _block(block: str) -> str:
    """A paragraph, a list, a section or a doctest."""
    head = block.lstrip("\n").split("\n")[0]
    if head.lstrip().startswith(">>>"):
        return block
    if head in SECTIONS:
        body = block.lstrip("\n").split("\n")[1:]
        return f":{SECTIONS[head]}:\n" + "\n".join(_entries(head, body))
    text = escape(block)
    if not FACT.match(head):
        return text
    return "\n".join(f":{line}" if FACT.match(line) else f"    {line}" for line in text.split("\n"))


def _entries(head: str, body: list[str]) -> Iterator[str]:
    """The entries of a section, a list item each; what a function returns is text."""
    text = escape("\n".join(body)).split("\n")
    for line in text:
        entry = re.match(r"    (\S[^:]*): (.*)", line)
        if head == "Returns:" or entry is None:
            yield line if head == "Returns:" else f"      {line[8:]}"
        else:
            yield f"    - ``{entry[1]}``: {entry[2]}"


def escape(text: str) -> str:
    """Our text, in which one backtick is around code, as reStructuredText, in which two are."""
    parts = CODE.split(text)
    for at, part in enumerate(parts):
        parts[at] = f"``{part}``" if at % 2 else re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", part)
    return "".join(parts)


def target(code: str) -> str | None:
    """The public name that code in a text is about: `fpipe.simulate`, `split(8)`, `Timeline.peak`; None for others."""
    found = NAME.fullmatch(code)
    if found is None or code.endswith(".py"):
        return None
    name = found["name"]
    plain = re.fullmatch(r"[a-z0-9]+", name) and found["call"] is None and not code.startswith("fpipe.")
    while name and name not in public():
        name = name.rpartition(".")[0]
    return None if plain else public().get(name)


def elsewhere(code: str) -> str | None:
    """The dotted name in torch or in Python's library that code in a text is about: `torch.where(mask, x, y)`."""
    found = NAME.fullmatch(code)
    name = found["name"] if found is not None and not code.endswith(".py") else ""
    home, dot, _ = name.partition(".")
    return name if dot and (home == "torch" or home in sys.stdlib_module_names) else None
