"""The command line: `fpipe --help`, or `python -m fpipe --help`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path


def main() -> None:
    """Run the command line with the arguments of this process."""
    try:
        from fpipe.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"the command line needs {error.name}, which is not installed: pip install rich typer.")
    # `fpipe .. | head` closes the pipe. The default action ends the process silently; Python's would print a traceback.
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    app(prog_name="fpipe" if Path(sys.argv[0]).stem == "fpipe" else "python -m fpipe")


if __name__ == "__main__":
    main()
