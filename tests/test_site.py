"""The reference on the site: every public name, attribute and command is on a page, with words and an example."""

import inspect
import operator
import re
import sys
import zlib
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import fpipe
import fpipe.callbacks
import fpipe.testing
from docs.site import inventory, links, reference
from fpipe.cli.app import COMMANDS
from fpipe.interop import torch_pipelining

PAGES = sorted(reference.ROOT.glob("docs/*.md"))


def public_names_of(module) -> list[str]:
    """Return the names that a module lists as public, or its own functions if it lists none."""
    listed = getattr(module, "__all__", None) or [
        name
        for name, member in vars(module).items()
        if inspect.isfunction(member) and member.__module__ == module.__name__ and not name.startswith("_")
    ]
    return [f"{module.__name__}.{name}" for name in listed]


MODULES = (fpipe, fpipe.schedules, fpipe.interop, fpipe.callbacks, fpipe.testing, torch_pipelining)
PUBLIC = {name for module in MODULES for name in public_names_of(module) if not inspect.ismodule(reference.named(name))}
# Rows of what public names return.
ROWS = """
fpipe.finding.search_result.NamedRow fpipe.planning.run_plan.PlanRow fpipe.timing.lanes.Transfer
fpipe.timing.waiting.Event fpipe.timing.waiting.PathStep fpipe.timing.waiting.Wait
"""


def test_every_public_name_is_in_the_reference_and_nothing_else():
    assert set(reference.public().values()) == PUBLIC | {*ROWS.split()}


def test_every_docstring_in_the_reference_has_an_example():
    assert {name for name in PUBLIC if ">>> " not in (inspect.getdoc(reference.named(name)) or "")} == set()


@pytest.mark.parametrize(
    "holder", [fpipe.Result, fpipe.Timeline, fpipe.SearchResult, fpipe.RunPlan, fpipe.schedules.RankState]
)
def test_every_attribute_is_described(holder):
    """An attribute is described by its own docstring, or in the list or text of the class's docstring."""
    attributes = [name for name in vars(holder) if not name.startswith("_")]
    names = {*attributes, *(field.name for field in fields(holder))} if is_dataclass(holder) else {*holder._fields}
    listed = re.findall(r"^    ([a-z_, ]+): ", inspect.getdoc(holder), re.M)
    listed = {name for line in listed for name in line.split(", ")} | {*re.findall(r"`(\w+)`", inspect.getdoc(holder))}
    assert {name for name in names - listed if not has_docstring(holder, name)} == set()


def has_docstring(holder, name: str) -> bool:
    attribute = inspect.getattr_static(holder, name, None)
    return bool(callable(attribute) or isinstance(attribute, property) or hasattr(attribute, "attrname")) and bool(
        attribute.__doc__
    )


def test_every_command_has_its_help_on_a_page():
    commands = {command.__name__.replace("_", "-") for command in COMMANDS} | {"plan run", ""}
    assert set(reference.commands()) == commands
    assert "--microbatches" in reference.help_of(["show"])


def test_a_docstring_becomes_restructured_text():
    lines = inspect.getdoc(fpipe.checkpoint).split("\n")
    reference.restructure(None, "function", "fpipe.checkpoint", fpipe.checkpoint, None, lines)
    text = "\n".join(lines)
    assert ":Arguments:\n    - ``policy``: for which forwards" in text
    assert "``f(stage, microbatch) -> bool``" in text
    assert ":Raises:\n    - ``ValueError``: another policy or grain." in text
    assert reference.escape("a `b*` and *args, x_") == r"a ``b*`` and \*args, x\_"
    lines = inspect.getdoc(fpipe.schedules.gpipe).split("\n")
    reference.restructure(None, "function", "fpipe.schedules.gpipe", fpipe.schedules.gpipe, None, lines)
    assert ":Source: Huang et al. 2019, figure 2c" in lines


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ("fpipe.simulate", "fpipe.simulate"),
        ("split(8)", "fpipe.split"),
        ("Timeline.peak", "fpipe.Timeline"),
        ("zb_h1", "fpipe.schedules.zb_h1"),
        ("split", None),  # a word, too
        ("torch.optim", None),
        ("program.py", None),
    ],
)
def test_code_in_a_text_links_to_its_public_name(code, name):
    assert reference.target(code) == name


