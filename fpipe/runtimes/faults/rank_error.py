"""Raise on every rank when one has failed: the run is over for all of them."""

from __future__ import annotations


class RankError(RuntimeError):
    """Another rank failed, is gone or hangs: its number, op and reason are in the message. The run is over.

    >>> import fpipe
    >>> raise fpipe.RankError("rank 1 failed in its 1F2 of step 9: ValueError: no such word")
    Traceback (most recent call last):
    fpipe.runtimes.faults.rank_error.RankError: rank 1 failed in its 1F2 of step 9: ValueError: no such word
    """
