"""What /proc says: the process tree, who listens where, what is used. Also the killing and stopping of trees."""

from __future__ import annotations

import os
import resource
import signal
import stat
import time

from .people import Acting, lookup
from .problems import BUSY, Problem
from .spawn import BLOB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, Iterable, List, Optional, Set, Tuple, Union

    Identity = Tuple[int, int]

MARK = "SANDKEEP_RUN_ID"
_INHERITED = (0, 1, 2, BLOB)
_TICKS = os.sysconf("SC_CLK_TCK")
_STOPPING = 5.0
_PAGE = os.sysconf("SC_PAGE_SIZE")


class Row:
    __slots__ = ("cpu", "parent", "pid", "rss", "session", "state")

    def __init__(self, pid: int, fields: List[bytes]) -> None:
        self.pid = pid
        self.state = fields[0]
        self.parent = int(fields[1])
        self.session = int(fields[3])
        self.cpu = (int(fields[11]) + int(fields[12])) / _TICKS
        self.rss = int(fields[21]) * _PAGE

    @property
    def ended(self) -> bool:
        return self.state in b"ZX"


def row(pid: int) -> Optional[Row]:
    try:
        with open("/proc/{}/stat".format(pid), "rb", buffering=0) as source:
            text = source.read(4096)
    except OSError:
        return None
    return Row(pid, text[text.rindex(b")") + 2 :].split())


def table() -> Dict[int, Row]:
    found = (row(int(name)) for name in os.listdir("/proc") if name.isdigit())
    return {one.pid: one for one in found if one is not None}


def _as_owner(pid: int, read: Callable[[], Any], missing: Any) -> Any:
    """Read something of a process that only its owner may see, when root has not the capability to."""
    try:
        try:
            return read()
        except PermissionError:
            with Acting(lookup(os.stat("/proc/{}".format(pid)).st_uid)):
                return read()
    except (OSError, Problem):
        return missing


def identity(fd: Union[int, str]) -> Optional[Identity]:
    """Which pipe or file it is; None if it is a device, which others have open for reasons of their own."""
    try:
        found = os.stat(fd)
    except OSError:
        return None
    return (found.st_dev, found.st_ino) if stat.S_ISFIFO(found.st_mode) or stat.S_ISREG(found.st_mode) else None


def _marked(pid: int, mark: bytes, held: Set[Identity]) -> bool:
    def read() -> bool:
        with open("/proc/{}/environ".format(pid), "rb", buffering=0) as source:
            if mark in source.read(1 << 20).split(b"\0"):
                return True
        return any(identity("/proc/{}/fd/{}".format(pid, fd)) in held for fd in _INHERITED)

    return bool(_as_owner(pid, read, False))


def descendants(roots: Iterable[int], rows: Dict[int, Row]) -> Set[int]:
    """The roots and what hangs below them, by parent and by session."""
    found = set(roots)
    grown = True
    while grown:
        more = {row.pid for row in rows.values() if row.parent in found or row.session in found} - found
        found |= more
        grown = bool(more)
    return found


def tree(root: Optional[int], run: str, held: Set[Identity]) -> Set[int]:
    """A run's live processes, those that left its session included: they carry its mark in their environment, or have one of
    the pipes or the script that it was started with.

    Root is None once the main process has been reaped: its number may be somebody else's.
    """
    rows = table()
    mark = "{}={}".format(MARK, run).encode()
    strays = {pid for pid in rows if pid != os.getpid() and _marked(pid, mark, held)}
    return {
        pid
        for pid in descendants(strays if root is None else strays | {root}, rows)
        if pid in rows and not rows[pid].ended
    } - {os.getpid()}


