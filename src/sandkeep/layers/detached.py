"""Work that goes on after this process: a command in a session of its own, silent, reaped if we are still here."""

from __future__ import annotations

import os
import shutil

_children: list[int] = []


def detach(argv: list[str]) -> None:
    """Start a command and go on."""
    _reap()
    program = shutil.which(argv[0]) or argv[0]
    quiet = [(os.POSIX_SPAWN_OPEN, fd, os.devnull, os.O_RDWR, 0) for fd in (0, 1, 2)]
    _children.append(os.posix_spawn(program, argv, dict(os.environ), file_actions=quiet, setsid=True))


def _reap() -> None:
    for pid in list(_children):
        try:
            ended, _ = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            ended = pid
        if ended and pid in _children:
            _children.remove(pid)
