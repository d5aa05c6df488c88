"""Docstrings name all parameters, transforms and schedules draw their result, and readings have a page."""

import inspect
import re
import runpy
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fpipe
from fpipe import interop

DOCS = Path(__file__).parents[1] / "docs"
PAGES = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md")))
PUBLIC: dict[str, Any] = {
    f"{prefix}{name}": getattr(module, name)
    for module, prefix in ((fpipe, "fpipe."), (fpipe.schedules, "fpipe.schedules."), (interop, "fpipe.interop."))
    for name in module.__all__
    if not isinstance(getattr(module, name), ModuleType)
} | {
    f"fpipe.interop.torch_pipelining.{name}": getattr(interop.torch_pipelining, name)
    for name in ("from_csv", "to_csv", "schedule", "runtime", "stages", "grads")
}
TRANSFORMS = [
    name
    for name in sorted({*fpipe.__all__} - {"identity"})
    if f"fpipe.{name}" in PUBLIC and PUBLIC[f"fpipe.{name}"].__module__.startswith("fpipe.transforms.")
]
READINGS = ["bounds", "build", "check", "linearize", "plot", "profile", "reference", "simulate", "sizes", "verify"]


def docstring_of(name: str) -> str:
    return inspect.getdoc(PUBLIC[name]) or ""


@pytest.mark.parametrize("name", [name for name, value in PUBLIC.items() if inspect.isfunction(value)])
def test_the_docstring_of_a_function_names_its_parameters(name: str):
    parameters = [
        parameter for parameter in inspect.signature(PUBLIC[name]).parameters if not parameter.startswith("_")
    ]
    if "Args:" in docstring_of(name):
        assert [
            parameter
            for parameter in parameters
            if not re.search(rf"\b{parameter}\b", docstring_of(name).partition("Args:")[2])
        ] == []
    else:
        assert len(parameters) <= 2, "more than two parameters have a list"


@pytest.mark.parametrize("name", fpipe.schedules.names())
def test_a_schedule_shows_its_grid_its_source_and_its_formulas(name: str):
    if name not in fpipe.schedules.__all__:
        pytest.skip("registered by a test")
    text = docstring_of(f"fpipe.schedules.{name}")
    assert "rank 0 |" in text
    about = fpipe.schedules.about(name)
    for line in (f"Source: {about.source}", f"Idle: {about.idle}", f"Peak: {about.peak}", f"Accepts: {about.accepts}"):
        assert line in text
    options = list(inspect.signature(PUBLIC[f"fpipe.schedules.{name}"]).parameters)[1:]
    assert not options or "Args:" in text


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_shows_before_and_after(name: str):
    module = inspect.getdoc(inspect.getmodule(PUBLIC[f"fpipe.{name}"])) or ""
    assert re.search(r"-->|rank 0 \|", docstring_of(f"fpipe.{name}") + module)


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_has_a_page(name: str):
    assert re.search(rf"\bfpipe\.{name}\(", PAGES)


def test_the_page_of_schedules_is_up_to_date():
    page = (DOCS / "schedules.md").read_text()
    assert [name for name in fpipe.schedules.names() if f"\n## {name}\n" not in page] == [], "run `make docs`"
    assert runpy.run_path(str(DOCS / "schedules.py"))["page"]().splitlines() == page.splitlines(), "run `make docs`"
