"""The site: Sphinx over the pages of docs/ as they are. `make site` builds it.

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

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
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
TORCH.write_bytes(inventory.inventory("torch", (HERE / "torch.txt").read_text(encoding="utf-8")))
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", str(HERE / "python.inv")),
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


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """The lines of a name in the repository."""
    if domain != "py":
        return None
    outer = reference.named(f"{info['module']}.{info['fullname'].partition('.')[0]}")
    module = ModuleAnalyzer.for_module(outer.__module__)
    module.analyze()
    _, first, last = module.tags.get(info["fullname"], ("", 0, 0))
    file = Path(module.srcname).relative_to(ROOT)
    return f"{SOURCE}/blob/v{release}/{file}#L{first}-L{last}" if first else None


def readable(app, what, name, found, options, signature, returns):
    """A default that has no text, such as a field's factory, as dots: Sphinx reads a signature as Python."""
    return (re.sub(r"<.*?>+", "...", signature), returns) if signature else None


def without_words(app, what, name, found, skip, options):
    """Whether a member has no words of ours: a field of a named tuple, which the signature names."""
    return True if (getattr(found, "__doc__", "") or "").startswith("Alias for field number") else None


def mark(app, doctree):
    """Mark a name by each package above its module too: viewcode links back to all names of a module by one of them."""
    for signature in doctree.findall(addnodes.desc_signature):
        above = signature["module"].split(".")[:-1]
        signature["ids"] += [".".join([*above[:end], signature["fullname"]]) for end in range(1, len(above) + 1)]


def setup(app):
    """Expand lists of names, restructure docstrings, link names."""
    app.connect("doctree-read", mark)
    app.connect("autodoc-process-signature", readable)
    app.connect("autodoc-skip-member", without_words)
    app.connect("source-read", reference.expand)
    app.add_post_transform(names.LinkNames)
    app.connect("autodoc-process-docstring", reference.restructure, priority=100)
