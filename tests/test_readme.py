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

BFLOAT16_PAGES = ["train.md", "verify.md"]
"""Pages whose numbers are compared to within 2 %: each CPU adds up products in bfloat16 in its own order."""
FRACTION = re.compile(r"\d+\.\d+")


def assert_prints(page: Path, block: re.Match[str], printed: str) -> None:
    """Compare the output of a block with the text below it on the page."""
    expected = block["output"]
    if expected is not None and page.name in BFLOAT16_PAGES:
        numbers = [[float(number) for number in FRACTION.findall(text)] for text in (printed, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=0.02)
        printed, expected = (FRACTION.sub("#", text) for text in (printed, expected))
    if expected is not None:
        assert rstripped(printed) == rstripped(expected), f"{page.name}, below {block['code']}"


def rstripped(text: str) -> list[str]:
    return [line.rstrip() for line in text.splitlines()]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page not in notebooks.PAGES.values()], ids=lambda page: page.name
)
def test_code_blocks_run_and_print_what_the_page_shows(page, tmp_path, monkeypatch):
    text = page.read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)  # blocks may write files, and register schedules
    monkeypatch.setattr(registry, "SCHEDULE_BY_NAME", dict(registry.SCHEDULE_BY_NAME))
    namespace = {"__name__": "__main__"}
    for block in BLOCK.finditer(text):
        # Empty lines in front keep the page's line numbers, so a traceback shows the line of the page.
        lines_above = text.count("\n", 0, block.start("code"))
        code = compile("\n" * lines_above + block["code"], str(page), "exec", dont_inherit=True)
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(code, namespace)
        assert_prints(page, block, printed.getvalue())


@pytest.mark.parametrize("name", notebooks.PAGES)
def test_a_notebook_runs_and_prints_what_its_page_shows(name, tmp_path, monkeypatch):
    pytest.importorskip("jupytext")
    interactive = pytest.importorskip("IPython.core.interactiveshell")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])  # a shell has one of its own
    monkeypatch.setattr(sys, "displayhook", sys.displayhook)
    monkeypatch.setattr(registry, "SCHEDULE_BY_NAME", dict(registry.SCHEDULE_BY_NAME))
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
        assert_prints(notebooks.PAGES[name], block, printed.getvalue())


@pytest.mark.deep
def test_the_training_page_prints_the_same_on_any_number_of_processes(tmp_path):
    blocks = [*BLOCK.finditer((ROOT / "docs" / "train.md").read_text(encoding="utf-8"))]
    (tmp_path / "train.py").write_text("\n".join(block["code"] for block in blocks), encoding="utf-8")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    single_output, *parallel_outputs = (
        subprocess.run([*torchrun, count, "train.py"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for count in "124"
    )
    assert parallel_outputs == [single_output, single_output]


def test_the_readme_shows_code():
    assert BLOCK.search(README.read_text(encoding="utf-8")), "README.md has no ```python block"


def test_the_design_map_names_existing_paths():
    text = (ROOT / "docs" / "design.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:fpipe|tests|property_tests|docs|examples|benchmarks)/[\w./]*)`", text)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
