"""Draw models, programs and legal orders for tests of your own, and take a schedule through every law."""

try:
    import hypothesis as _  # noqa: F401
except ImportError as error:
    raise ImportError(
        "fpipe.testing draws with hypothesis, which is not installed: pip install 'fpipe[testing]'."
    ) from error

from fpipe.testing.drawn_models import Net, models
from fpipe.testing.drawn_programs import DrawnProgram, graphs, legal_orders, placements, programs
from fpipe.testing.laws import BrokenLaw, Checked, check_schedule

__all__ = [
    "BrokenLaw",
    "Checked",
    "DrawnProgram",
    "Net",
    "check_schedule",
    "graphs",
    "legal_orders",
    "models",
    "placements",
    "programs",
]


def __dir__() -> list[str]:
    """The public names, and not the modules that they come from."""
    return __all__
