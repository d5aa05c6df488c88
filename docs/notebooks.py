"""Write notebooks from pages: `python -m docs.notebooks build/notebooks`.

A block of Python is a cell to run, the rest is text. What a page shows as output is left out, since a notebook shows
its own; links lead to the site, as `make site` builds it beside the notebooks.
"""

import re
import sys
from pathlib import Path
from typing import Any

from docs.site import reference

PAGES = {name: reference.ROOT / page for name, page in {
    "start": "README.md",
    "your_own_schedule": "docs/your_own.md",
    "train_a_real_model": "docs/train.md",
}.items()}  # fmt: skip
OUTPUT = re.compile(r"^```text\n.*?^```$", re.M | re.S)
LINK = re.compile(r"\]\((?!https?:|#)(?P<page>[\w/]+)\.md(?P<mark>#[\w-]+)?\)")


def notebook(page: Path) -> Any:
    """Convert a page to a notebook of nbformat 4.5."""
    import jupytext

    source = [page.read_text(encoding="utf-8")]
    reference.expand(None, page.stem, source)
    text = OUTPUT.sub("", source[0]).replace("](pictures/", "](../site/_images/")
    converted = jupytext.reads(LINK.sub(r"](../site/\g<page>.html\g<mark>)", text), fmt="md")
    converted.cells = [cell for cell in converted.cells if cell.source.strip()]
    for number, cell in enumerate(converted.cells):
        cell.id, cell.metadata = f"cell-{number}", {}
    converted.metadata = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    converted.nbformat_minor = 5
    return converted


def write(folder: Path) -> list[Path]:
    """Write the notebooks of all pages into a folder."""
    import jupytext

    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / f"{name}.ipynb" for name in PAGES]
    for file, page in zip(files, PAGES.values(), strict=True):
        jupytext.write(notebook(page), file)
    return files


if __name__ == "__main__":
    print(*write(Path(sys.argv[1])), sep="\n")
