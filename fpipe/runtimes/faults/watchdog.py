"""Watch over the process of a rank: publish its status, end waits that are in vain, and say who is to blame.

    1F2 ................. 0.1 s                -->        store: process 1 is in its 1F2 of step 9
    RECV(y) ... the store has a fault          -->        its connections are closed, RankError

A thread checks ten times a second: a process that waits in gloo notices nothing but a closed connection, and one that
is killed or hangs says nothing. No process closes a connection before the fault is written: one that finds a connection
closed, and no fault in the store, has found a dead peer.
"""

from __future__ import annotations

import select
import signal
import socket
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

from torch.distributed import ProcessGroup

from fpipe.runtimes.faults.fault_store import MAX_FAULT_LENGTH, FaultStore, ProcessStatus, RankError
from fpipe.runtimes.lowering.rank_part import RankPart
from fpipe.torch_private.processes import close_connections, disconnected_peers, is_timeout, world_group

# A status is published once it has lasted a tick, so that ops that run normally cost no message to the store. The store
# is asked for a fault every half second. After Ctrl-C a wait has a second to end by itself.
POLL_SECONDS, STORE_POLL_SECONDS, INTERRUPT_SECONDS = 0.1, 0.5, 1.0
# A process that waits writes a heartbeat each 0.2 s: one with the same heartbeat after this time is dead or stopped.
_HEARTBEAT_SECONDS = 0.6
# Torch's own timeout comes after the watchdog's, whose message says more.
_TORCH_TIMEOUT_MARGIN = timedelta(seconds=5)
_SETTLE_POLL_SECONDS = 0.0002


class PeerWait(NamedTuple):
    """A wait for other processes, with the words that blame them if it is in vain.

    Attributes:
        processes: the processes waited for; with a `group`, its members by rank, this process included.
        omission: what they have not done while the wait lasts, such as "did not send what its 1F3 writes".
        phase: such as "at the end of"; empty for the op that runs.
        is_agreeing: whether the ranks of the step compare what they are about to do.
        patience: seconds to wait beyond the timeout.
        group: the process group that connects them, if there are several.
        find_place: returns where in the phase this process is, such as "in its 1F3, ", and whether it waits there.
    """

    processes: tuple[int, ...]
    omission: str
    phase: str = ""
    is_agreeing: bool = False
    patience: float = 0.0
    group: Any = None
    find_place: Callable[[], tuple[str, bool]] | None = None


