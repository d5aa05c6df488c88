"""Find links of a built site that lead nowhere: `python docs/site/links.py build/site` fails if there is one."""

import sys
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag


class Page(HTMLParser):
    """The links of a page, and what can be linked to."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.links, self.marks = set[str](), {""}
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Keep what a tag links to, and its name."""
        of = dict(attrs)
        self.links |= {str(of[word]) for word in ("href", "src") if of.get(word)}
        self.marks |= {str(of[word]) for word in ("id", "name") if of.get(word)}


def dead(folder: Path) -> dict[str, list[str]]:
    """The links of each page within the site that lead to no file, or to no mark on a page."""
    pages = {file.resolve(): Page(file) for file in folder.rglob("*.html") if "_static" not in file.parts}
    found = defaultdict[str, list[str]](list)
    for file, page in pages.items():
        for link in sorted(page.links):
            path, mark = urldefrag(link.partition("?")[0] if "#" not in link else link)
            if ":" in path.partition("/")[0]:  # https:, mailto:, data:
                continue
            to = (file.parent / unquote(path)).resolve() if path else file
            if not to.is_file() or (to in pages and unquote(mark) not in pages[to].marks):
                found[str(file.relative_to(folder.resolve()))].append(link)
    return found


if __name__ == "__main__":
    wrong = dead(Path(sys.argv[1]))
    for name, links in wrong.items():
        print(f"{name}: {', '.join(links)}")
    sys.exit(f"{sum(map(len, wrong.values()))} links lead nowhere" if wrong else 0)
