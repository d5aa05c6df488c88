"""Say who is to blame for a message that does not come, or that tells of an error in place of its value.

rank 0 waits for y[0,1] of rank 1:        "rank 1 failed in 1F0: .."        "rank 1 is in a step of build 2 while .."
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor

from fpipe.runtimes.faults.lost_rank import Board, first_told, timed_out, who_is_late
from fpipe.runtimes.faults.meeting import Meeting
from fpipe.runtimes.faults.rank_error import LostRank, RankError
from fpipe.runtimes.processes.message import FAILED, LOST, kind_of, text_of


class TransferErrors:
    """The errors of one rank's messages; `boards` are those of all steps of the group."""

    def __init__(self, rank: int, meeting: Meeting, boards: Collection[Board]) -> None:
        self._rank, self._meeting, self._boards = rank, meeting, boards

    def told(self, message: Tensor, who: str, own_word: str) -> RankError:
        """Error that a message tells, which came in place of a value; `own_word` is what this rank's messages say."""
        kind = kind_of(message)
        if kind in (FAILED, LOST):
            return (LostRank if kind == LOST else RankError)(self._meeting.board.whole(text_of(message)))
        (build, _, key), (own, _, own_key) = text_of(message).partition(", "), own_word.partition(", ")
        if build != own:
            return self._elsewhere(f"{who} is in a step of {build} while rank {self._rank} is in one of {own}")
        if key and own_key and key != own_key:
            return RankError(
                f"{who} has {key} in this step and rank {self._rank} has {own_key}. All ranks pass the same."
            )
        return RankError(
            f"{who} and rank {self._rank} are not in the same step: they were handed arguments of different "
            "structures, shapes or dtypes, or run under another autocast, other settings or numbers of threads. All "
            "ranks pass batches of the same sizes."
        )

    def _elsewhere(self, words: str) -> LostRank:
        """Two ranks run different steps of one group: both end, and all who wait for either."""
        said = f"{words}: all ranks of a group build the same steps and call them in the same order"
        for board in {*self._boards} - {self._meeting.board}:
            first_told(board, said)
        return LostRank(first_told(self._meeting.board, said))

    def lost(self, error: RuntimeError, rank: int, what: str) -> LostRank:
        """An error of torch while another rank is waited for, as one that says who is lost."""
        return self.late(rank, what) if timed_out(error) else self.gone(rank, what)

    def late(self, rank: int, what: str) -> LostRank:
        """An error that names the rank that all others wait for."""
        self._meeting.watchdog.refuse_ended()
        return LostRank(who_is_late(self._meeting.board, self._rank, rank, f"rank {rank} {what} in time"))

    def gone(self, rank: int, what: str) -> LostRank:
        """An error that names the first rank that was lost: others leave when they notice, and are gone too."""
        self._meeting.watchdog.refuse_ended()
        words = f"rank {rank} is gone{what and f' and {what}'}"
        return LostRank(who_is_late(self._meeting.board, self._rank, rank, words, gone=True))
