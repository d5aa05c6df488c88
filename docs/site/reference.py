"""Build the reference: turn lists of names into directives, docstrings into reStructuredText, and names into links.

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
INCLUDE = re.compile(r"^```\{include\} \.\./(?P<file>\w+\.md)\n```$", re.M)
AT_ROOT = {"README": "tour", "CONTRIBUTING": "contributing", "CHANGELOG": "changelog", "SECURITY": "security"}
LINK = re.compile(rf"\]\((?:\.\./)?(?P<file>{'|'.join(AT_ROOT)})\.md")
SECTIONS = {"Args:": "Arguments", "Attributes:": "Attributes", "Returns:": "Returns", "Raises:": "Raises"}
FACT = re.compile(r"(Source|Idle|Peak|Accepts): ")
CODE = re.compile(r"`([^`]+)`")
NAME = re.compile(r"(?:fpipe\.)?(?P<name>[A-Za-z]\w*(?:\.[A-Za-z]\w*)*)(?P<call>\(.*\))?", re.S)


@cache
def public() -> dict[str, str]:
    """Return full names on reference pages: `{"simulate": "fpipe.simulate", "zb_h1": "fpipe.schedules.zb_h1"}`."""
    full_names: dict[str, str] = {}
    for page in sorted(PAGES.glob("*.md")):
        for block in NAMES.finditer(page.read_text(encoding="utf-8")):
            for name in block["names"].split():
                full = f"{block['home']}.{name}"
                full_names[full.removeprefix("fpipe.")] = full
                if name not in full_names or len(full) < len(full_names[name]):
                    full_names[name] = full
    return full_names


def commands() -> list[str]:
    """Return the shell commands whose help a page shows."""
    pages = (page.read_text(encoding="utf-8") for page in sorted(PAGES.glob("*.md")))
    return [block["words"].strip() for page in pages for block in HELP.finditer(page)]


def named(full: str) -> Any:
    """Return the object with a name such as "fpipe.schedules.zb_h1", or None."""
    home, _, name = full.rpartition(".")
    value = getattr(importlib.import_module(home), name, None)
    if value is None:  # a package does not import all of its modules
        with suppress(ModuleNotFoundError):
            value = importlib.import_module(full)
    return value


def expand(app: Any, page: str, source: list[str]) -> None:
    """Replace lists of names by autodoc directives, commands by their --help, and includes by the files at the root."""
    source[0] = INCLUDE.sub(lambda include: (ROOT / include["file"]).read_text(encoding="utf-8"), source[0])
    source[0] = source[0].replace("](docs/", "](")
    source[0] = LINK.sub(lambda link: f"]({AT_ROOT[link['file']]}.md", source[0])
    source[0] = NAMES.sub(lambda block: "\n".join(_directives(block["home"], block["names"].split())), source[0])
    source[0] = HELP.sub(lambda block: f"```text\n{help_of(block['words'].split())}\n```", source[0])


def _directives(home: str, names: list[str]) -> Iterator[str]:
    yield "```{eval-rst}"
    for name in names:
        value = getattr(importlib.import_module(home), name)
        kind = "class" if inspect.isclass(value) else "function"
        kind = "exception" if inspect.isclass(value) and issubclass(value, BaseException) else kind
        yield f".. auto{kind}:: {home}::{name}"
        yield from ["   :members:", "   :special-members: __call__"] * inspect.isclass(value)
        yield ""
    yield "```"


def help_of(command_path: list[str]) -> str:
    """Return the text that a command prints with --help."""
    import typer

    from fpipe.cli.app import app

    command, context = typer.main.get_command(app), None
    for name in ("python -m fpipe", *command_path):
        command = command if context is None else command.commands[name]
        context = command.make_context(name, [], context, resilient_parsing=True, terminal_width=100)
    return command.get_help(context)


def restructure(app: Any, object_kind: str, name: str, documented: Any, options: Any, lines: list[str]) -> None:
    """Rewrite a docstring of ours as reStructuredText, in place."""
    blocks = "\n".join(lines).split("\n\n")
    lines[:] = "\n\n".join(_block(block) for block in blocks).split("\n")


def _block(block: str) -> str:
    """Convert a paragraph, a list, a section or a doctest."""
    head = block.lstrip("\n").split("\n")[0]
    if head.lstrip().startswith(">>>"):
        return block
    if head in SECTIONS:
        body = block.lstrip("\n").split("\n")[1:]
        return f":{SECTIONS[head]}:\n" + "\n".join(_section_lines(head, body))
    text = escape(block)
    if not FACT.match(head):
        return text
    return "\n".join(f":{line}" if FACT.match(line) else f"    {line}" for line in text.split("\n"))


def _section_lines(head: str, body: list[str]) -> Iterator[str]:
    """Convert the entries of a section to list items; `Returns:` stays text."""
    text = escape("\n".join(body)).split("\n")
    for line in text:
        match = re.match(r"    (\S[^:]*): (.*)", line)
        if head == "Returns:" or match is None:
            yield line if head == "Returns:" else f"      {line[8:]}"
        else:
            yield f"    - ``{match[1]}``: {match[2]}"


def escape(text: str) -> str:
    """Convert text with one backtick around code to reStructuredText, which has two."""
    parts = CODE.split(text)
    for index, part in enumerate(parts):
        parts[index] = f"``{part}``" if index % 2 else re.sub(r"[*|\\]|(?<=\w)_(?!\w)", r"\\\g<0>", part)
    return "".join(parts)


def target(code: str) -> str | None:
    """Return the public name in code such as `fpipe.simulate`, `split(8)` or `Timeline.peak`, or None."""
    match = NAME.fullmatch(code)
    if match is None or code.endswith(".py"):
        return None
    name = match["name"]
    plain = re.fullmatch(r"[a-z0-9]+", name) and match["call"] is None and not code.startswith("fpipe.")
    while name and name not in public():
        name = name.rpartition(".")[0]
    return None if plain else public().get(name)


def elsewhere(code: str) -> str | None:
    """Return the dotted name of torch or of Python's library in code such as `torch.where(mask, x, y)`, or None."""
    match = NAME.fullmatch(code)
    name = match["name"] if match is not None and not code.endswith(".py") else ""
    home, dot, _ = name.partition(".")
    return name if dot and (home == "torch" or home in sys.stdlib_module_names) else None
