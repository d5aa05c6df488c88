"""The code blocks of the documentation run, and print what stands below them."""

import contextlib
import io
import re
import subprocess
import sys
from pathlib import Path

import pytest

from docs import notebooks
from fpipe.schedules import registry

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python\b[^\n]*\n(?P<code>.*?)^```[ ]*$(?:\s*^```text\n(?P<output>.*?)^```[ ]*$)?", re.M | re.S)


def rstripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in notebooks.PAGES.values()], ids=lambda page: page.name
)
def test_code_blocks_run_and_print_what_the_page_shows(page, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # blocks may write files, and register schedules
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        # Empty lines in front keep the page's line numbers, so a traceback shows the line of the page.
        above = text.count("\n", 0, block.start("code"))
        code = compile("\n" * above + block["code"], str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        if block["output"] is not None:
            assert rstripped(printed.getvalue()) == rstripped(block["output"]), f"{page.name}, line {above}"


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_runs_and_prints_what_its_page_shows(name, tmp_path, monkeypatch):
    pytest.importorskip("jupytext")
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell has one of its own
    monkeypatch.setattr(sys, "displayhook", sys.displayhook)
    monkeypatch.setattr(registry, "_SCHEDULES", dict(registry._SCHEDULES))
    shell = interactive.InteractiveShell()
    shell.history_manager.enabled = False
    cells = [
        cell["source"] for cell in notebooks.notebook(notebooks.PAGES[name])["cells"] if cell["cell_type"] == "code"
    ]
    blocks = [*BLOCK.finditer(notebooks.PAGES[name].read_text(encoding="utf-8"))]
    assert cells == [block["code"].rstrip("\n") for block in blocks]
    for code, block in zip(cells, blocks, strict=True):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            shell.run_cell(code).raise_error()
        if block["output"] is not None:
            assert rstripped(printed.getvalue()) == rstripped(block["output"]), code


@pytest.mark.deep
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_the_training_page_prints_the_same_on_any_number_of_processes(processes, tmp_path):
    blocks = [*BLOCK.finditer((ROOT / "docs" / "train.md").read_text(encoding="utf-8"))]
    (tmp_path / "train.py").write_text("\n".join(block["code"] for block in blocks), encoding="utf-8")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    printed = subprocess.run([*command, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert rstripped(printed) == rstripped("".join(block["output"] or "" for block in blocks))


def test_the_readme_shows_code():
    assert BLOCK.search(README.read_text(encoding="utf-8")), "README.md has no ```python block"


def test_the_map_names_what_is_there():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:fpipe|tests|property_tests|docs|examples|benchmarks)/[\w./]*)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
