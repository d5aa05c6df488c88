"""Find links of a built site that lead nowhere: `python docs/site/links.py build/site` fails if there is one."""

import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag


class Page(HTMLParser):
    """The links of a page, and its anchors."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links, self.marks = set[str](), {""}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Collect a tag's links and anchors."""
        attributes = dict(attrs)
        self.links |= {str(attributes[name]) for name in ("href", "src") if attributes.get(name)}
        self.marks |= {str(attributes[name]) for name in ("id", "name") if attributes.get(name)}


def dead_links(folder: Path) -> dict[str, list[str]]:
    """Return the links of each page within the site that lead to no file or to no anchor."""
    pages = {file.resolve(): Page(file) for file in folder.rglob("*.html") if "_static" not in file.parts}
    links_by_page = defaultdict[str, list[str]](list)
    for file, page in pages.items():
        for link in sorted(page.links):
            path, mark = urldefrag(link.partition("?")[0] if "#" not in link else link)
            if ":" in path.partition("/")[0]:  # https:, mailto:, data:
                continue
            target = (file.parent / unquote(path)).resolve() if path else file
            if not target.is_file() or (target in pages and unquote(mark) not in pages[target].marks):
                links_by_page[str(file.relative_to(folder.resolve()))].append(link)
    return links_by_page


if __name__ == "__main__":
    wrong = dead_links(Path(sys.argv[1]))
    for name, links in wrong.items():
        print(f"{name}: {', '.join(links)}")
    sys.exit(f"{sum(map(len, wrong.values()))} links lead nowhere" if wrong else 0)