def test_names_of_torch_in_the_pages_and_docstrings_are_in_its_inventory_and_in_torch():
    """Private names and names of ops are left out."""
    listed = {row[0] for row in rows_of((reference.ROOT / "docs/site/torch.txt").read_bytes().decode())}
    texts = [page.read_text(encoding="utf-8") for page in [*PAGES, reference.ROOT / "README.md"]]
    texts += [inspect.getdoc(reference.named(name)) or "" for name in PUBLIC]
    used = {reference.elsewhere(code) or "" for text in texts for code in reference.CODE.findall(text)}
    public = {name for name in used if name.startswith("torch.") and not re.search(r"\._|\.ops\.", name)}
    assert public - listed == set()
    assert {name for name in listed if name.startswith("torch.") and reference.named(name) is None} == set()


def rows_of(lines: str) -> list[list[str]]:
    """Return name, kind, version, page and title that Sphinx reads of each line."""
    head, packed = inventory.inventory("torch", lines).split(b"zlib.\n", 1)
    assert head.startswith(b"# Sphinx inventory version 2\n# Project: torch\n")
    return [row.split() for row in zlib.decompress(packed).decode().splitlines()]


def test_a_name_without_a_mark_is_one_on_its_page():
    assert rows_of("# a\nx.y class a.html\ny module b.html#module-y\n") == [
        ["x.y", "py:class", "1", "a.html#x.y", "-"],
        ["y", "py:module", "1", "b.html#module-y", "-"],
    ]


def test_the_readme_is_a_page_of_the_site():
    source = ["```{include} ../README.md\n```\n"]
    reference.expand(None, "tour", source)
    assert source[0].startswith("# fpipe")
    assert "](docs/" not in source[0]
    assert "](contributing.md)" in source[0]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_first_paragraph_of_a_page_names_its_kind(page):
    paragraphs = [part for part in page.read_text(encoding="utf-8").split("\n\n") if not part.startswith(("#", "```"))]
    assert not paragraphs or re.match(r"\*(Start|How to|Reference|Why)\.\* [A-Z`f]", paragraphs[0])


def test_dead_links_are_listed(tmp_path: Path):
    (tmp_path / "a.html").write_text(
        '<a id="top" href="b.html#there">b</a> <a href="#top">a</a> <a href="https://x.y">'
    )
    (tmp_path / "b.html").write_text('<a id="there" href="c.html">c</a> <a href="a.html#no">a</a>')
    assert links.dead_links(tmp_path) == {"b.html": ["a.html#no", "c.html"]}


def test_sphinx_is_not_imported():
    assert "sphinx" not in sys.modules


def test_every_page_is_in_the_list_of_pages():
    listed = {
        line.rpartition("<")[2].rstrip(">") for line in (reference.ROOT / "docs/index.md").read_text().splitlines()
    }
    assert {page.stem for page in PAGES} - listed == {"index"}


@pytest.mark.parametrize(
    "page", [*PAGES, *sorted(reference.PAGES.glob("*.md")), reference.ROOT / "README.md"], ids=lambda page: page.name
)
def test_links_between_pages_resolve(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert "://" in link or target.is_file(), link
        assert not anchor or anchor in anchors_of(target), link


def anchors_of(page: Path) -> set[str]:
    """Return the headings of a page as links write them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_list_for_coding_assistants_names_pages_and_names_that_exist():
    paths = re.findall(r"\]\(([^)]+)\)", (reference.ROOT / "llms.txt").read_text(encoding="utf-8"))
    assert len(paths) > 10
    assert [path for path in paths if not (reference.ROOT / path).is_file()] == []
    page = (reference.ROOT / "docs" / "assistants.md").read_text(encoding="utf-8")
    dotted_names = set(re.findall(r"fpipe\.([a-zA-Z_.0-9]+)", page))
    assert {"build", "schedules.one_f_one_b", "from_module"} <= dotted_names
    for dotted_name in dotted_names:
        operator.attrgetter(dotted_name)(fpipe)
