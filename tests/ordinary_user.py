"""Running tests as a real ordinary user.

The user `sandkeep-test` is made once and stays. Its processes see the interpreter, its libraries, the sources and the
tests under a folder of their own, bind-mounted in a private mount namespace: the originals may lie where only root can
look, and nothing is left mounted or copied.
"""

from __future__ import annotations

import fcntl
import os
import pwd
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import sandkeep

NAME = "sandkeep-test"
_LOCK = Path("/tmp/sandkeep-test-user.lock")  # one for the machine: the user is, too
_SETUP = """
set -e
while [ "$1" != -- ]; do mount --bind "$1" "$2"; shift 2; done
shift
exec setpriv --reuid "$UID_" --regid "$GID_" --clear-groups --inh-caps=-all -- "$@"
"""


def ensure() -> pwd.struct_passwd:
    """The test user, made with subordinate ids where it is missing. Safe from several test processes at once."""
    with open(_LOCK, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            found = pwd.getpwnam(NAME)
        except KeyError:
            subprocess.run(["useradd", "--no-create-home", "--shell", "/bin/sh", NAME], check=True, capture_output=True)
            found = pwd.getpwnam(NAME)
        for file, option in (("/etc/subuid", "--add-subuids"), ("/etc/subgid", "--add-subgids")):
            if not any(line.startswith(f"{NAME}:") for line in _lines(file)):
                subprocess.run(["usermod", option, "2000000000-2000065535", NAME], check=True, capture_output=True)
    return found


def _lines(file: str) -> list[str]:
    return Path(file).read_text().splitlines() if os.path.exists(file) else []


@contextmanager
def home() -> Iterator[Path]:
    """A folder that the user owns and can reach, removed at the end with whatever subordinate ids own in it."""
    user = ensure()
    with tempfile.TemporaryDirectory(prefix="sk-user-") as folder:
        os.chown(folder, user.pw_uid, user.pw_gid)
        yield Path(folder)


def run(code: str, *arguments: str, home: Path, env: dict[str, str] | None = None, timeout: float = 150) -> str:
    """Run Python `code` as the user, in `home`; its output. A failure shows what it said."""
    user = ensure()
    base = Path(getattr(sys, "_base_executable", sys.executable)).resolve()
    places = {
        Path(sys.base_prefix).resolve(): home / ".see/python",
        Path(sysconfig.get_paths()["purelib"]): home / ".see/libraries",
        Path(sandkeep.__file__).resolve().parents[1]: home / ".see/source",
        Path(__file__).resolve().parent: home / ".see/tests",
    }
    system = str(sys.base_prefix).startswith("/usr")
    binds: list[str] = []
    for source, target in places.items():
        target.mkdir(parents=True, exist_ok=True)
        if not (system and target.name == "python"):
            binds += [str(source), str(target)]
    interpreter = str(base) if system else str(home / ".see/python" / base.relative_to(Path(sys.base_prefix).resolve()))
    path = os.pathsep.join(str(home / ".see" / name) for name in ("source", "tests", "libraries"))
    script = _SETUP.replace("$UID_", str(user.pw_uid)).replace("$GID_", str(user.pw_gid))
    done = subprocess.run(
        [
            *("unshare", "--mount", "--propagation", "private", "/bin/sh", "-c", script, "sh", *binds, "--"),
            *(interpreter, "-B", "-c", code, *arguments),
        ],
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": path,
            "LD_LIBRARY_PATH": "" if system else str(home / ".see/python/lib"),  # where a shared libpython is now
            "HOME": str(home),
            "TMPDIR": str(home),
            **(env or {}),
        },
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=timeout,
    )
    if done.returncode:
        raise AssertionError(f"as {NAME} ({done.returncode}):\n{done.stdout}")
    return done.stdout
