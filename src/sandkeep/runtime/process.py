"""Processes of the host by identity: a pid with its start time, so that a reused pid is never mistaken for ours."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Process:
    pid: int
    started: int

    def alive(self) -> bool:
        found = _stat(self.pid)
        return found is not None and found[0] not in "ZX" and found[1] == self.started

    def kill(self, patience: float = 60.0) -> None:
        """SIGKILL, and wait until it has ended."""
        try:
            handle = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive():
                signal.pidfd_send_signal(handle, signal.SIGKILL)
                _ended(handle, patience)
        except ProcessLookupError:
            pass
        finally:
            os.close(handle)


def recorded(dir: Path) -> Process | None:
    """Process 1 of the sandbox in this folder, as its start wrote it down; ended or not."""
    try:
        pid, started = short(f"{dir}/bundle/process").split()
    except FileNotFoundError:
        return None
    return Process(int(pid), int(started))


def wait(pid: int, patience: float) -> bool:
    """Whether the process ends in time; it is not reaped."""
    handle = os.pidfd_open(pid)
    try:
        return _ended(handle, patience)
    finally:
        os.close(handle)


def _ended(handle: int, patience: float) -> bool:
    waiting = select.poll()
    waiting.register(handle, select.POLLIN)
    return bool(waiting.poll(patience * 1000))


def find(pid: int) -> Process | None:
    found = _stat(pid)
    return Process(pid, found[1]) if found else None


def _stat(pid: int) -> tuple[str, int] | None:
    try:
        text = short(f"/proc/{pid}/stat")
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text[text.rindex(b")") + 2 :].split()
    return fields[0].decode(), int(fields[19])


def short(path: str) -> bytes:
    """All of a file that is short, in little time: listings read thousands."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, 4096)
    finally:
        os.close(handle)


def naming(argument: str) -> list[Process]:
    """The processes with this very argument, or with it after an `=`."""
    return _whose("cmdline", lambda text: _has_word(text, argument))


def names(pid: int, argument: str) -> bool:
    """Whether this is one of them."""
    try:
        return _has_word(Path(f"/proc/{pid}/cmdline").read_bytes(), argument)
    except OSError:
        return False


def _has_word(text: bytes, argument: str) -> bool:
    wanted = os.fsencode(argument)
    return any(word == wanted or word.endswith(b"=" + wanted) for word in text.split(b"\0"))


def seeing(host: Path, guest: str) -> list[Process]:
    """The processes that see the host's folder `host` mounted at `guest`: how those inside a sandbox are known."""
    mark = f" {_within(os.path.realpath(host))} {_escape(guest)} ".encode(errors="surrogateescape")
    return _whose("mountinfo", lambda text: mark in text)


def _within(path: str) -> str:
    """A folder as mountinfo names the source of a bind mount: its filesystem, and its path within that."""
    deepest, found = "", ""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        _, _, device, root, place, *_ = line.split(" ")
        above = place.rstrip("/") + "/"
        if _escape(path).startswith(above) and len(above) >= len(deepest):
            deepest, found = above, f"{device} {root.rstrip('/')}/{_escape(path)[len(above) :]}"
    return found


def sees(pid: int, ending: str) -> bool:
    """Whether it has something mounted whose path, on its own file system, ends so, and which is not removed."""
    try:
        lines = Path(f"/proc/{pid}/mountinfo").read_text(errors="surrogateescape").splitlines()
    except OSError:  # ended
        return False
    return any(line.split(" ", 4)[3].endswith(ending) for line in lines)


def having_mounted(place: Path) -> list[Process]:
    """The processes in whose mount namespace something is mounted on the folder `place`: how launchers are known."""
    mark = f" {_escape(os.path.realpath(place))} ".encode(errors="surrogateescape")
    return _whose("mountinfo", lambda text: mark in text)


def _escape(path: str) -> str:
    """A path as mountinfo spells it."""
    return path.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011").replace("\n", "\\012")


def _whose(file: str, matches: Callable[[bytes], bool]) -> list[Process]:
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            text = Path(f"/proc/{name}/{file}").read_bytes()
        except OSError:  # ended, or not ours to look at
            continue
        if matches(text) and (one := find(int(name))):
            found.append(one)
    return found


def cpu_seconds(pid: int) -> float:
    """Processor time of one process and of its children that have ended; 0 where it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, text[text.rindex(")") + 2 :].split()[11:15])) / os.sysconf("SC_CLK_TCK")


def pss(pid: int) -> int:
    """Proportional memory of one process in bytes; 0 where it has ended."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0
