"""Watch over the process of a rank: write where it is, end a wait that is in vain, and say who is to blame.

    1F2 ................. 0.1 s                -->        store: process 1 is in its 1F2 of step 9
    RECV(y) ... the store has a fault          -->        its connections are closed, RankError

Who waits in gloo hears nothing; only a closed connection wakes it. And a process that is killed or hangs says nothing.
So a thread looks on, ten times a second. Nobody closes a connection before the fault is written: whoever finds one
closed, and no fault in the store, has found a dead process.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from fpipe.runtimes.faults.fault_store import MOST, FaultStore, Place, RankError
from fpipe.runtimes.lowering.rank_part import RankPart
from fpipe.torch_private.processes import close_connections, disconnected_peers, timed_out, world_group

TICK, LOOK, GRACE = 0.1, 0.5, 1.0
_SURE = 0.6
"""Seconds between two looks at processes that wait: each writes a beat in that time, unless it is dead or stopped."""
_MARGIN = timedelta(seconds=5)
"""By how much torch's own timeout comes after that of the watchdog, which says more."""
_BETWEEN = 0.0002


class PeerWait(NamedTuple):
    """A wait for other processes.

    Attributes:
        processes: those; with a `group` all of them by rank, this one among them.
        missing: what they have not done as long as it lasts, such as "did not send what its 1F3 writes".
        where: such as "at the end of"; empty for the op that runs.
        meets: whether the ranks of the step agree on something here.
        patience: seconds beyond the timeout.
        group: the process group that connects them, if there are several.
    """

    processes: tuple[int, ...]
    missing: str
    where: str = ""
    meets: bool = False
    patience: float = 0.0
    group: Any = None


