"""Sizes -> Transform: the schedules people say by name, and tables of your own."""

from fpipe.schedules.basic import gpipe, one_f_one_b
from fpipe.schedules.tables import from_table

__all__ = ["from_table", "gpipe", "one_f_one_b"]
