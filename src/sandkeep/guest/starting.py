"""Starting processes: on pipes, on a terminal, and shells that are there before they are asked for."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios
import time

from . import proc
from .problems import Problem
from .processes import Process
from .shell import quote
from .spawn import BLOB, GATE, HISTORY, spawn
from .streams import Input

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple, Union

    from .loop import Timer
    from .main import Guest
    from .people import Person

_MAX_DUMP = 16 << 20
_GO = b"\n\n"
_IDLE = 60.0
_ENDING = 1.0
_TELLTALE = frozenset(("BASH_ENV", "TMOUT"))  # a shell acts on these before it has its script


class Plan:
    """One process to be: what it runs, as whom, where, with what."""

    def __init__(self, guest: Guest, argv: List[str], code: Optional[str], cwd: Optional[str], env: Optional[Dict[str, str]],
                 user: Optional[Union[str, int]], tag: Optional[str], number: Optional[int] = None) -> None:  # fmt: skip
        session = guest.session
        self.guest = guest
        self._number = number  # that it had before, if it is started again
        self.argv = argv
        self.person: Person = session.choose(user)
        self.given = env or {}
        self.env = session.environment(self.person, self.given)
        self.cwd = session.folder(cwd, self.person)
        words = argv if code is None else [argv[0], "-c", code]
        line = " ".join(map(quote, argv)) if code is None else code
        shown: Dict[str, Any] = {"argv": [session.masked(word) for word in words], "code": session.masked(line)}
        given = {name: value for name, value in self.given.items() if session.masked(value) == value}
        self.about = {**shown, "cwd": self.cwd, "env": given, "user": self.person.name, "tag": tag, "pty": False}

    def number(self, pid: int) -> int:
        if self._number is None:
            return self.guest.numbers.give(pid)
        self.guest.numbers.take(self._number)
        return self._number

    def on_pipes(self, fds: Dict[int, int], stdin: bool) -> Started:
        ours: List[int] = []
        theirs: Dict[int, int] = dict(fds)
        try:
            for fd in (1, 2):
                read, theirs[fd] = os.pipe()
                ours.append(read)
            if stdin:
                theirs[0], write = os.pipe()
                ours.append(write)
            else:
                theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            return Started(*self._spawn(theirs, None), ours)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in (0, 1, 2):
                if fd in theirs:
                    os.close(theirs[fd])

    def on_terminal(self, fds: Dict[int, int], cols: int, rows: int) -> Process:
        master, slave = os.openpty()
        try:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
            if self.person.uid != os.geteuid():
                os.fchown(slave, self.person.uid, -1)
            self.env.setdefault("TERM", "xterm-256color")
            self.about["pty"] = True
            pid, run = self._spawn(fds, os.ttyname(slave))
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)
        process = Process(self.guest.loop, self.number(pid), pid, run, self.about, True)
        process.terminal = master
        process.input = Input(self.guest.loop, os.dup(master))
        process.add_output(1, master)
        return process

    def _spawn(self, fds: Dict[int, int], tty: Optional[str]) -> Tuple[int, str]:
        run = self.guest.next_run()
        return spawn(self.argv, {**self.env, proc.MARK: run}, self.cwd, self.person, fds, tty), run


class Started:
    """A process on pipes, and our ends of them: stdout, stderr, perhaps stdin."""

    def __init__(self, pid: int, run: str, ours: List[int]) -> None:
        self.pid = pid
        self.run = run
        self.ours = ours
        self.waited = False

    def process(self, plan: Plan, background: bool) -> Process:
        process = Process(plan.guest.loop, plan.number(self.pid), self.pid, self.run, plan.about, background)
        process.add_output(1, self.ours[0])
        process.add_output(2, self.ours[1])
        if len(self.ours) > 2:
            process.input = Input(plan.guest.loop, self.ours[2])
        return process


class Script:
    """The memory file through which a shell gets its session and gives it back, and the gate at which it waits for that.

    The gate's second line is taken by the shell when it begins the command.
    """

    def __init__(self, guest: Guest) -> None:
        self._fd = os.memfd_create("shell")
        self._length = 0
        self._gate: Optional[int] = None
        self.fds = {BLOB: self._fd, HISTORY: guest.session.history.fd}
        if guest.session.shell.bash:
            self.fds[GATE], self._gate = os.pipe()

    def inherited(self) -> None:
        """From now on the shell alone has the gate's other end."""
        if GATE in self.fds:
            os.close(self.fds.pop(GATE))

    def give(self, text: bytes) -> None:
        """A shell that is gone is a BrokenPipeError."""
        self._length = os.pwrite(self._fd, text, 0)
        if self._gate is not None:
            os.write(self._gate, _GO)

    @property
    def begun(self) -> bool:
        """Whether a shell has come as far as the command: certainly not, if this is False."""
        if self._gate is None:
            return True
        try:
            return fcntl.ioctl(self._gate, termios.FIONREAD, bytes(4)) == bytes(4)
        except OSError:
            return True

    def again(self) -> None:
        """The same for another shell."""
        os.ftruncate(self._fd, self._length)
        os.lseek(self._fd, 0, os.SEEK_SET)
        self._close_gate()
        self.fds[GATE], self._gate = os.pipe()
        os.write(self._gate, _GO)

    def dump(self) -> Optional[bytes]:
        """What the shell has written behind its script; None if that is absurdly much."""
        size = os.fstat(self._fd).st_size - self._length
        return os.pread(self._fd, size, self._length) if size <= _MAX_DUMP else None

    def close(self) -> None:
        self.inherited()
        self._close_gate()
        os.close(self._fd)

    def _close_gate(self) -> None:
        if self._gate is not None:
            os.close(self._gate)
            self._gate = None