def kill(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            pass


def end_tree(root: Optional[int], run: str, held: Set[Identity]) -> bool:
    """Kill a run's processes until none is left; False if some still live after a few rounds."""
    for _ in range(8):
        pids = tree(root, run, held)
        if not pids:
            return True
        kill(sorted(pids, key=lambda pid: pid != root), signal.SIGKILL)  # the root first: it must not see its child die
    return False


def others() -> Set[int]:
    """Every process of the sandbox but this one; outside a sandbox only our own descendants."""
    rows = table()
    me = os.getpid()
    pids = set(rows) if me == 1 else descendants({row.pid for row in rows.values() if row.parent == me}, rows)
    return {pid for pid in pids if pid != me and not rows[pid].ended}


def end_others() -> int:
    ended: Set[int] = set()
    until = time.monotonic() + _STOPPING
    while True:
        pids = others()
        if not pids:
            return len(ended)
        if time.monotonic() > until:
            raise Problem(BUSY, "processes {} do not end".format(sorted(pids)[:10]))
        kill(pids, signal.SIGKILL)
        ended |= pids
        time.sleep(0.001)


def shared_maps() -> bool:
    """Whether any process writes to a file through a shared mapping."""
    return any(_as_owner(pid, lambda pid=pid: _shares(pid), True) for pid in others())  # type: ignore[misc]


def _shares(pid: int) -> bool:
    with open("/proc/{}/maps".format(pid), "rb") as source:
        for line in source:
            words = line.split(None, 5)
            if words[1][1:2] == b"w" and words[1][3:4] == b"s" and len(words) > 5 and words[5].startswith(b"/"):
                if not words[5].startswith((b"/memfd:", b"/dev/", b"/SYSV")):
                    return True
    return False


def stop_others() -> Set[int]:
    """Stop every process that runs, until nobody does; those that were stopped already are not among the answer."""
    stopped: Set[int] = set()
    until = time.monotonic() + _STOPPING
    while True:
        rows = table()
        running = {pid for pid in others() if pid in rows and rows[pid].state not in b"Tt"}
        if not running:
            return stopped
        if time.monotonic() > until:
            kill(stopped, signal.SIGCONT)
            raise Problem(BUSY, "processes {} do not stop; all go on".format(sorted(running)[:10]))
        kill(running, signal.SIGSTOP)
        stopped |= running
        time.sleep(0.001)


def _listening() -> Dict[int, int]:
    """Inode to port of every listening TCP socket."""
    ports = {}
    for name in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            with open(name) as source:
                rows = [line.split() for line in source]
        except OSError:
            continue
        for row in rows[1:]:
            if len(row) > 9 and row[3] == "0A":
                ports[int(row[9])] = int(row[1].rsplit(":", 1)[1], 16)
    return ports


def ports() -> List[int]:
    return sorted(set(_listening().values()))


def ports_by_pid() -> Dict[int, Set[int]]:
    listening = _listening()
    held: Dict[int, Set[int]] = {}
    if listening:
        for pid in others():
            found = {listening[inode] for inode in _sockets(pid) if inode in listening}
            if found:
                held[pid] = found
    return held


def _sockets(pid: int) -> List[int]:
    def read() -> List[int]:
        folder = "/proc/{}/fd/".format(pid)
        inodes = []
        for fd in os.listdir(folder):
            try:
                target = os.readlink(folder + fd)
            except FileNotFoundError:
                continue
            if target.startswith("socket:["):
                inodes.append(int(target[8:-1]))
        return inodes

    found: List[int] = _as_owner(pid, read, [])
    return found


def usage() -> Dict[str, Any]:
    rows = table()
    live = [rows[pid] for pid in others() if pid in rows]
    own = resource.getrusage(resource.RUSAGE_SELF)
    reaped = resource.getrusage(resource.RUSAGE_CHILDREN)
    disk = os.statvfs("/")
    me = rows.get(os.getpid())
    return {
        "cpu_seconds": own.ru_utime + own.ru_stime + reaped.ru_utime + reaped.ru_stime + sum(row.cpu for row in live),
        "rss_bytes": sum(row.rss for row in live) + (me.rss if me else 0),
        "pids": len(live) + 1,
        "disk_total": disk.f_blocks * disk.f_frsize,
        "disk_free": disk.f_bavail * disk.f_frsize,
        "inodes_free": disk.f_favail,
    }
