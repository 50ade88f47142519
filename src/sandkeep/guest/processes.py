"""The process table: what the guest has started, how it ended, and its output for whoever asks again.

A process *ends* when its main process has been reaped. It is *settled* when no more output is to be waited for: its pipes
are closed, or a moment has passed in which those who still hold them (daemons it left behind) wrote nothing.
"""

from __future__ import annotations

import os
import signal
import time

from . import proc
from .problems import BUSY, PROCESS_NOT_FOUND, Problem
from .streams import Output

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Dict, List, Optional, Set

    from .loop import Loop, Timer
    from .proc import Identity
    from .streams import Input

KEEP_FINISHED = 200
KEEP_SECONDS = 30  # however many end meanwhile, up to KEEP_MOST
KEEP_MOST = 2000
KEEP_BYTES = 32 << 20
_QUIET = 0.05
_PATIENCE = 0.5
TIMEOUT_CODE = 124
_STUCK = 2.0
STREAMS = {1: "stdout", 2: "stderr"}


class Follower:
    """Somebody who reads a process's output and must not miss any."""

    def __init__(self) -> None:
        self.at = {1: 0, 2: 0}

    def pump(self) -> None:
        raise NotImplementedError


class Process:
    def __init__(self, loop: Loop, number: int, main: int, run: str, about: Dict[str, Any], background: bool) -> None:
        self.number = number  # as it is known outside
        self.main = main  # the main process: another if a fresh shell had to begin the command
        self.run = run
        self.about = about
        self.background = background
        self.started = time.time()
        self.held: Set[Identity] = set()  # what whoever it starts gets, too
        self.outputs: Dict[int, Output] = {}
        self.input: Optional[Input] = None
        self.terminal: Optional[int] = None
        self.followers: List[Follower] = []
        self.status: Optional[int] = None
        self.timed_out = False
        self.doomed = False  # killed: though it may take its time to die, it is not to be started again
        self.settled = False
        self.settled_at = 0.0
        self.duration_ms = 0.0
        self.saved: Optional[bool] = None
        self.on_settled: List[Callable[[Process], None]] = []
        self.again: Optional[Callable[[], bool]] = None  # begin it anew, if nothing of it has run: see `handover`
        self._loop = loop
        self._clock = time.monotonic()
        self._patience = 0.0
        self._timers: List[Timer] = []

    def inherits(self, fd: int) -> None:
        found = proc.identity(fd)
        if found is not None:
            self.held.add(found)

    def add_output(self, stream: int, fd: int) -> None:
        self.inherits(fd)
        self.outputs[stream] = Output(self._loop, fd, self._changed, lambda: self._room(stream))

    def _room(self, stream: int) -> int:
        ring = self.outputs[stream].ring
        return min((ring.capacity - (ring.end - one.at[stream]) for one in self.followers), default=ring.capacity)

    def _changed(self) -> None:
        for one in list(self.followers):
            one.pump()
        if self.status is not None and not self.settled:
            self._settle()

    def replace(self, pid: int, run: str, pipes: List[int]) -> None:
        """Another process in the place of one that ended before it did anything."""
        for output in self.outputs.values():
            output.close()
        self.main, self.run = pid, run
        self.add_output(1, pipes[0])
        self.add_output(2, pipes[1])
        if self.input is not None:
            self.input.reopen(pipes[2])

    def follow(self, one: Follower) -> None:
        self.followers.append(one)

    def leave(self, one: Follower) -> None:
        if one in self.followers:
            self.followers.remove(one)
            self.advance()

    def advance(self) -> None:
        """A follower has read on or left: there may be room again."""
        for output in self.outputs.values():
            output.resume()

    # --- ending

    def limit(self, seconds: float) -> None:
        self._timers.append(self._loop.later(seconds, self._expire))

    def _expire(self) -> None:
        if self.settled:
            return
        self.timed_out = True
        self.end_tree()
        self._timers.append(self._loop.later(_STUCK, self._give_up))

    def end_tree(self) -> None:
        self.again = None
        self.doomed = True
        if not proc.end_tree(self.root, self.run, self.held):
            self._loop.later(0.02, self.end_tree)

    def tree(self) -> Set[int]:
        return proc.tree(self.root, self.run, self.held)

    @property
    def root(self) -> Optional[int]:
        """The main process, as long as its number is certainly its own."""
        return self.main if self.status is None else None

    def _give_up(self) -> None:
        if not self.settled:
            self._finish()

    def ended(self, status: int) -> None:
        """The main process has been reaped."""
        self.status = status
        self.duration_ms = (time.monotonic() - self._clock) * 1000
        self._patience = time.monotonic() + _PATIENCE
        for output in self.outputs.values():
            output.drain()
        self._changed()

    def _settle(self) -> None:
        for timer in self._timers:
            timer.cancel()
        held = [output for output in self.outputs.values() if output.open]
        if not held or (self.timed_out and not any(output.paused for output in held)):
            self._finish()
        elif time.monotonic() >= self._patience and not any(output.paused for output in held):
            self._finish()
        else:
            self._timers = [self._loop.later(_QUIET, self._quiet)]

    def _quiet(self) -> None:
        if not self.settled:
            if any(output.paused for output in self.outputs.values()):
                self._timers = [self._loop.later(_QUIET, self._quiet)]
            else:
                self._finish()

    def _finish(self) -> None:
        if self.status is None:
            self.duration_ms = (time.monotonic() - self._clock) * 1000
        self.settled = True
        self.settled_at = time.monotonic()
        for timer in self._timers:
            timer.cancel()
        if self.input is not None:
            self.input.close()
        if self.terminal is not None:
            self.outputs[1].close()
        for call in list(self.on_settled):
            call(self)
        for one in list(self.followers):
            one.pump()

    # --- telling

    @property
    def exit_code(self) -> Optional[int]:
        if self.timed_out:
            return TIMEOUT_CODE if self.settled else None
        if self.status is None:
            return None
        return 128 + os.WTERMSIG(self.status) if os.WIFSIGNALED(self.status) else os.WEXITSTATUS(self.status)

    @property
    def signal(self) -> Optional[str]:
        if self.status is None or not os.WIFSIGNALED(self.status):
            return None
        number = os.WTERMSIG(self.status)
        try:
            return signal.Signals(number).name
        except ValueError:
            return "SIG{}".format(number)

    def result(self) -> Dict[str, Any]:
        return {
            "pid": self.number,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "timed_out": self.timed_out,
            "duration_ms": round(self.duration_ms, 3),
            "session_saved": self.saved,
        }

    def describe(self, ports: List[int]) -> Dict[str, Any]:
        return {
            **self.about,
            "pid": self.number,
            "background": self.background,
            "started": self.started,
            "running": self.exit_code is None,
            "doomed": self.doomed,
            "exit_code": self.exit_code,
            "signal": self.signal,
            "ports": ports,
            "positions": {
                STREAMS[stream]: {"start": output.ring.start, "end": output.ring.end}
                for stream, output in self.outputs.items()
            },
        }