class Watchdog:
    """Looks on as this process builds and runs steps, of whatever groups: there is one in a process.

    Attributes:
        faults: the store.
        key: the processes of the step, and which of theirs it is.
        met: by key how often its ranks have agreed.
        part: the instructions that run.
        wait: the wait for other processes that goes on.
        ended: why the run is over, as written in the store.
    """

    def __init__(self) -> None:
        self.faults, self.met = FaultStore(), Counter[tuple[str, int]]()
        self.part: RankPart | None = None
        self.wait: PeerWait | None = None
        self.ended = ""
        self._last_error: BaseException | None = None
        self.key, self._step, self._seconds = ("", 0), 0, 0.0
        self._groups: Sequence[Any] = ()
        self._limit = _MARGIN
        self._runs, self._hears, self._fd_before = False, False, -1
        self._seen, self._since = Place(""), time.monotonic()
        self._looked = self._beaten = 0.0
        self._is_written, self._presses = False, list[float]()
        self._waiting: tuple[float, Mapping[int, int]] | None = None
        hears, self._tells = socket.socketpair()
        for end in (hears, self._tells):
            end.setblocking(False)
        stopped = threading.Event()
        thread = threading.Thread(
            target=_look_on, args=(weakref.ref(self), hears, stopped), daemon=True, name="fpipe watchdog"
        )
        thread.start()
        # At exit too: Python does not survive a thread that is in C there.
        weakref.finalize(self, _stop, thread, hears, self._tells, stopped)

    def begin(self, key: tuple[str, int], step: int, seconds: float, groups: Sequence[Any]) -> None:
        """Begin a build, or a step of it by its number, whose waits end after so many seconds, on these groups."""
        self.part, self.wait, self._runs = None, None, True
        self.key, self._step, self._seconds, self._groups = key, step, seconds, groups
        self._limit = timedelta(seconds=seconds) + _MARGIN
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._hears = is_default and threading.current_thread() is threading.main_thread()
        if self._hears:
            # Python runs no handler while its thread waits in C, but it writes the number of the signal there at once.
            self._fd_before = signal.set_wakeup_fd(self._tells.fileno(), warn_on_full_buffer=False)

    def finish(self) -> None:
        """End a build or step."""
        self.part, self.wait, self._runs, self._groups = None, None, False, ()
        if self._hears:
            signal.set_wakeup_fd(self._fd_before)

    def refuse_ended(self) -> None:
        """Raise RankError if the run is over."""
        if self.ended:
            raise RankError(self.faults.as_read_here(self.ended))

    def wait_for(self, work: Any, wait: PeerWait, on_streams: bool = False) -> None:
        """Wait for work, or make the current stream wait for work that is ordered by streams."""
        before, self.wait = self.wait, wait
        try:
            if on_streams:
                work.wait()
            else:
                work.wait(self._limit + timedelta(seconds=wait.patience) if wait.patience else self._limit)
        except RuntimeError as error:
            raise self.lost(error, wait) from error
        self.wait = before

    def settle(self, work: Any, wait: PeerWait) -> None:
        """Wait on the host for work that is ordered by streams: `wait` would only make a stream wait."""
        before, self.wait = self.wait, wait
        while not work.is_completed():
            self.refuse_ended()
            time.sleep(_BETWEEN)
        self.wait = before

    def lost(self, error: RuntimeError, wait: PeerWait) -> RankError:
        """Return the error to raise where a wait, a send or a receive has failed."""
        if timed_out(error):  # the watchdog is about to say who is to blame
            self.wait, ends = wait, time.monotonic() + _MARGIN.total_seconds()
            while not self.ended and time.monotonic() < ends:
                time.sleep(TICK)
        if not self.ended:
            self._end(self.faults.fault() or self._write_gone(wait))
        return RankError(self.faults.as_read_here(self.ended))

    def fail(self, words: str) -> RankError:
        """End the run for a reason that no exception says, and return the error to raise."""
        self._end(self.faults.write_fault(words))
        return RankError(self.faults.as_read_here(self.ended))

    def end_run(self, error: BaseException) -> BaseException:
        """End the run for all processes, and return the error to raise on this one."""
        # Receives that are under way may still write their buffers, on streams that nobody waits for any more. The
        # frames of the error hold these buffers, so the error stays until the process ends.
        self._last_error = error
        raised = error
        if not isinstance(error, RankError):
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
            name, place = self.faults.name_of(self.faults.process), notes[-1] if notes else "outside of its ops"
            words = f"{name} failed {place}: {type(error).__name__}: {error}"
            fault = self.ended or self.faults.write_fault(words)
            if isinstance(error, RuntimeError) and fault != words[:MOST]:  # such as a collective inside a stage
                raised = RankError(self.faults.as_read_here(fault))
            self._end(fault)
        self.faults.linger()
        return raised

    def _end(self, fault: str) -> None:
        """End the run: a connection that is closed wakes whoever waits there, on both sides."""
        self.ended = self.ended or fault
        self.faults.mark_read()
        for group in self._groups:
            close_connections(group)

    def place(self) -> Place:
        """Return where this process is."""
        part, wait = self.part, self.wait
        group, build = self.key
        words = f"at the start of step {self._step}" if self._step else "building the step"
        if wait is not None and wait.where:
            words = f"{wait.where} step {self._step}" if wait.where.endswith(" of") else wait.where
        elif part is not None and part.instructions:
            words = f"in its {part.now().ops[0].cell} of step {self._step}"
        elif not self._runs:
            words = f"after step {self._step}" if self._step else "after building the step"
        is_past = part is not None or not self._runs
        place = Place(words, group, build, self._step, self.met[self.key], is_past=is_past)
        if wait is None:
            return place
        return place._replace(meets=wait.meets, waits_for=self._others(wait), missing=wait.missing)

    def _others(self, wait: PeerWait) -> tuple[int, ...]:
        return tuple(process for process in wait.processes if process != self.faults.process)

    def look(self, pressed: int) -> None:
        """Write where this process is, and end its wait if it is in vain; Ctrl-C was `pressed` since the last look."""
        place, now = self.place(), time.monotonic()
        if place != self._seen:
            self._seen, self._since, self._waiting = place, now, None
        stays = now - self._since
        beats = place.waits_for and now - self._beaten > 2 * TICK
        if (stays > TICK) != self._is_written or (self._is_written and beats):
            self._is_written, self._beaten = stays > TICK, now
            self.faults.write_place(place._replace(beat=int(now * 1e3)) if self._is_written else None)
        self._presses = [*self._presses, *[now] * pressed] if self._runs else []
        if self.ended or not place.waits_for:
            return
        if len(self._presses) > 1 or any(now - max(self._since, press) > GRACE for press in self._presses):
            name = self.faults.name_of(self.faults.process)
            self._end(self.faults.write_fault(f"{name} was interrupted by Ctrl-C {place.words}"))
            return
        fault, words = "", self._find_late(place, stays)
        if now - self._looked > LOOK and not words:
            self._looked = now
            fault = self.faults.fault()
            words = "" if fault else self._find_mismatch(place)
        if fault or words:
            self._end(fault or self.faults.write_fault(words))

    def _find_mismatch(self, place: Place) -> str:
        """Return words about a process that is in another step while this one meets the others of its own."""
        for process in place.waits_for if place.meets else ():
            other = self.faults.place_of(process)
            if other is None or other.group != place.group:
                continue
            name, own_name = self.faults.name_of(process), self.faults.name_of(self.faults.process)
            # It waits to agree on another step, where this process has not been: neither goes on.
            if other.build != place.build and other.meets and self.met[place.group, other.build] <= other.met:
                return (
                    f"{name} is in a step of build {other.build} while {own_name} is in one of build {place.build}: "
                    "all ranks of a group build the same steps and call them in the same order"
                )
            # It runs this step, and has not agreed on it.
            is_past = other.build == place.build and other.is_past and other.step >= place.step > 0
            if is_past and other.met <= place.met:
                return NOT_THE_SAME_STEP.format(name, own_name)
        return ""

    def _find_late(self, place: Place, stays: float) -> str:
        """Return words about the processes that all others wait for, directly or not, once the timeout is over."""
        if self.wait is None or stays < self._seconds + self.wait.patience:
            return ""
        if self._waiting is None:
            _, beats = self._follow(place, {})
            self._waiting = time.monotonic(), beats
        since, before = self._waiting
        if time.monotonic() - since < _SURE:
            return ""
        missing, _ = self._follow(place, before)
        missing = missing or dict.fromkeys(place.waits_for[:1], place.missing)
        first = next(iter(missing))
        late = [process for process, words in missing.items() if words == missing[first]]
        seen = self._last_seen(first) if len(late) == 1 else ""
        names = " and ".join(map(self.faults.name_of, late))
        return self.faults.unanswered(f"{names} {missing[first]} in time{seen}")

    def _follow(self, place: Place, before: Mapping[int, int]) -> tuple[dict[int, str], dict[int, int]]:
        """Follow who waits for whom.

        Args:
            place: where this process is.
            before: the beats of those that waited a while ago: who has not beaten since is dead or stopped.

        Returns:
            By process what those have not done that wait for nobody, the nearest first; and the beats of those that do.
        """
        pending, passed = [(process, place.missing) for process in place.waits_for], {self.faults.process}
        missing, beats = dict[int, str](), dict[int, int]()
        for process, words in pending:  # which grows
            if process in passed:
                continue
            passed.add(process)
            other = self.faults.place_of(process)
            if other is not None and other.waits_for and before.get(process) != other.beat:
                beats[process] = other.beat
                pending += [(next_process, other.missing) for next_process in other.waits_for]
            else:
                missing[process] = words
        return missing, beats

    def _write_gone(self, wait: PeerWait) -> str:
        """Write that a process is dead: its connection is closed, and nobody has written why."""
        closed = [] if wait.group is None else disconnected_peers(wait.group)
        dead = [wait.processes[rank] for rank in closed] or self._others(wait)
        names = " or ".join(map(self.faults.name_of, dead))
        seen = self._last_seen(dead[0]) if len(dead) == 1 else ""
        words = self.faults.unanswered(f"{names} is gone and {wait.missing}{seen}")
        return self.faults.write_fault(words)

    def _last_seen(self, process: int) -> str:
        """Return words to put behind those about a process, unless it has gone on since and could not write it."""
        place = self.faults.place_of(process)
        is_old = place is None or (place.group, place.build) != self.key or place.step < self._step - 1
        return "" if place is None or is_old else f"; it was last seen {place.words}"


