"""Sizes -> Transform: the schedules people say by name, and tables of your own."""

from fpipe.schedules.basic import gpipe, one_f_one_b
from fpipe.schedules.generator import from_generator
from fpipe.schedules.priority import from_priority
from fpipe.schedules.registry import Schedule, about, get, names, register
from fpipe.schedules.tables import from_table

__all__ = [
    "Schedule",
    "about",
    "from_generator",
    "from_priority",
    "from_table",
    "get",
    "gpipe",
    "names",
    "one_f_one_b",
    "register",
]
