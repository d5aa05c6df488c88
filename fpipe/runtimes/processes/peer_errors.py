"""Tell whoever waits for this rank what went wrong on it, in place of what they wait for.

    rank 1 fails in 1F3        -->        who meets it, waits for its messages or adds up with it: rank 1 failed in 1F3

So all ranks of a step end together, and each says who is to blame.
"""

from __future__ import annotations

from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.rank_error import LostRank, RankError
from fpipe.runtimes.processes.replicas import Replicas
from fpipe.runtimes.processes.transfers import Transfers


class PeerErrors:
    """The other ranks of a step, who meet for this replica, and `everyone` of all replicas, on boards where this one
    has a number each."""

    def __init__(self, rank: int, meeting: Meeting, replicas: Replicas | None) -> None:
        self._rank, self.meeting, self.replicas = rank, meeting, replicas
        self.everyone = meeting if replicas is None else replicas.meeting
        self.boards = [(each.board, each.at) for each in dict.fromkeys((meeting, self.everyone))]

    def refuse(self, error: BaseException, *places: str) -> str:
        """Tell those who meet there, and find what is said of it."""
        said, replicas = self._words(error), self.replicas
        if replicas is not None:
            said = replicas.first_told(said) if self.lost(error) else replicas.named(said)
            said = self.everyone.board.as_heard(said) if isinstance(error, LostRank) else said
        for place in places:
            for each in {self.meeting, self.everyone}:
                each.refuse(place, said)
        return said

    def fail(self, error: BaseException, transfers: Transfers, *places: str) -> str:
        """Refuse in the middle of a step: tell those too who wait for a message, or for a sum."""
        said, broken = self.refuse(error, *places), self.lost(error)
        if self.replicas is not None:
            self.replicas.owe()  # others of this replica may wait for those of another, which wait for these
        transfers.fail(said, broken)
        if self.replicas is not None:
            self.replicas.fail(said, broken)
        return said

    def lost(self, error: BaseException) -> bool:
        """Whether no step can follow this error."""
        return isinstance(error, LostRank) or self.meeting.watchdog.ended is not None

    def _words(self, error: BaseException) -> str:
        """An error in words for other ranks; one that came from another rank is passed on."""
        if isinstance(error, RankError):
            return str(error)
        if self.meeting.watchdog.ended is not None:
            return self.meeting.watchdog.ended
        notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
        return (
            f"rank {self._rank} failed {notes[-1] if notes else 'outside of its ops'}: {type(error).__name__}: {error}"
        )
