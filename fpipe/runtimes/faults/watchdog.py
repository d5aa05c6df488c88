"""Look at a step from beside it: leave word of where it is, and end a wait that is in vain.

    1F2 ................. 0.1 s                -->        store: rank 1 is in its 1F2 of step 9
    RECV(y) .. Ctrl-C ... 1 s, or again        -->        its connections are closed, KeyboardInterrupt

Who waits in gloo hears nothing, neither Ctrl-C nor that others have given up; only a closed connection wakes it. And
who is killed or hangs says nothing. So a thread looks on, ten times a second; the step does nothing for it.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import ProcessGroup

from fpipe.runtimes.faults.ctrl_c import CtrlC
from fpipe.runtimes.faults.lost_rank import Board, Place, first_told, tell_place, told_lost
from fpipe.runtimes.faults.rank_error import LostRank
from fpipe.runtimes.lowering.rank_part import RankPart

TICK = 0.1
_LOOK, _GRACE, _BETWEEN = 0.5, 1.0, 0.0002
_BRIEFLY, NEVER_SENT = timedelta(milliseconds=1), 2**31 - 1


class Watchdog:
    """Where this rank is, and whether it still makes sense to wait there.

    Attributes:
        step: the number of the step that `runs`, or ran last, under `ctrl_c`.
        part: the instructions that run.
        waits: where this rank waits for others beside its instructions, such as "at the end".
        ended: why no wait makes sense any longer, in words for all: the connections are closed then.
    """

    def __init__(self) -> None:
        self.ctrl_c = CtrlC()
        self.step, self.runs = 0, False
        self.part: RankPart | None = None
        self.waits: str | None = None
        self.ended: str | None = None
        self._stopped = False

    def begin(self, step: int) -> None:
        """A step begins."""
        self.part, self.waits, self.step, self.runs = None, None, step, True

    def end(self) -> None:
        """It is over."""
        self.part, self.waits, self.runs = None, None, False

    def place(self) -> Place:
        """Where this rank is now."""
        part, step = self.part, self.step
        if self.waits is not None:
            return Place(True, f"{self.waits} of step {step}")
        if part is not None and part.instructions:
            op = part.now().ops[0]
            return Place(op.kind == "RECV", f"in its {op.cell} of step {step}")
        return Place(False, f"{'at the start of' if self.runs else 'after'} step {step}")

    def refuse_ended(self) -> None:
        """A KeyboardInterrupt or LostRank if no wait makes sense any longer."""
        if self.ended is not None:
            self.ctrl_c.heed()
            raise LostRank(self.ended)

    def is_over(self, work: Any, seconds: float) -> bool:
        """Whether work that a device's streams order is over within so many seconds: a wait for it would only make a
        stream wait, and the host hear nothing."""
        ends = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > ends:
                return False
            self.refuse_ended()
            time.sleep(_BETWEEN)
        return True

    def start(self, owner: object, boards: Sequence[tuple[Board, int]], groups: Sequence[ProcessGroup]) -> None:
        """Look on until the owner is gone, at boards where this rank has a number each, and end waits in `groups`."""
        own = [(Board(board.store, None, board.names), rank) for board, rank in boards]
        thread = threading.Thread(target=self._look, args=(own, groups), daemon=True, name="fpipe watchdog")
        thread.start()
        weakref.finalize(owner, self._stop, thread)  # at exit too: Python does not survive a thread in C there

    def _stop(self, thread: threading.Thread) -> None:
        self._stopped = True
        self.ctrl_c.wake()
        if thread is not threading.current_thread():
            thread.join(1)
        self.ctrl_c.close()

    def _look(self, boards: Sequence[tuple[Board, int]], groups: Sequence[ProcessGroup]) -> None:
        seen, told = self.place(), False
        since = looked = time.monotonic()
        while not self._stopped:
            self.ctrl_c.listen(TICK)
            place, now = self.place(), time.monotonic()
            stays = place == seen
            if told != (stays and now - since > TICK):
                told = not told
                for board, rank in boards:
                    tell_place(board, rank, place if told else None)
            if not stays:
                seen, since = place, now
                continue
            if place.waits:
                pressed = self.ctrl_c.pressed
                if len(pressed) > 1 or any(now - max(since, one) > _GRACE for one in pressed):
                    board, rank = boards[0]
                    said = f"rank {rank} was interrupted by Ctrl-C {place.words}"
                    return self._close(first_told(board, said), groups)
                if now - max(since, looked) > _LOOK:
                    looked = now
                    for board, _ in boards:
                        said = told_lost(board)
                        if said is not None:
                            if board is not boards[0][0]:  # those of this pipeline wait for this rank
                                first_told(boards[0][0], said)
                            return self._close(board.as_heard(said), groups)

    def _close(self, why: str, groups: Sequence[Any]) -> None:
        """A wait that is over too soon closes its connection, which ends all others there."""
        self.ended = why
        for group in groups:
            for other in range(group.size()):
                with suppress(RuntimeError):
                    group.recv([torch.empty(1)], other, NEVER_SENT).wait(_BRIEFLY)
