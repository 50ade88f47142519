"""Where host and guest meet. The host makes and owns all of it: two folders of a sandbox's own folder.

`link/` is seen by nobody inside. Its socket `guest.sock` becomes process 1's standard input, and process 1 listens on it; or,
where a runtime can't be given a listener (runsc), its pipe `calls` does. Who wants to talk then makes a socket in `run/`, which
is shown inside read-only, writes its name into the pipe, and the guest connects to it.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import socket
import stat
import struct
from contextlib import suppress
from pathlib import Path

from sandkeep.errors import NotTheGuest, SandboxDead
from sandkeep.runtime import cgroup, process

HOSTS, SHOWN = "link", "run"
SOCKET, CALLS = "guest.sock", "calls"
NUMBERS = "numbers"  # the guest's note, a file of the host's: all that it may write, and mounted in `run/`
ABSENT = (FileNotFoundError, ConnectionRefusedError, ConnectionResetError, NotADirectoryError)
_WAKE = b"wake\n"
_UCRED = struct.Struct("3i")


class Socket(socket.socket):
    """A connection that its link forgot ends with it, also where the collector comes to it before whoever holds it."""

    def __del__(self) -> None:
        self.close()


def make(dir: Path, *, calls: bool) -> int:
    """The standard input of a process 1 that is about to start. What an earlier one left is removed."""
    for name in (HOSTS, SHOWN):
        (dir / name).mkdir(mode=0o700, exist_ok=True)
        _empty(dir / name)
    for folder in (dir, dir / SHOWN):
        os.close(os.open(folder / NUMBERS, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    if calls:
        os.mkfifo(dir / HOSTS / CALLS, 0o600)
        return os.open(dir / HOSTS / CALLS, os.O_RDWR | os.O_CLOEXEC)  # a writer of its own: it never reads an end
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        with _folder(dir, HOSTS) as place:
            sock.bind(place.address(SOCKET))
        os.chmod(dir / HOSTS / SOCKET, 0o600)
        return sock.detach()


def _empty(folder: Path) -> None:
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path)
            else:
                os.unlink(entry.path)


def foreign(dir: Path) -> bool:
    """Started by a version of ours that met its guests elsewhere."""
    return not (dir / HOSTS).exists() and os.path.lexists(dir / SHOWN / SOCKET)


class _folder:
    """A folder whose path may be longer than a socket's address can be."""

    def __init__(self, dir: Path, name: str) -> None:
        self.fd = os.open(dir / name, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)

    def address(self, name: str) -> str:
        return f"/proc/self/fd/{self.fd}/{name}"

    def __enter__(self) -> _folder:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def listening(dir: Path) -> Socket | None:
    """A connection to the guest's listener; None where the guest is called instead."""
    with _folder(dir, HOSTS) as place:
        if _is_pipe(place):
            return None
        found = os.open(SOCKET, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.fd)
    sock = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise _stranger("what lies in its socket's place is none")
        sock.connect(f"/proc/self/fd/{found}")
        check(sock, dir)
    except BaseException:
        sock.close()
        raise
    finally:
        os.close(found)
    return sock


def _is_pipe(place: _folder) -> bool:
    try:
        return stat.S_ISFIFO(os.stat(CALLS, dir_fd=place.fd, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False


class Call:
    """A call to a guest that comes to us. `listener` is where it comes, `pipe` breaks when there is nobody to come."""

    def __init__(self, dir: Path) -> None:
        self._dir = dir
        self._name = ""
        self.pipe = _writer(dir)
        self.listener = Socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            with _folder(dir, SHOWN) as place:
                name = secrets.token_hex(16)
                self.listener.bind(place.address(name))
            self._name = name
            self.listener.listen(1)
            self.listener.setblocking(False)
            _say(self.pipe, name.encode() + b"\n")
        except BaseException:
            self.close()
            raise

    def accept(self) -> Socket:
        """Who came, once somebody has."""
        came, _ = self.listener.accept()
        sock = Socket(fileno=came.detach())
        try:
            check(sock, self._dir)
        except BaseException:
            sock.close()
            raise
        return sock

    def __enter__(self) -> Call:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.listener.close()
        os.close(self.pipe)
        if self._name:
            with suppress(OSError):
                os.unlink(self._dir / SHOWN / self._name)


def wake(dir: Path) -> None:
    """End the guest's sleep; for one that is awake, nothing."""
    pipe = _writer(dir)
    try:
        _say(pipe, _WAKE)
    finally:
        os.close(pipe)


def _writer(dir: Path) -> int:
    try:
        with _folder(dir, HOSTS) as place:
            return os.open(CALLS, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.fd)
    except OSError as error:
        if error.errno == errno.ENXIO:  # nobody has it open for reading
            raise ConnectionRefusedError from None
        raise


def _say(pipe: int, words: bytes) -> None:
    """Whole or not at all: short words into a pipe are never torn."""
    try:
        os.write(pipe, words)
    except BlockingIOError:
        raise SandboxDead("the guest takes no more calls", "kill this sandbox") from None
    except BrokenPipeError:
        raise ConnectionRefusedError from None


def check(sock: socket.socket, dir: Path) -> None:
    """Whoever is at the other end is this sandbox: process 1 that listens, or (runsc) its gofer or kernel that came."""
    pid, _, _ = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    known = process.recorded(dir)
    if known is None or not known.alive():
        raise ConnectionRefusedError
    if pid != known.pid and not _belongs(pid, dir):
        raise _stranger(f"process {pid} of this machine answered in its place")


def _belongs(pid: int, dir: Path) -> bool:
    """In the sandbox's control groups; where there can be none, started by its runtime with its folder."""
    if cgroup.usable():
        return cgroup.holds(cgroup.name_of(dir.name, dir), pid)
    return process.names(pid, str(dir / "runtime"))


def _stranger(why: str) -> NotTheGuest:
    return NotTheGuest(f"this is not the sandbox's guest: {why}; nothing was said to it", "kill this sandbox")
