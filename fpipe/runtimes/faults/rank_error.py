"""Raise on every rank when one has failed: all ranks of a step end together."""

from __future__ import annotations


class RankError(RuntimeError):
    """Another rank failed: its number, op and error are in the message. The next step works.

    >>> import fpipe
    >>> raise fpipe.RankError("rank 1 failed in its 1F2 of step 9: ValueError: no such word")
    Traceback (most recent call last):
    fpipe.runtimes.faults.rank_error.RankError: rank 1 failed in its 1F2 of step 9: ValueError: no such word
    """


class LostRank(RankError):
    """A rank is gone, or was not heard of in time. Its process group cannot be used any longer."""
