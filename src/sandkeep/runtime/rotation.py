"""Switching the root of a living sandbox to new overlays.

The old root's sub-mounts are cloned onto the new root with their flags, then pivot_root swaps the two for every process
whose root or cwd was the old one: process 1, which the caller guarantees to be the only one. Until the pivot nothing
has changed; after it the old upper can only be written through descriptors that were open before.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from sandkeep.errors import RuntimeFailed
from sandkeep.runtime import kernel, overlay
from sandkeep.runtime.plan import Plan


@dataclass(frozen=True)
class _Mounted:
    id: int
    parent: int
    path: str


def rotate(plan: Plan, pid: int) -> None:
    try:
        kernel.in_thread(lambda: _rotate(plan, pid))
    except OSError as error:
        raise RuntimeFailed(f"the root of sandbox {plan.id} could not be switched: {error.strerror}") from error


def _rotate(plan: Plan, pid: int) -> None:
    with ExitStack() as undo:
        namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        undo.callback(os.close, namespace)
        kernel.private_mounts()  # in a user namespace, a new filesystem needs a mount namespace of its own
        fresh = overlay.build(plan)
        undo.callback(fresh.close)
        moved = _below_root(Path(f"/proc/{pid}/mountinfo").read_text(), own_usr=fresh.usr is not None)
        kernel.setns(namespace, kernel.CLONE_NEWNS)
        old = _open(undo, "/")
        usr = _open(undo, "/usr") if fresh.usr is not None else None
        trees = [(path, undo.enter_context(_Tree(path))) for path in moved]
        os.fchdir(fresh.root)
        if fresh.usr is not None:
            kernel.attach(fresh.usr, _place(undo, fresh.root, "usr", folder=True))
        for path, tree in trees:
            kernel.attach(tree.fd, _place(undo, fresh.root, path.lstrip("/"), tree.folder))
        kernel.attach(fresh.root, old)
        os.fchdir(fresh.root)
        try:
            kernel.pivot_root(".", ".")
        except OSError:
            kernel.umount(".", kernel.MNT_DETACH)
            raise
        held = [os.dup(old), *([os.dup(usr)] if usr is not None else [])]
        os.fchdir(old)
        kernel.umount(".", kernel.MNT_DETACH)
    threading.Thread(target=_let_go, args=(held,), name="sandkeep-let-go", daemon=True).start()


def _let_go(held: list[int]) -> None:
    """The end of an overlay syncs the whole filesystem below it: not while somebody waits for the switch."""
    for fd in held:
        os.close(fd)


class _Tree:
    """A detached clone of one sub-mount with all below it."""

    def __init__(self, path: str) -> None:
        self.fd = kernel.clone_tree(path)
        self.folder = stat.S_ISDIR(os.fstat(self.fd).st_mode)

    def __enter__(self) -> _Tree:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def _open(undo: ExitStack, path: str) -> int:
    fd = os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    undo.callback(os.close, fd)
    return fd


def _below_root(mountinfo: str, own_usr: bool) -> list[str]:
    """Where the mounts directly below the root are (and below /usr, when it gets a new overlay), parents first."""
    rows = []
    for line in mountinfo.splitlines():
        fields = line.split(" ")
        rows.append(_Mounted(int(fields[0]), int(fields[1]), _unescape(fields[4])))
    root = next(row for row in rows if row.path == "/")
    parents = {root.id}
    if own_usr:
        parents.update(row.id for row in rows if row.parent == root.id and row.path == "/usr")
    paths = {row.path for row in rows if row.parent in parents and row.id not in parents}
    return sorted(paths, key=lambda path: (path.count("/"), path))


def _unescape(text: str) -> str:
    return (
        text.encode("latin-1", "surrogateescape")
        .decode("unicode_escape")
        .encode("latin-1")
        .decode(errors="surrogateescape")
    )


def _place(undo: ExitStack, root: int, path: str, folder: bool) -> int:
    """The mount point `path` in the new root, made where it is missing; symlinks are not followed."""
    try:
        fd = kernel.open_beneath(root, path, os.O_PATH)
    except FileNotFoundError:
        _make(root, path, folder)
        fd = kernel.open_beneath(root, path, os.O_PATH)
    undo.callback(os.close, fd)
    if stat.S_ISDIR(os.fstat(fd).st_mode) != folder:
        raise OSError(errno.ENOTDIR, f"mount point /{path} is of another kind now")
    return fd


def _make(root: int, path: str, folder: bool) -> None:
    parent, _, name = path.rpartition("/")
    above = os.dup(root)
    if parent:
        os.close(above)
        try:
            above = kernel.open_beneath(root, parent, os.O_PATH | os.O_DIRECTORY)
        except FileNotFoundError:
            _make(root, parent, folder=True)
            above = kernel.open_beneath(root, parent, os.O_PATH | os.O_DIRECTORY)
    try:
        if folder:
            os.mkdir(name, 0o755, dir_fd=above)
        else:
            os.close(os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o644, dir_fd=above))
    finally:
        os.close(above)
