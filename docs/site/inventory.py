"""An inventory of another project's names, from a list of our own, as the bytes of its objects.inv."""

import zlib

HEAD = (
    "# Sphinx inventory version 2\n# Project: {}\n# Version: \n# The remainder of this file is compressed using zlib.\n"
)


def inventory(project: str, lines: str) -> bytes:
    """Return the inventory of lines `name kind page`: the anchor is the name, unless the page has one."""
    rows = [line.split() for line in lines.splitlines() if line and not line.startswith("#")]
    marked = [(name, kind, page if "#" in page else f"{page}#{name}") for name, kind, page in rows]
    body = "".join(f"{name} py:{kind} 1 {page} -\n" for name, kind, page in marked)
    return HEAD.format(project).encode() + zlib.compress(body.encode())
