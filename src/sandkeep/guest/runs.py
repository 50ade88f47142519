"""Starting commands: in the shell session, in its background, on a terminal; and following what they write."""

from __future__ import annotations

import fcntl
import os
import signal
import struct
import termios

from . import frames, proc
from .problems import BAD_ARGUMENT, PROCESS_NOT_FOUND, Problem
from .processes import STREAMS, Follower, Process
from .shell import quote
from .spawn import BLOB, HISTORY, spawn
from .streams import Input
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Set, Union

    from .main import Guest
    from .people import Person
    from .wire import Connection

_MAX_DUMP = 16 << 20


class Follow(Task, Follower):
    """A client that reads a process's output live, and may write its input on the same connection."""

    def __init__(
        self, guest: Guest, conn: Connection, process: Process, at: Dict[int, int], limit: Optional[int]
    ) -> None:
        super().__init__()
        self._guest = guest
        self._conn = conn
        self._process = process
        self._limit = limit
        self._sent = {1: 0, 2: 0}
        self._dropped = {1: 0, 2: 0}
        self._truncated = False
        self._done = False
        self.at.update(at)
        for stream, output in process.outputs.items():
            if self.at[stream] > output.ring.end:
                raise Problem(BAD_ARGUMENT, "{} has not come as far as {}".format(STREAMS[stream], self.at[stream]))
            self._skip(stream)
        conn.task = self
        process.follow(self)

    def _skip(self, stream: int) -> None:
        missed = self._process.outputs[stream].ring.start - self.at[stream]
        if missed > 0:
            self._dropped[stream] += missed
            self.at[stream] += missed

    def pump(self) -> None:
        if self._done:
            return
        behind = False
        for stream, output in self._process.outputs.items():
            self._skip(stream)
            while self.at[stream] < output.ring.end and not self._conn.full:
                data = output.ring.read(self.at[stream], frames.CHUNK)
                self.at[stream] += len(data)
                self._send(stream, data)
            behind = behind or self.at[stream] < output.ring.end
        self._process.advance()
        if self._process.settled and not behind:
            self._finish()

    def _send(self, stream: int, data: bytes) -> None:
        if self._limit is not None and self._sent[stream] + len(data) > self._limit:
            self._truncated = True
            data = data[: self._limit - self._sent[stream]]
        if data:
            self._sent[stream] += len(data)
            self._conn.send(stream, data)

    def _finish(self) -> None:
        self._done = True
        process = self._process
        process.leave(self)
        if process.input is not None:
            process.input.on_room = None
        if not process.background:
            self._guest.table.forget(process)
        missed = {stream: count for stream, count in self._dropped.items() if count}
        told = {"truncated": self._truncated, "dropped": _by_name(missed), "positions": _by_name(self.at)}
        self._conn.finish({"ok": True, **process.result(), **told})

    def frame(self, kind: int, payload: bytes) -> None:
        source = self._process.input
        if kind != frames.DATA or not self._conn.body or source is None:
            super().frame(kind, payload)
        elif payload:
            _feed(self._conn, source, payload)
        else:
            self._conn.body = False
            source.end()

    def drained(self) -> None:
        self.pump()

    def gone(self) -> None:
        self._done = True
        self._process.leave(self)
        if self._process.input is not None and self._conn.body:
            self._process.input.on_room = None
            self._process.input.end()


class Feed(Task):
    """Data frames of one request into a process's input."""

    def __init__(self, conn: Connection, source: Input) -> None:
        self._conn = conn
        self._source = source
        conn.task = self

    def frame(self, kind: int, payload: bytes) -> None:
        if kind != frames.DATA:
            super().frame(kind, payload)
        elif payload:
            _feed(self._conn, self._source, payload)
        else:
            self._conn.body = False
            self._conn.finish({"ok": True, "open": self._source.open})

    def gone(self) -> None:
        self._source.on_room = None