class Spare:
    """At most one shell that waits at its gate for the script of the next call.

    It is started when a call has been answered and the one before it was asked for with the same options, and it is used
    only by a call that would begin with the very same program, environment, folder and user. It knows nothing of the
    session's variables and functions: those come with the script. Nobody sees it in the process table; whoever must be
    alone here, or changes what it began with, drops it first.
    """

    def __init__(self, guest: Guest) -> None:
        self._guest = guest
        self._asked: Optional[Tuple[Any, ...]] = None
        self._waiting: Optional[Tuple[Started, Script]] = None
        self._began: Optional[Tuple[Any, ...]] = None
        self._timer: Optional[Timer] = None

    def shell(self, plan: Plan, text: bytes, stdin: bool) -> Tuple[Started, Script]:
        """A shell with this script: the one that waits, or a new one."""
        if self._waiting is not None and self._began == _beginning(plan, stdin):
            started, script = self._take()
            try:
                script.give(text)
                started.waited = True
                return started, script
            except BrokenPipeError:
                _end(started, script)
        self._drop()
        script = Script(self._guest)
        script.give(text)
        return _start(plan, script, stdin), script

    def answered(
        self, cwd: Optional[str], env: Optional[Dict[str, str]], user: Optional[Union[str, int]], stdin: bool
    ) -> None:
        """A call with these options has ended and its client knows: the next one may be alike."""
        guest, asked = self._guest, (cwd, env, user, stdin)
        again, self._asked = asked == self._asked, asked
        if not again or self._waiting is not None or not guest.session.shell.bash or guest.still:
            return
        try:
            plan = Plan(guest, guest.session.shell.argv(), "", cwd, env, user, None)
            if _TELLTALE & set(plan.env):
                return
            began, script = _beginning(plan, stdin), Script(guest)
            self._waiting = _start(plan, script, stdin), script
        except (Problem, OSError):
            return
        self._began = began
        self._timer = guest.loop.later(_IDLE, self.drop)

    def drop(self) -> None:
        """As if no call had been."""
        self._asked = None
        self._drop()

    def reaped(self, pid: int) -> None:
        if self._waiting is not None and self._waiting[0].pid == pid:
            _close(*self._take())

    def _take(self) -> Tuple[Started, Script]:
        assert self._waiting is not None
        assert self._timer is not None
        taken, self._waiting, self._began = self._waiting, None, None
        self._timer.cancel()
        return taken

    def _drop(self) -> None:
        if self._waiting is not None:
            _end(*self._take())


def _beginning(plan: Plan, stdin: bool) -> Tuple[Any, ...]:
    """All that a shell has before it gets its script."""
    try:
        folder = os.stat(plan.cwd)
    except OSError:
        return (object(),)
    return plan.argv, plan.env, plan.cwd, folder.st_dev, folder.st_ino, vars(plan.person), stdin


def _start(plan: Plan, script: Script, stdin: bool) -> Started:
    try:
        started = plan.on_pipes(script.fds, stdin)
    except BaseException:
        script.close()
        raise
    script.inherited()
    return started


def _end(started: Started, script: Script) -> None:
    """Until it is gone; somebody who traces it may delay that, but not us."""
    _close(started, script)
    until = time.monotonic() + _ENDING
    try:
        os.kill(started.pid, signal.SIGKILL)
        while os.waitpid(started.pid, os.WNOHANG)[0] == 0 and time.monotonic() < until:
            time.sleep(0.0001)
    except (ProcessLookupError, ChildProcessError):
        pass


def _close(started: Started, script: Script) -> None:
    script.close()
    for fd in started.ours:
        os.close(fd)