class Watchdog:
    """The watchdog of a process, for all steps that it builds and runs on any group.

    The main thread sets `part` and `wait` without a lock. The watchdog's thread only reads them, and a status that is
    one assignment old does no harm.

    Attributes:
        faults: the store of faults.
        key: the processes of the current step, and the number of its build among theirs.
        agreement_counts: how often the ranks of a key have agreed.
        part: the instructions that run.
        wait: the current wait for other processes.
        ended: why the run is over, as written in the store.
    """

    def __init__(self) -> None:
        self.faults = FaultStore()
        # They outlive a watchdog: where a step was dropped, a peer's status may still be one of that step's build.
        self.agreement_counts = _AGREEMENT_COUNTS.setdefault(world_group(), Counter())
        self.part: RankPart | None = None
        self.wait: PeerWait | None = None
        self.ended, self.is_capturing = "", False
        self._was_raised = False
        self._last_error: BaseException | None = None
        self.key, self._step, self._seconds = ("", 0), 0, 0.0
        self._groups: Sequence[Any] = ()
        self._torch_timeout = _TORCH_TIMEOUT_MARGIN
        self._is_running, self._is_listening, self._outer_wakeup_fd = False, False, -1
        self._last_status, self._status_time = ProcessStatus(""), time.monotonic()
        self._store_time = self._heartbeat_time = 0.0
        self._status_is_written, self._interrupt_times = False, list[float]()
        self._first_trace: tuple[float, Mapping[int, int]] | None = None
        # Python's wake-up descriptor: its C handler writes the number of a signal here even while Python waits in C.
        listen_socket, self._wake_socket = socket.socketpair()
        for socket_end in (listen_socket, self._wake_socket):
            socket_end.setblocking(False)
        # The thread holds a weak reference alone, so a watchdog that no step needs any more is collected.
        stopped = threading.Event()
        thread = threading.Thread(
            target=_run_watchdog, args=(weakref.ref(self), listen_socket, stopped), daemon=True, name="fpipe watchdog"
        )
        thread.start()
        # Also called at exit: Python does not survive a thread that is inside C code by then.
        weakref.finalize(self, _stop_thread, thread, listen_socket, self._wake_socket, stopped)

    def begin(self, key: tuple[str, int], step: int, seconds: float, groups: Sequence[Any]) -> None:
        """Watch a build (step 0) or a step, whose waits on these groups end after this number of seconds."""
        self.part, self.wait, self._is_running = None, None, True
        self.key, self._step, self._seconds, self._groups = key, step, seconds, groups
        self._torch_timeout = timedelta(seconds=seconds) + _TORCH_TIMEOUT_MARGIN
        is_default = signal.getsignal(signal.SIGINT) is signal.default_int_handler
        self._is_listening = is_default and threading.current_thread() is threading.main_thread()
        if self._is_listening:
            self._outer_wakeup_fd = signal.set_wakeup_fd(self._wake_socket.fileno(), warn_on_full_buffer=False)

    def finish(self) -> None:
        """End a build or step."""
        self.part, self.wait, self._is_running, self._groups = None, None, False, ()
        if self._is_listening:
            signal.set_wakeup_fd(self._outer_wakeup_fd)

    def refuse_ended(self) -> None:
        """Raise RankError if the run is over."""
        if self.ended:
            raise RankError(self.faults.reword_fault(self.ended))

    def refuse_after_end(self) -> None:
        """Raise RankError before a build or step if the run is over."""
        # A fault may end the run in the last wait of a step that still succeeds: then this is its first report here.
        prefix = "the run is over, start all ranks again from a checkpoint: " if self._was_raised else ""
        if self.ended:
            self._was_raised = True
            raise RankError(prefix + self.faults.reword_fault(self.ended))

    def wait_for(self, work: Any, wait: PeerWait, on_streams: bool = False) -> None:
        """Wait for work, or make the current stream wait for work that is ordered by streams."""
        outer_wait, self.wait = self.wait, wait
        try:
            if on_streams:
                work.wait()
            else:
                work.wait(self._torch_timeout + timedelta(seconds=wait.patience))
        except RuntimeError as error:
            raise self.as_rank_error(error, wait) from error
        self.wait = outer_wait

    def wait_on_host(self, work: Any, wait: PeerWait) -> None:
        """Block the host until work that is ordered by streams is done."""
        # `work.wait()` would only make the current stream wait, and the host would not notice a dead peer.
        outer_wait, self.wait = self.wait, wait
        while not work.is_completed():
            self.refuse_ended()
            time.sleep(_SETTLE_POLL_SECONDS)
        self.wait = outer_wait

    def as_rank_error(self, error: RuntimeError, wait: PeerWait) -> RuntimeError:
        """End the run for a wait, send or receive that failed, and return the error to raise; not in a capture."""
        # Nothing of a capture has run, so no peer is to blame.
        if self.is_capturing:
            return RuntimeError(str(error))
        # After a timeout the peer may be alive and wait itself. The watchdog is about to find who is to blame.
        if is_timeout(error):
            self.wait, deadline = wait, time.monotonic() + _TORCH_TIMEOUT_MARGIN.total_seconds()
            while not self.ended and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        if not self.ended:
            self._end(self.faults.read_fault() or self._report_dead_peer(wait))
        return RankError(self.faults.reword_fault(self.ended))

    def end_run_because(self, reason: str) -> RankError:
        """End the run for a reason that no exception states, and return the error to raise."""
        self._end(self.faults.write_fault(reason))
        return RankError(self.faults.reword_fault(self.ended))

    def end_run(self, error: BaseException) -> BaseException:
        """End the run for all processes after an error, and return the error to raise on this one."""
        # Receives in flight may still write their buffers, on streams that nobody waits for any more. The frames of the
        # error hold these buffers, so the error is kept until the process ends.
        self._last_error, self._was_raised = error, True
        error_to_raise = error
        if not isinstance(error, RankError):
            notes = [note for note in getattr(error, "__notes__", ()) if note.startswith("in ")]
            name, location = self.faults.name_of(self.faults.process), notes[-1] if notes else "outside of its ops"
            description = f"{name} failed {location}: {type(error).__name__}: {error}"
            fault = self.ended or self.faults.write_fault(description)
            # Another rank's fault came first. A RuntimeError here, as of a collective inside a stage, follows from it.
            if isinstance(error, RuntimeError) and fault != description[:MAX_FAULT_LENGTH]:
                error_to_raise = RankError(self.faults.reword_fault(fault))
            self._end(fault)
        self.faults.wait_for_readers()
        return error_to_raise

    def _end(self, fault: str) -> None:
        self.ended = self.ended or fault
        # Only now: a peer that finds a closed connection and no fault would take this process for dead. Closing wakes
        # the waits of both sides.
        self.faults.mark_read()
        for group in self._groups:
            close_connections(group)

    def status(self) -> ProcessStatus:
        """Return the current status of this process."""
        # The main thread may assign these meanwhile, so each is read once.
        part, wait = self.part, self.wait
        group, build = self.key
        description, is_waiting = f"at the start of step {self._step}" if self._step else "building the step", True
        if wait is not None and wait.phase:
            description = f"{wait.phase} step {self._step}" if wait.phase.endswith(" of") else wait.phase
            if wait.find_place is not None:
                place, is_waiting = wait.find_place()
                description = place + description
        elif part is not None and part.instructions:
            description = f"in its {part.current_instruction().ops[0].cell} of step {self._step}"
        elif not self._is_running:
            description = f"after step {self._step}" if self._step else "after building the step"
        agreements, has_agreed = self.agreement_counts[self.key], part is not None or not self._is_running
        status = ProcessStatus(description, group, build, self._step, agreements, has_agreed=has_agreed)
        if wait is None or not is_waiting:
            return status
        return status._replace(is_agreeing=wait.is_agreeing, waits_for=self._peers(wait), omission=wait.omission)

    def _peers(self, wait: PeerWait) -> tuple[int, ...]:
        return tuple(process for process in wait.processes if process != self.faults.process)

    def check_progress(self, interrupts: int) -> None:
        """Publish the status of this process, and end a wait that is in vain.

        Args:
            interrupts: how often Ctrl-C was pressed since the last check.
        """
        # 1. Publish a status that lasts, with a heartbeat while it is a wait, and withdraw it once it is over.
        status, current_time = self.status(), time.monotonic()
        if status != self._last_status:
            self._last_status, self._status_time, self._first_trace = status, current_time, None
        seconds_unchanged = current_time - self._status_time
        lasts = seconds_unchanged > POLL_SECONDS
        heartbeat_is_due = status.waits_for and current_time - self._heartbeat_time > 2 * POLL_SECONDS
        if lasts != self._status_is_written or (self._status_is_written and heartbeat_is_due):
            self._status_is_written, self._heartbeat_time = lasts, current_time
            self.faults.write_status(status._replace(heartbeat=int(current_time * 1e3)) if lasts else None)
        self._interrupt_times = [*self._interrupt_times, *[current_time] * interrupts] if self._is_running else []
        # A rank that computes in a graph waits for nobody, but its host can hear of a fault.
        wait = self.wait
        if self.ended or not (status.waits_for or (wait is not None and wait.find_place is not None)):
            return
        # 2. Python handles Ctrl-C only between bytecodes, so a wait in C would ignore it: end the run in its place.
        is_overdue = any(
            current_time - max(self._status_time, press) > INTERRUPT_SECONDS for press in self._interrupt_times
        )
        if len(self._interrupt_times) > 1 or is_overdue:
            name = self.faults.name_of(self.faults.process)
            self._end(self.faults.write_fault(f"{name} was interrupted by Ctrl-C {status.description}"))
            return
        # 3. End the wait for a fault of another process, a peer that is in another step, or one that is late.
        fault, blame = "", self._describe_late_ranks(status, seconds_unchanged)
        if current_time - self._store_time > STORE_POLL_SECONDS and not blame:
            self._store_time = current_time
            fault = self.faults.read_fault()
            blame = "" if fault else self._describe_mismatch(status)
        if fault or blame:
            self._end(fault or self.faults.write_fault(blame))

    def _describe_mismatch(self, status: ProcessStatus) -> str:
        """Describe a peer that can never come to the agreement that this process waits for; empty if there is none."""
        for process in status.waits_for if status.is_agreeing else ():
            peer = self.faults.status_of(process)
            if peer is None or peer.group != status.group:
                continue
            name, own_name = self.faults.name_of(process), self.faults.name_of(self.faults.process)
            # The peer waits for an agreement of another build, to which this process has not come: neither goes on.
            is_ahead = self.agreement_counts[status.group, peer.build] <= peer.agreements
            if peer.build != status.build and peer.is_agreeing and is_ahead:
                return (
                    f"{name} is in a step of build {peer.build} while {own_name} is in one of build {status.build}: "
                    "all ranks of a group build the same steps and call them in the same order"
                )
            # The peer runs this step and has not agreed on it: its signature was known, this one's is new.
            knows_signature = peer.build == status.build and peer.has_agreed and peer.step >= status.step > 0
            if knows_signature and peer.agreements <= status.agreements:
                return NOT_SAME_STEP.format(name, own_name)
        return ""

    def _describe_late_ranks(self, status: ProcessStatus, seconds_unchanged: float) -> str:
        """Describe the processes that all others wait for, directly or not; empty before the timeout is over."""
        if self.wait is None or not status.waits_for or seconds_unchanged < self._seconds + self.wait.patience:
            return ""
        # Follow the waits twice: a process that wrote that it waits may have died since, with its heartbeat unchanged.
        if self._first_trace is None:
            _, heartbeats = self._trace_waits(status, {})
            self._first_trace = time.monotonic(), heartbeats
        trace_time, earlier_heartbeats = self._first_trace
        if time.monotonic() - trace_time < _HEARTBEAT_SECONDS:
            return ""
        omission_by_process, _ = self._trace_waits(status, earlier_heartbeats)
        # All wait for each other in a circle: blame the first peer of this process.
        omission_by_process = omission_by_process or dict.fromkeys(status.waits_for[:1], status.omission)
        nearest = next(iter(omission_by_process))
        omission = omission_by_process[nearest]
        late_processes = [process for process, text in omission_by_process.items() if text == omission]
        last_status = self._describe_last_status(nearest) if len(late_processes) == 1 else ""
        names = " and ".join(map(self.faults.name_of, late_processes))
        return self.faults.blame_store(f"{names} {omission} in time{last_status}")

    def _trace_waits(
        self, status: ProcessStatus, earlier_heartbeats: Mapping[int, int]
    ) -> tuple[dict[int, str], dict[int, int]]:
        """Follow who waits for whom, breadth first, from this process to the ones that wait for nobody.

        Args:
            status: of this process.
            earlier_heartbeats: by process that waited a while ago. One with the same heartbeat now is dead or stopped.

        Returns:
            What the processes that wait for nobody have not done, the nearest first; and the heartbeats of the others.
        """
        pending, visited = [(process, status.omission) for process in status.waits_for], {self.faults.process}
        omission_by_process, heartbeats = dict[int, str](), dict[int, int]()
        for process, omission in pending:  # a queue: it grows inside the loop
            if process in visited:
                continue
            visited.add(process)
            peer = self.faults.status_of(process)
            if peer is not None and peer.waits_for and earlier_heartbeats.get(process) != peer.heartbeat:
                heartbeats[process] = peer.heartbeat
                pending += [(next_process, peer.omission) for next_process in peer.waits_for]
            else:
                omission_by_process[process] = omission
        return omission_by_process, heartbeats

    def _report_dead_peer(self, wait: PeerWait) -> str:
        """Write to the store which peer is dead: its connection is closed, and no process has written why."""
        disconnected_ranks = [] if wait.group is None else disconnected_peers(wait.group)
        dead_processes = [wait.processes[rank] for rank in disconnected_ranks] or self._peers(wait)
        names = " or ".join(map(self.faults.name_of, dead_processes))
        last_status = self._describe_last_status(dead_processes[0]) if len(dead_processes) == 1 else ""
        return self.faults.write_fault(self.faults.blame_store(f"{names} is gone and {wait.omission}{last_status}"))

    def _describe_last_status(self, process: int) -> str:
        """Describe where a process was last seen; empty if its status is of an earlier step."""
        status = self.faults.status_of(process)
        # A process that dies in a new step leaves the status of an old one behind, since short stays are not written.
        is_old = status is None or (status.group, status.build) != self.key or status.step < self._step - 1
        return "" if status is None or is_old else f"; it was last seen {status.description}"