class Wait(Task):
    """A client that waits for a process to settle. It reads no output, so it holds none back."""

    def __init__(self, conn: Connection, process: Process, timeout: Optional[float]) -> None:
        self._conn = conn
        self._process = process
        self._timer = None if timeout is None else conn.loop.later(timeout, lambda: self._answer(None))
        conn.task = self
        process.on_settled.append(self._answer)

    def _answer(self, _process: Optional[Process]) -> None:
        if self._conn.task is self:
            self.gone()
            self._conn.finish({"ok": True, "running": not self._process.settled, **self._process.result()})

    def gone(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._answer in self._process.on_settled:
            self._process.on_settled.remove(self._answer)


def _feed(conn: Connection, source: Input, payload: bytes) -> None:
    source.write(payload)
    if source.full:
        source.on_room = lambda: _go_on(conn, source)
        conn.pause(True)


def _go_on(conn: Connection, source: Input) -> None:
    source.on_room = None
    conn.pause(False)


def _by_name(counts: Dict[int, int]) -> Dict[str, int]:
    return {STREAMS[stream]: count for stream, count in counts.items()}


# --- starting


class Plan:
    """One process to be: what it runs, as whom, where, with what."""

    def __init__(self, guest: Guest, argv: List[str], code: Optional[str], cwd: Optional[str], env: Optional[Dict[str, str]],
                 user: Optional[Union[str, int]], tag: Optional[str]) -> None:  # fmt: skip
        session = guest.session
        self.guest = guest
        self.argv = argv
        self.code = code
        self.person: Person = session.choose(user)
        self.run = guest.next_run()
        self.given = env or {}
        self.env = {**session.environment(self.person, self.given), proc.MARK: self.run}
        self.cwd = session.folder(cwd, self.person)
        words = argv if code is None else [argv[0], "-c", code]
        line = " ".join(map(quote, argv)) if code is None else code
        shown: Dict[str, Any] = {"argv": [session.masked(word) for word in words], "code": session.masked(line)}
        given = {name: value for name, value in self.given.items() if session.masked(value) == value}
        self.about = {**shown, "cwd": self.cwd, "env": given, "user": self.person.name, "tag": tag, "pty": False}

    def start(self, fds: Dict[int, int], tty: Optional[str], background: bool) -> Process:
        pid = spawn(self.argv, self.env, self.cwd, self.person, fds, tty)
        return Process(self.guest.loop, pid, self.run, self.about, background)

    def on_pipes(self, shell: Dict[int, int], stdin: bool, background: bool) -> Process:
        ours: List[int] = []
        theirs: Dict[int, int] = dict(shell)
        try:
            for fd in (1, 2):
                read, theirs[fd] = os.pipe()
                ours.append(read)
            if stdin:
                theirs[0], write = os.pipe()
                ours.append(write)
            else:
                theirs[0] = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
            process = self.start(theirs, None, background)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in (0, 1, 2):
                if fd in theirs:
                    os.close(theirs[fd])
        process.add_output(1, ours[0])
        process.add_output(2, ours[1])
        if stdin:
            process.input = Input(self.guest.loop, ours[2])
        return process

    def on_terminal(self, shell: Dict[int, int], cols: int, rows: int) -> Process:
        master, slave = os.openpty()
        try:
            fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
            if self.person.uid != os.geteuid():
                os.fchown(slave, self.person.uid, -1)
            self.env.setdefault("TERM", "xterm-256color")
            self.about["pty"] = True
            process = self.start(shell, os.ttyname(slave), True)
        except BaseException:
            os.close(master)
            raise
        finally:
            os.close(slave)
        process.terminal = master
        process.input = Input(self.guest.loop, os.dup(master))
        process.add_output(1, master)
        return process


class Script:
    """The memory file through which a shell gets its session and gives it back."""

    def __init__(self, guest: Guest, code: str, save: bool) -> None:
        shell = guest.session.shell
        text = shell.script(guest.session.state, code, save)
        self._guest = guest
        self._began = dict(guest.session.env)
        self._fd = os.memfd_create("shell")
        self._length = len(text)
        os.write(self._fd, text)
        if shell.bash:
            os.lseek(self._fd, 0, os.SEEK_SET)
        self.fds = {BLOB: self._fd, HISTORY: guest.session.history.fd}

    def close(self) -> None:
        os.close(self._fd)

    def absorb(self, process: Process, fixed: Set[str], keep_cwd: bool) -> None:
        """Into the session, unless the call was killed."""
        size = os.fstat(self._fd).st_size - self._length
        whole = process.status is not None and not process.timed_out and process.signal is None and size <= _MAX_DUMP
        process.saved = whole and self._guest.session.absorb(
            os.pread(self._fd, size, self._length), fixed, keep_cwd, self._began
        )
        self.close()


def run(guest: Guest, conn: Connection, code: str, cwd: Optional[str], env: Optional[Dict[str, str]],
        user: Optional[Union[str, int]], timeout: Optional[float], stdin: bool, record: bool, background: bool,
        tag: Optional[str], max_output: Optional[int]) -> Optional[Dict[str, Any]]:  # fmt: skip
    session = guest.session
    plan = Plan(guest, session.shell.argv(), code, cwd, env, user, tag)
    script = Script(guest, code, save=not background)
    if record:
        session.record(code)
    try:
        process = plan.on_pipes(script.fds, stdin or background, background)
    except BaseException:
        script.close()
        if record:
            session.history.undo()
        raise
    guest.table.add(process)
    if timeout is not None:
        process.limit(timeout)
    if background:
        script.close()
        return {"ok": True, "pid": process.pid}
    fixed = set(plan.given)
    if plan.person.uid != session.person.uid:
        fixed |= set(plan.person.environment())
    process.on_settled.insert(0, lambda done: script.absorb(done, fixed, cwd is not None))
    conn.send_soon({"started": process.pid})
    Follow(guest, conn, process, {}, max_output)
    return None


def start(guest: Guest, conn: Connection, argv: Optional[List[str]], code: Optional[str], stdin: bool, follow: bool, pty: bool,
          cols: int, rows: int, cwd: Optional[str], env: Optional[Dict[str, str]], user: Optional[Union[str, int]],
          timeout: Optional[float], tag: Optional[str]) -> Optional[Dict[str, Any]]:  # fmt: skip
    if (argv is not None and code is not None) or (argv is None and code is None and not pty):
        raise Problem(BAD_ARGUMENT, "give either argv or code; neither is a shell on a terminal")
    if pty and not stdin:
        raise Problem(BAD_ARGUMENT, "a terminal is its process's input: stdin can't be false")
    shell = guest.session.shell
    words = argv or (shell.argv() if code is not None else [shell.program])
    plan = Plan(guest, words, code, cwd, env, user, tag)
    if not stdin:  # `code` is what starts it again
        plan.about["code"] = "exec </dev/null; " + plan.about["code"]
    script = Script(guest, code, save=False) if code is not None else None
    try:
        fds = script.fds if script else {}
        process = plan.on_terminal(fds, cols, rows) if pty else plan.on_pipes(fds, stdin, True)
    finally:
        if script:
            script.close()
    guest.table.add(process)
    if timeout is not None:
        process.limit(timeout)
    if not follow:
        return {"ok": True, "pid": process.pid}
    conn.send_json({"started": process.pid})
    Follow(guest, conn, process, {}, None)
    return None


# --- on processes that run


def attach(guest: Guest, conn: Connection, pid: int, positions: Optional[Dict[int, int]]) -> None:
    process = guest.table.find(pid)
    follow = Follow(guest, conn, process, positions or {}, None)
    follow.pump()


def wait(guest: Guest, conn: Connection, pid: int, timeout: Optional[float]) -> Optional[Dict[str, Any]]:
    process = guest.table.find(pid)
    if process.settled:
        return {"ok": True, "running": False, **process.result()}
    Wait(conn, process, timeout)
    return None


def send_signal(guest: Guest, conn: Connection, pid: int, signal: Union[str, int], tree: bool) -> Dict[str, Any]:
    process = guest.table.find(pid)
    number = signal_number(signal)
    if tree:
        pids = proc.tree(process.root, process.run)
    else:
        pids = set() if process.root is None else {pid}
    if not pids:
        raise Problem(PROCESS_NOT_FOUND, "process {} has ended".format(pid))
    if tree and number == signal_number("KILL"):
        process.end_tree()
    else:
        proc.kill(pids, number)
    return {"ok": True, "signalled": len(pids)}


def signal_number(value: Union[str, int]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < signal.NSIG:
        return value
    if isinstance(value, str):
        name = value.upper() if value.upper().startswith("SIG") else "SIG" + value.upper()
        found = signal.Signals.__members__.get(name)
        if found is not None:
            return int(found)
    raise Problem(BAD_ARGUMENT, "{!r} is not a signal".format(value))


def _input(guest: Guest, pid: int) -> Input:
    source = guest.table.find(pid).input
    if source is None or not source.open:
        raise Problem(PROCESS_NOT_FOUND, "process {} takes no more input".format(pid))
    return source


def write_stdin(guest: Guest, conn: Connection, pid: int) -> None:
    Feed(conn, _input(guest, pid))


def close_stdin(guest: Guest, conn: Connection, pid: int) -> Dict[str, Any]:
    process = guest.table.find(pid)
    source = _input(guest, pid)
    if process.terminal is not None:
        source.write(b"\x04")
    else:
        source.end()
    return {"ok": True}


def resize(guest: Guest, conn: Connection, pid: int, cols: int, rows: int) -> Dict[str, Any]:
    process = guest.table.find(pid)
    if process.terminal is None or not process.outputs[1].open:
        raise Problem(BAD_ARGUMENT, "process {} has no terminal".format(pid))
    fcntl.ioctl(process.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
    return {"ok": True}
