"""Starting a process without fork: ids and folder are changed here for the moment of posix_spawn, which is twice as fast."""

from __future__ import annotations

import errno
import os
import signal

from .people import Acting
from .problems import spawn_problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple

    from .people import Person

# Descriptors of a shell session inside the child; reserved here so that no other lands on them.
BLOB, HISTORY, GATE = 251, 252, 253


def reserve() -> None:
    null = os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC)
    for fd in (BLOB, HISTORY, GATE):
        os.dup2(null, fd, inheritable=False)
    os.close(null)


def find(program: str, path: str) -> str:
    """The program's file as execvp would choose it."""
    if "/" in program:
        return program
    for folder in path.split(":"):
        file = os.path.join(folder or ".", program)
        if os.path.isfile(file) and os.access(file, os.X_OK):
            return file
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), program)


def spawn(
    argv: List[str], env: Dict[str, str], cwd: str, person: Person, fds: Dict[int, int], tty: Optional[str]
) -> int:
    """The pid of a new session's leader, with the given descriptors (child's to ours) or a terminal, and no others."""
    actions: List[Tuple[Any, ...]] = [(os.POSIX_SPAWN_DUP2, ours, child) for child, ours in fds.items()]
    if tty is not None:  # the first terminal that a session's leader opens becomes its own
        actions.append((os.POSIX_SPAWN_OPEN, 0, tty, os.O_RDWR, 0))
        actions += [(os.POSIX_SPAWN_DUP2, 0, 1), (os.POSIX_SPAWN_DUP2, 0, 2)]
    what = cwd
    try:
        with Acting(person):
            os.chdir(cwd)
            what = argv[0]
            file = find(argv[0], env.get("PATH", "/usr/bin:/bin"))
            return os.posix_spawn(
                file,
                argv,
                env,
                file_actions=actions,
                setsid=True,
                setsigmask=[],
                setsigdef=[signal.SIGPIPE, signal.SIGXFSZ],
            )
    except OSError as error:
        raise spawn_problem(error, what)
    finally:
        os.chdir("/")
