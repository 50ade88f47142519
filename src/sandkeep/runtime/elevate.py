"""Doing what needs root, as root or as an ordinary user.

Root calls the function. An ordinary user runs it in a child process that is root of a user namespace: id 0 is the
user, ids 1 to 65536 are the user's subordinate ids where the host grants them (/etc/subuid and newuidmap). Sandboxes
are started from the same maps, so that a file means the same owner everywhere.
"""

from __future__ import annotations

import os
import pickle
import pwd
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from sandkeep.errors import RuntimeFailed
from sandkeep.runtime import kernel

T = TypeVar("T")

_SOURCE = Path(__file__).resolve().parents[2]


def is_root() -> bool:
    return os.geteuid() == 0


@cache
def subordinate(file: str = "/etc/subuid") -> tuple[int, int] | None:
    """The first range of subordinate ids that this user may use, if any: (first, count)."""
    names = {str(os.getuid())}
    try:
        names.add(pwd.getpwuid(os.getuid()).pw_name)
    except KeyError:
        pass
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, rest = line.strip().partition(":")
        first, _, count = rest.partition(":")
        if name in names and first.isdigit() and count.isdigit() and int(count) > 1000:
            return int(first), int(count)
    return None


@cache
def id_map() -> str:
    """How ids inside become ids of the host: "root", "many" (subordinate ids) or "one" (only id 0 exists inside)."""
    if is_root():
        with open("/proc/self/uid_map") as ids:
            return "root" if sum(int(line.split()[2]) for line in ids) > 1000 else "one"
    tools = shutil.which("newuidmap") and shutil.which("newgidmap")
    return "many" if tools and subordinate() and subordinate("/etc/subgid") else "one"


def mapped(uid: int, gid: int) -> bool:
    """Whether an owner has an id inside. In a user namespace one without shows as the overflow id."""
    if is_root():
        return 65534 not in (uid, gid)
    return all(
        one == own or (id_map() == "many" and first <= one < first + min(count, 65536))
        for one, own, (first, count) in (
            (uid, os.getuid(), subordinate() or (0, 0)),
            (gid, os.getgid(), subordinate("/etc/subgid") or (0, 0)),
        )
    )


def elevated(
    function: Callable[..., T],
    *arguments: Any,
    join: int | None = None,
    inherit: bool = False,
    progress: Callable[..., None] | None = None,
) -> T:
    """`function(*arguments)` as root: here, or in a user namespace (that of process `join`, or a new one).

    The function must be a module's own, its arguments, result and exceptions picklable. With `inherit` it sees this
    process's environment, in which a store's keys may be. `progress`, if given, becomes the function's argument of that
    name, and is called in this process.
    """
    if is_root():
        return function(*arguments, progress=progress) if progress else function(*arguments)
    python = {"PYTHONPATH": os.pathsep.join([str(_SOURCE), *filter(None, sys.path)]), "PATH": _path()}
    code = "from sandkeep.runtime.elevate import _child; _child()"
    with (
        os.fdopen(os.memfd_create("words"), "r+b") as words,
        subprocess.Popen(
            [sys.executable, "-S", "-c", code, str(join or 0), str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=words,
            env={**(os.environ if inherit else {}), **python},
            close_fds=True,
        ) as child,
    ):
        try:
            if join is None:
                _map_ids(child)
            good, value = _answer(child, pickle.dumps((function, arguments, progress is not None)), progress)
        except BaseException:
            child.kill()
            raise
        if good is None:
            child.wait()
            said = os.pread(words.fileno(), 10_000, 0).decode(errors="replace").strip()
            raise RuntimeFailed(
                f"no user namespace: {said or 'the helper process died'}",
                "run `sandkeep doctor`; user namespaces may be switched off (sysctl kernel.unprivileged_userns_clone)",
            )
    if good:
        result: T = value
        return result
    raise value


def _answer(
    child: subprocess.Popen[bytes], request: bytes, progress: Callable[..., None] | None
) -> tuple[bool | None, Any]:
    """Whether the call was good, and its result or error; None if the child said nothing."""
    assert child.stdin is not None
    assert child.stdout is not None
    with suppress(BrokenPipeError):
        child.stdin.write(request)
    with suppress(BrokenPipeError):
        child.stdin.close()
    try:
        while True:
            kind, value = pickle.load(child.stdout)
            if kind != "progress":
                return kind == "done", value
            if progress:
                progress(*value)
    except (EOFError, pickle.UnpicklingError):
        return None, None


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _map_ids(child: subprocess.Popen[bytes]) -> None:
    assert child.stdin is not None
    assert child.stdout is not None
    if child.stdout.read(1) != b"\n":
        return
    pid = str(child.pid)
    if id_map() == "many":
        for tool, file, own in (("newuidmap", "/etc/subuid", os.getuid()), ("newgidmap", "/etc/subgid", os.getgid())):
            first, count = subordinate(file) or (0, 0)
            argv = [tool, pid, "0", str(own), "1", "1", str(first), str(min(count, 65536))]
            ran = subprocess.run(argv, capture_output=True, env={"PATH": _path()}, text=True)
            if ran.returncode:
                raise RuntimeFailed(f"{tool}: {ran.stderr.strip()}", f"check {file} and that {tool} is setuid root")
    else:
        Path(f"/proc/{pid}/setgroups").write_text("deny")
        Path(f"/proc/{pid}/gid_map").write_text(f"0 {os.getgid()} 1")
        Path(f"/proc/{pid}/uid_map").write_text(f"0 {os.getuid()} 1")
    child.stdin.write(b"\n")
    child.stdin.flush()


def _child() -> None:
    """The helper process: enter the namespace, become its root, do the call, send the answer."""
    asked, answer = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    join = int(sys.argv[1])
    if join:
        with open(f"/proc/{join}/ns/user") as namespace:
            kernel.setns(namespace.fileno(), kernel.CLONE_NEWUSER)
    else:
        kernel.unshare(kernel.CLONE_NEWUSER)
        answer.write(b"\n")
        answer.flush()
        asked.readline()
    if Path("/proc/self/setgroups").read_text().strip() == "allow":
        os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)
    kernel.die_with(int(sys.argv[2]))  # after the ids are set: a change of ids undoes it
    function, arguments, wants_progress = pickle.loads(asked.read())

    def progress(*facts: Any) -> None:
        pickle.dump(("progress", facts), answer)
        answer.flush()

    try:
        told = pickle.dumps(("done", function(*arguments, **({"progress": progress} if wants_progress else {}))))
    except Exception as error:
        told = pickle.dumps(("failed", error))
    answer.write(told)
    answer.close()
