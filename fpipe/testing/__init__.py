"""Check a schedule against every law that schedules obey."""

from fpipe.limits import check_public_functions
from fpipe.testing.laws import BrokenLaw, Checked, check_schedule

__all__ = ["BrokenLaw", "Checked", "check_schedule"]
check_public_functions(globals())


def __dir__() -> list[str]:
    """Return the public names, without the module that defines them."""
    return __all__