NOT_THE_SAME_STEP = (
    "{} and {} are not in the same step: they were handed arguments of different structures, shapes or dtypes, or run "
    "under another autocast, other settings or numbers of threads. All ranks pass batches of the same sizes."
)


def watchdog_of_run() -> Watchdog:
    """Return the watchdog of this process, which looks on as long as anybody has it."""
    known = _WATCHDOGS.get(world_group())
    watchdog = known and known()
    if watchdog is None:
        watchdog = Watchdog()
        _WATCHDOGS[world_group()] = weakref.ref(watchdog)
    return watchdog


_WATCHDOGS: weakref.WeakKeyDictionary[ProcessGroup, weakref.ref[Watchdog]] = weakref.WeakKeyDictionary()


def _look_on(watchdog_ref: weakref.ref[Watchdog], hears: socket.socket, stopped: threading.Event) -> None:
    while not stopped.is_set():
        pressed = 0
        with suppress(BlockingIOError):
            if select.select([hears], [], [], TICK)[0]:
                pressed = hears.recv(64).count(signal.SIGINT)
        watchdog = watchdog_ref()
        if watchdog is None or stopped.is_set():
            return
        watchdog.look(pressed)
        del watchdog


def _stop(thread: threading.Thread, hears: socket.socket, tells: socket.socket, stopped: threading.Event) -> None:
    stopped.set()
    tells.send(b"\0")
    if thread is not threading.current_thread():
        thread.join(1)
    hears.close()
    tells.close()
