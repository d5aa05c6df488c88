"""The command line: `fpipe --help`, or `python -m fpipe --help`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def main() -> None:
    """Run one command, with what was typed."""
    try:
        from fpipe.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {error.name}, which is not installed: pip install 'fpipe[cli]'.")
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends us without a word, as it ends any other tool
    app(prog_name="fpipe" if Path(sys.argv[0]).stem == "fpipe" else "python -m fpipe")


if __name__ == "__main__":
    main()
