"""Sizes -> Transform: the schedules people say by name, and tables of your own."""

from fpipe.schedules.basic import gpipe, one_f_one_b
from fpipe.schedules.registry import Schedule, about, get, names, register
from fpipe.schedules.tables import from_table

__all__ = ["Schedule", "about", "from_table", "get", "gpipe", "names", "one_f_one_b", "register"]
