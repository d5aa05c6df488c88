"""Configure the site: Sphinx over the pages of docs/. `make site` builds it.

Nothing is fetched, and no code of a page runs: the tests run it. Links to the source go to `[project.urls] Source` of
pyproject.toml, or where there is none to a page of the site. python.inv has the classes, exceptions, functions and
modules of the objects.inv in Python's own documentation, torch.txt the names of torch that we use.
"""

import re
import tomllib
from pathlib import Path

from sphinx import addnodes
from sphinx.pycode import ModuleAnalyzer

from docs.site import inventory, names, reference

FOLDER = Path(__file__).parent
ROOT = FOLDER.parents[1]
META = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
SOURCE = META.get("urls", {}).get("Source", "").rstrip("/")

project = "fpipe"
author = META["authors"][0]["name"]
project_copyright = author
release = version = META["version"]

root_doc = "index"
exclude_patterns = ["site", "pictures"]
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode" if SOURCE else "sphinx.ext.viewcode",
]
suppress_warnings = ["misc.highlighting_failure"]
myst_heading_anchors = 3
myst_links_external_new_tab = False
default_role = "code"
highlight_language = "text"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88
TORCH = ROOT / "build" / "torch.inv"
TORCH.parent.mkdir(exist_ok=True)
TORCH.write_bytes(inventory.inventory("torch", (FOLDER / "torch.txt").read_text(encoding="utf-8")))
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(FOLDER / "python.inv")),
    "torch": ("https://docs.pytorch.org/docs/stable", str(TORCH)),
}

html_theme = "pydata_sphinx_theme"
html_title = f"fpipe {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
templates_path = ["templates"]
html_sidebars = {"**": ["pages.html"]}
html_show_sourcelink = False
html_show_search_summary = False  # fetched page by page, which a browser refuses for files on disk
html_copy_source = False
html_context = {"default_mode": "auto"}
toc_object_entries_show_parents = "hide"
html_theme_options = {
    "logo": {"text": "fpipe"},
    "navbar_center": [],
    "navbar_persistent": ["search-button"],
    "show_prev_next": True,
    "show_toc_level": 2,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "tango",
    "pygments_dark_style": "github-dark",
}


def linkcode_resolve(domain: str, name_parts: dict[str, str]) -> str | None:
    """Return the address of a name's lines in the repository."""
    if domain != "py":
        return None
    container = reference.named(f"{name_parts['module']}.{name_parts['fullname'].partition('.')[0]}")
    module = ModuleAnalyzer.for_module(container.__module__)
    module.analyze()
    _, first_line, last_line = module.tags.get(name_parts["fullname"], ("", 0, 0))
    file = Path(module.srcname).relative_to(ROOT)
    return f"{SOURCE}/blob/v{release}/{file}#L{first_line}-L{last_line}" if first_line else None


def readable_signature(app, object_kind, name, documented, options, signature, returns):
    """Write a default without text, such as a field's factory, as dots: Sphinx parses a signature as Python."""
    return (re.sub(r"<.*?>+", "...", signature), returns) if signature else None


def skip_alias_fields(app, object_kind, name, documented, skip, options):
    """Skip a named tuple's fields without docstrings of ours: the signature names them."""
    return True if (getattr(documented, "__doc__", "") or "").startswith("Alias for field number") else None


def add_anchors(app, doctree):
    """Add an anchor for each package above a name's module: viewcode links all names of a module by one of these."""
    for signature in doctree.findall(addnodes.desc_signature):
        packages = signature["module"].split(".")[:-1]
        signature["ids"] += [".".join([*packages[:end], signature["fullname"]]) for end in range(1, len(packages) + 1)]


def setup(app):
    """Expand lists of names, restructure docstrings, link names."""
    app.connect("doctree-read", add_anchors)
    app.connect("autodoc-process-signature", readable_signature)
    app.connect("autodoc-skip-member", skip_alias_fields)
    app.connect("source-read", reference.expand)
    app.add_post_transform(names.LinkNames)
    app.connect("autodoc-process-docstring", reference.restructure, priority=100)
