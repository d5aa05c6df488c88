"""Run the README's first example where only a wheel, torch and optree are installed, no numpy, as `make dist` does."""

import contextlib
import importlib.util
import io
import re
import warnings
from pathlib import Path

PAGE = Path(__file__).parents[1] / "README.md"
FIRST_EXAMPLE = re.compile(r"```python\n(.*?)```\s*```text\n(.*?)```", re.S)


def main() -> None:
    code, output = FIRST_EXAMPLE.search(PAGE.read_text(encoding="utf-8")).groups()
    warnings.simplefilter("error")  # a warning of ours is a mistake here
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(code, {"__name__": "__main__"})
    assert [line.rstrip() for line in printed.getvalue().splitlines()] == output.splitlines(), printed.getvalue()
    origin = importlib.util.find_spec("fpipe").origin
    assert "site-packages" in origin, origin
    assert importlib.util.find_spec("numpy") is None, "numpy is here, which the example is to do without"
    print(f"README.md's first example runs on {origin}")


if __name__ == "__main__":
    main()
