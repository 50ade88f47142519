"""The few Linux calls that Python lacks: namespaces, the mount API by file descriptor, pivot_root.

Every function raises OSError with the call's name; none keeps state. All of them act on the calling *thread*.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
from collections.abc import Callable
from typing import TypeVar

CLONE_FS = 0x00000200
CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000

MS_RDONLY = 1
MS_NOSUID = 2
MS_NODEV = 4
MS_NOEXEC = 8
MS_REMOUNT = 32
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2

MOUNT_ATTR_NODEV = 0x4

_PR_SET_PDEATHSIG = 1
_AT_FDCWD = -100
_AT_RECURSIVE = 0x8000
_OPEN_TREE_CLONE = 1
_CLOEXEC = os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 0x4
_MOVE_MOUNT_T_EMPTY_PATH = 0x40
_FSCONFIG_SET_FLAG = 0
_FSCONFIG_SET_STRING = 1
_FSCONFIG_CMD_CREATE = 6
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_BENEATH = 0x08
RESOLVE_IN_ROOT = 0x10

_X86 = os.uname().machine == "x86_64"
_PIVOT_ROOT = 155 if _X86 else 41
# From open_tree on, the numbers are the same on every architecture.
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT, _OPENAT2 = 428, 429, 430, 431, 432, 437

_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long

T = TypeVar("T")


def _call(name: str, number: int, *arguments: object) -> int:
    converted = [ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result: int = _syscall(ctypes.c_long(number), *converted)
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _libc_call(name: str, *arguments: object) -> None:
    if getattr(_libc, name)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")


def unshare(flags: int) -> None:
    _libc_call("unshare", ctypes.c_int(flags))


def setns(fd: int, kind: int) -> None:
    _libc_call("setns", ctypes.c_int(fd), ctypes.c_int(kind))


def die_with(parent: int) -> None:
    """Be killed when process `parent`, which started this one, ends."""
    _libc_call("prctl", ctypes.c_int(_PR_SET_PDEATHSIG), ctypes.c_ulong(signal.SIGKILL))
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    _libc_call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode() if kind else None,
        ctypes.c_ulong(flags),
        os.fsencode(data) if data else None,
    )


def umount(target: str, flags: int = 0) -> None:
    _libc_call("umount2", os.fsencode(target), ctypes.c_int(flags))


def pivot_root(new: str, old: str) -> None:
    _call("pivot_root", _PIVOT_ROOT, os.fsencode(new), os.fsencode(old))


def clone_tree(path: str) -> int:
    """A detached copy of the mount at `path` with all below it."""
    return _call("open_tree", _OPEN_TREE, _AT_FDCWD, os.fsencode(path), _OPEN_TREE_CLONE | _CLOEXEC | _AT_RECURSIVE)


def attach(tree: int, place: int) -> None:
    """Mount the detached `tree` on the folder or file that the descriptor `place` names."""
    flags = _MOVE_MOUNT_F_EMPTY_PATH | _MOVE_MOUNT_T_EMPTY_PATH
    _call("move_mount", _MOVE_MOUNT, tree, b"", place, b"", flags)


def make_mount(kind: str, settings: list[tuple[str, str | None]], attributes: int) -> int:
    """A detached mount of filesystem `kind`; a setting whose value is None is a flag."""
    context = _call("fsopen", _FSOPEN, kind.encode(), 1)
    try:
        for key, value in settings:
            if value is None:
                _call(f"fsconfig {key}", _FSCONFIG, context, _FSCONFIG_SET_FLAG, key.encode(), None, 0)
            else:
                _call(f"fsconfig {key}", _FSCONFIG, context, _FSCONFIG_SET_STRING, key.encode(), value.encode(), 0)
        _call(f"create {kind}", _FSCONFIG, context, _FSCONFIG_CMD_CREATE, None, None, 0)
        return _call("fsmount", _FSMOUNT, context, 1, attributes)
    except OSError as error:
        said = _read_messages(context)
        raise OSError(error.errno, f"{error.strerror}{': ' + said if said else ''}") from None
    finally:
        os.close(context)


def _read_messages(context: int) -> str:
    said = []
    try:
        while text := os.read(context, 4096):
            said.append(text.decode(errors="replace").strip())
    except OSError:  # ENODATA: the kernel has said all it had to say
        pass
    return "; ".join(said)


class _How(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_beneath(folder: int, path: str, flags: int) -> int:
    """Open `path` under `folder`; a symlink or `..` anywhere in it is refused by the kernel."""
    how = _How(flags | os.O_CLOEXEC, 0, RESOLVE_BENEATH | RESOLVE_NO_SYMLINKS | RESOLVE_NO_MAGICLINKS)
    return _call("openat2", _OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))


def open_in_root(folder: int, path: str, flags: int) -> int:
    """Open `path` as it would be found with `folder` as the root; symlinks lead nowhere else."""
    how = _How(flags | os.O_CLOEXEC, 0, RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS)
    return _call("openat2", _OPENAT2, folder, os.fsencode(path), ctypes.byref(how), ctypes.sizeof(how))


def in_thread(function: Callable[[], T]) -> T:
    """Run `function` in a thread of its own, so that the namespaces it enters end with it."""
    answer: list[T] = []
    failure: list[BaseException] = []

    def body() -> None:
        try:
            answer.append(function())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=body, name="sandkeep-namespace")
    thread.start()
    thread.join()
    if failure:
        raise failure[0]
    return answer[0]


def private_mounts() -> None:
    """Give the calling thread a mount namespace of its own, from which nothing spreads back."""
    unshare(CLONE_NEWNS)
    mount("none", "/", None, MS_REC | MS_PRIVATE)


def enter_mounts(pid: int) -> None:
    """The mount namespace of process `pid`, for the calling thread."""
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
    try:
        unshare(CLONE_FS)
        setns(namespace, CLONE_NEWNS)
    finally:
        os.close(namespace)


def in_user_namespace() -> bool:
    """True unless every id of the kernel exists here."""
    with open("/proc/self/uid_map") as ids:
        return ids.read().split() != ["0", "0", "4294967295"]
