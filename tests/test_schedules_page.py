"""docs/schedules.md says what the registry says."""

import runpy
from pathlib import Path

import fpipe

SCRIPT = Path(__file__).parents[1] / "docs" / "schedules.py"


def test_the_page_is_what_the_registry_gives():
    page = SCRIPT.with_suffix(".md").read_text()
    assert [name for name in fpipe.schedules.names() if f"\n## {name}\n" not in page] == [], "run `make docs`"
    assert runpy.run_path(str(SCRIPT))["page"]().splitlines() == page.splitlines(), "run `make docs`"
