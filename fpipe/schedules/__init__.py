"""Sizes -> Transform: the schedules people say by name, and tables of your own."""

from fpipe.schedules.basic import gpipe, one_f_one_b
from fpipe.schedules.dual import dualpipe, dualpipev
from fpipe.schedules.generator import from_generator
from fpipe.schedules.priority import from_priority
from fpipe.schedules.registry import Schedule, about, get, names, register
from fpipe.schedules.sequences import seq1f1b
from fpipe.schedules.tables import from_table
from fpipe.schedules.waves import chimera, hanayo

__all__ = [
    "Schedule",
    "about",
    "chimera",
    "dualpipe",
    "dualpipev",
    "from_generator",
    "from_priority",
    "from_table",
    "get",
    "gpipe",
    "hanayo",
    "names",
    "one_f_one_b",
    "register",
    "seq1f1b",
]
