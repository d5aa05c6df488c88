"""docs/schedules.md says what the registry says."""

import importlib.util
from pathlib import Path

import fpipe

SCRIPT = Path(__file__).parents[1] / "docs" / "schedules.py"


def test_the_page_is_what_the_registry_gives():
    spec = importlib.util.spec_from_file_location("schedules_page", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    page = SCRIPT.with_suffix(".md").read_text()
    assert [name for name in fpipe.schedules.names() if f"\n## {name}\n" not in page] == [], "run `make docs`"
    assert script.page().splitlines() == page.splitlines(), "run `make docs`"