NOT_SAME_STEP = (
    "{} and {} are not in the same step: they were handed arguments of different structures, shapes or dtypes, or run "
    "under another autocast, other settings or numbers of threads. All ranks pass batches of the same sizes."
)
"""A fault about two ranks, by their names."""


def watchdog_of_process() -> Watchdog:
    """Return the watchdog of this process, which lives as long as a step that uses it."""
    watchdog_ref = _WATCHDOGS.get(world_group())
    watchdog = watchdog_ref and watchdog_ref()
    if watchdog is None:
        watchdog = Watchdog()
        _WATCHDOGS[world_group()] = weakref.ref(watchdog)
    return watchdog


_WATCHDOGS: weakref.WeakKeyDictionary[ProcessGroup, weakref.ref[Watchdog]] = weakref.WeakKeyDictionary()
_AGREEMENT_COUNTS: weakref.WeakKeyDictionary[ProcessGroup, Counter[tuple[str, int]]] = weakref.WeakKeyDictionary()


def _run_watchdog(watchdog_ref: weakref.ref[Watchdog], listen_socket: socket.socket, stopped: threading.Event) -> None:
    while not stopped.is_set():
        interrupts = 0
        with suppress(BlockingIOError):
            if select.select([listen_socket], [], [], POLL_SECONDS)[0]:
                interrupts = listen_socket.recv(64).count(signal.SIGINT)
        watchdog = watchdog_ref()
        if watchdog is None or stopped.is_set():
            return
        watchdog.check_progress(interrupts)
        # This frame's reference would keep the watchdog alive through the next wait.
        del watchdog


def _stop_thread(
    thread: threading.Thread, listen_socket: socket.socket, wake_socket: socket.socket, stopped: threading.Event
) -> None:
    stopped.set()
    # A byte wakes the thread out of its select.
    wake_socket.send(b"\0")
    # The finalizer runs on the watchdog's own thread if that held the last reference: a thread cannot join itself.
    if thread is not threading.current_thread():
        thread.join(1)
    listen_socket.close()
    wake_socket.close()