class Table:
    def __init__(self, loop: Loop) -> None:
        self._processes: Dict[int, Process] = {}  # by number
        self._mains: Dict[int, Process] = {}  # by pid, those that have not been reaped
        self.on_other: Callable[[int], None] = lambda pid: None
        loop.on_child(self.reap)

    def add(self, process: Process) -> None:
        self._processes[process.number] = process
        self._mains[process.main] = process
        process.on_settled.append(lambda _: self._trim())

    def vacate(self, number: int) -> None:
        """For a process that is started again: nobody else may have its number."""
        found = self._processes.get(number)
        if found is None:
            return
        main = None if found.root is None else proc.row(found.root)
        if main is not None and not main.ended:
            raise Problem(BUSY, "process {} runs".format(number))
        del self._processes[number]

    def forget(self, process: Process) -> None:
        """Delivered in full: nothing is kept, unless daemons it left behind still write."""
        if not any(output.open for output in process.outputs.values()):
            self._drop(process)

    def _drop(self, process: Process) -> None:
        if self._processes.get(process.number) is process:
            del self._processes[process.number]
        for output in process.outputs.values():
            output.close()

    def find(self, number: int) -> Process:
        process = self._processes.get(number)
        if process is None:
            raise Problem(PROCESS_NOT_FOUND, "no process {} was started here, or it ended long ago".format(number))
        return process

    def reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            process = self._mains.pop(pid, None)
            if process is None or process.status is not None:
                self.on_other(pid)
            elif os.WIFSIGNALED(status) and process.again is not None and process.again():
                self._mains[process.main] = process
            else:
                process.ended(status)

    def never_again(self) -> None:
        """Whoever dies from now on is meant to."""
        for process in self._processes.values():
            process.again = None

    def _trim(self) -> None:
        done = [process for process in self._processes.values() if process.settled and not process.followers]
        recent = time.monotonic() - KEEP_SECONDS
        for place, process in enumerate(done[: max(0, len(done) - KEEP_FINISHED)]):
            if process.settled_at < recent or place < len(done) - KEEP_MOST:
                self._drop(process)
        kept = 0
        for process in reversed(done):
            for output in process.outputs.values():
                kept += output.ring.end - output.ring.start
                if kept > KEEP_BYTES:
                    output.ring.shrink(0)

    def describe(self) -> List[Dict[str, Any]]:
        """Who has just been killed is known to have ended."""
        self.reap()
        return _with_ports(list(self._processes.values()))

    def tell(self, number: int) -> Dict[str, Any]:
        self.reap()
        return _with_ports([self.find(number)])[0]


def _with_ports(processes: List[Process]) -> List[Dict[str, Any]]:
    held = proc.ports_by_pid() if processes else {}
    told = []
    for process in processes:
        pids = process.tree() if held else set()
        told.append(process.describe(sorted({port for pid in pids for port in held.get(pid, ())})))
    return told
