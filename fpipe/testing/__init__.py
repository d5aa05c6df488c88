"""Take a schedule of your own through every law."""

from fpipe.testing.laws import BrokenLaw, Checked, check_schedule

__all__ = ["BrokenLaw", "Checked", "check_schedule"]


def __dir__() -> list[str]:
    """The public names, and not the module that they come from."""
    return __all__
