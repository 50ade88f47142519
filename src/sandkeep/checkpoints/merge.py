"""Merging new layer trees with the parent checkpoint's tree into one canonical tree over the base.

Owns the rules of overlay: what hides what, and which of two equal ways to say a thing is kept. Only the new trees are
walked; of the parent's tree only the nodes along their paths are read. Nothing is written but nodes and chunks.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from sandkeep.checkpoints import nodes
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.contents import LargeFile, is_sparse, read_small, read_xattrs, same_state
from sandkeep.checkpoints.filters import Filter
from sandkeep.checkpoints.nodes import CHUNK, DIR, FIFO, FILE, SYMLINK, WHITEOUT, Entry
from sandkeep.checkpoints.places import join, open_folder
from sandkeep.errors import StateConflict
from sandkeep.layers.overlay import is_opaque, is_whiteout
from sandkeep.store.writer import Writer

Progress = Callable[[str, int, int], None]  # phase, entries done, bytes done
_REPORT_EVERY = 512


class PartsUnknown(Exception):
    """What the parent left out is to be kept now, or the other way round: all layers must be read."""


class _Folder:
    """A directory while it is merged: which trees have it, what the parent had, whether the base shows through."""

    __slots__ = ("above", "base_shows", "entry", "large", "late", "masked", "path", "pending", "rows", "trees")

    def __init__(self, path: bytes, entry: Entry) -> None:
        self.path = path
        self.entry = entry
        self.trees: list[int] = []
        self.above: Entry | None = None  # the parent checkpoint's directory at this path
        self.masked = False  # something between here and the base hides what is below
        self.base_shows = False
        self.rows: dict[bytes, Entry] = {}
        self.pending: list[_Folder] = []
        self.large: list[tuple[bytes, LargeFile, list[Future[bytes]]]] = []  # files that threads still read
        self.late: list[
            tuple[_Folder, _Folder]
        ] = []  # scanned folders that wait for such files, the inner ones first, with their parents

    def ready(self) -> bool:
        return all(
            part.done()
            for folder in (self, *(one for one, _ in self.late))
            for _, _, parts in folder.large
            for part in parts
        )


class Merge:
    def __init__(
        self, trees: list[int], base: Base, rules: Filter, read: nodes.Read, writer: Writer, progress: Progress | None,
        below: list[int] | None = None,
    ) -> None:  # fmt: skip
        self._trees = trees  # descriptors, the topmost first
        self._below = below or []  # the layers that show the parent
        self._base = base
        self._rules = rules
        self._read = read
        self._add, self._later = writer.add, writer.later
        self._add_node = partial(writer.add, meta=True)
        self._progress = progress
        self._links: dict[tuple[int, int], tuple[Entry, list[bytes]]] = {}
        self._environments: set[bytes] = set()
        self._incremental = False
        self.replaced: set[bytes] = set()  # paths of the parent's tree that are no longer what they were
        self.left_out: dict[bytes, str] = {}
        self._done = self._bytes = 0

    def run(self, parent: Entry | None, environments: Iterable[bytes] = ()) -> Entry:
        """The root of the merged tree. `environments`: what the parent left out as virtual environments."""
        self._incremental = parent is not None
        self._environments = set(environments)
        root = _Folder(b"", self._root_entry(parent))
        root.trees = list(range(len(self._trees)))
        root.above = parent
        root.base_shows = self._base.is_folder(b"")
        if not root.trees and parent is not None:
            return parent
        self._scan(root)
        stack = [root]
        while stack:
            here = stack[-1]
            if here.pending:
                below = here.pending.pop()
                self._scan(below)
                stack.append(below)
                continue
            stack.pop()
            if stack and not here.ready():
                stack[-1].late += [*here.late, (here, stack[-1])]
                continue
            done = self._finish(here)
            if stack:
                _put(stack[-1], here.entry.name, done)
        self._report(final=True)
        return done or root.entry

    def groups(self, before: list[list[bytes]]) -> list[list[bytes]]:
        """Paths that are one file: the parent's groups that still stand, and those of the new trees."""
        kept = [[path for path in group if not self._gone(path)] for group in before]
        found = [paths for _, paths in self._links.values()]
        return sorted(sorted(group) for group in kept + found if len(group) > 1)

    def all_left_out(self, before: Iterable[tuple[bytes, str]]) -> dict[bytes, str]:
        return {path: why for path, why in before if not self._gone(path)} | self.left_out

    def _gone(self, path: bytes) -> bool:
        return path in self.replaced or any(path[:at] in self.replaced for at, c in enumerate(path) if c == 0x2F)

    def _root_entry(self, parent: Entry | None) -> Entry:
        if self._trees:
            return self._folder_entry(b"", self._trees[0])[0]
        if parent is not None:
            return parent
        state = self._base.stat(b"")
        if state is None:
            return Entry(b"", DIR, 0o755)
        return Entry(b"", DIR, stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, mtime=state.st_mtime_ns)

    def _folder_entry(self, name: bytes, fd: int) -> tuple[Entry, bool]:
        state = os.fstat(fd)
        entry = Entry(
            name, DIR, stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, read_xattrs(fd), mtime=state.st_mtime_ns
        )
        return entry, is_opaque(fd)

    def _scan(self, here: _Folder) -> None:
        if here.above is not None:
            here.rows = {e.name: e for e in nodes.load(here.above, self._read)}
        decided: set[bytes] = set()
        open_below: dict[bytes, _Folder] = {}
        for tree in here.trees:
            fd = open_folder(self._trees[tree], here.path)
            try:
                self._scan_tree(here, tree, fd, decided, open_below)
            finally:
                os.close(fd)
        here.pending = sorted(open_below.values(), key=lambda folder: folder.path, reverse=True)
        for folder in here.pending:
            self._settle(here, folder)

    def _scan_tree(self, here: _Folder, tree: int, fd: int, decided: set[bytes], below: dict[bytes, _Folder]) -> None:
        with os.scandir(fd) as listing:
            found = sorted(
                (os.fsencode(item.name), item.is_dir(follow_symlinks=False), item.is_file(follow_symlinks=False))
                for item in listing
            )
        for name, is_folder, is_file in found:
            if name in decided:
                continue
            path = join(here.path, name)
            if not self._rules.idle and self._skip(here, name, path, fd, is_folder):
                decided.add(name)
                continue
            if is_folder:
                self._chain(name, path, tree, fd, decided, below)
                continue
            decided.add(name)
            if name in below:
                below[name].masked = True
                continue
            if self._incremental:
                self.replaced.add(path)
            if self._rules.leads(path):
                self._leave_out(path, fd, name)
                entry = None
            else:
                entry = self._file(here, name, path, tree, fd) if is_file else self._special(name, path, fd)
            if entry is None:
                self._erase(here, name, path)
            else:
                here.rows[name] = entry
                self._report(entry.size)

    def _chain(
        self, name: bytes, path: bytes, tree: int, fd: int, decided: set[bytes], below: dict[bytes, _Folder]
    ) -> None:
        child = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
        try:
            entry, opaque = self._folder_entry(name, child)
        finally:
            os.close(child)
        folder = below.setdefault(name, _Folder(path, entry))
        folder.trees.append(tree)
        if opaque:
            folder.masked = True
            decided.add(name)

    def _settle(self, here: _Folder, folder: _Folder) -> None:
        before = here.rows.get(folder.entry.name)
        if not folder.masked and before is not None:
            if before.kind == DIR:
                folder.above = before
                folder.masked = before.flag
            else:
                folder.masked = True
        if self._incremental and folder.above is None and (folder.masked or before is not None):
            self.replaced.add(folder.path)
        folder.base_shows = here.base_shows and not folder.masked and self._base.is_folder(folder.path)
        opaque = here.base_shows and folder.masked and self._base.is_folder(folder.path)
        folder.entry = folder.entry._replace(flag=opaque)

    def _skip(self, here: _Folder, name: bytes, path: bytes, fd: int, is_folder: bool) -> bool:
        why = ""
        if not is_folder and self._rules.leads(path):
            return False  # left out too, but it hides a folder of the scope's
        if self._rules.leaves_out(path, is_folder):
            why = "excluded"
        elif is_folder and self._rules.may_be_environment(name) and self._is_environment(here, path):
            why = "environment"
        if not why:
            return False
        if is_folder:
            self.left_out[path] = why
        else:
            self._leave_out(path, fd, name)
        here.rows.pop(name, None)
        if self._incremental:
            if not here.base_shows and self._base.stat(path) is not None:
                raise PartsUnknown  # is the base hidden here by a layer, or because all that is in it was?
            self.replaced.add(path)
        return True

    def _leave_out(self, path: bytes, fd: int, name: bytes) -> None:
        if not is_whiteout(os.stat(name, dir_fd=fd, follow_symlinks=False)):
            self.left_out[path] = "excluded"

    def _is_environment(self, here: _Folder, path: bytes) -> bool:
        """Whether the merged folder at `path` holds a pyvenv.cfg. What the parent left out for one stays out while that is there; without
        it, what is in the layers below is needed."""
        config, whole = _config([self._trees[tree] for tree in here.trees], path)
        if config or whole or path not in self._environments or self._gone(path):
            return bool(config)
        if config is None and (not self._below or _config(self._below, path)[0]):
            return True
        raise PartsUnknown

    def _file(self, here: _Folder, name: bytes, path: bytes, tree: int, fd: int) -> Entry:
        file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=fd)
        try:
            state = os.fstat(file)
            key = (tree, state.st_ino)
            if state.st_nlink > 1 and key in self._links:
                entry, paths = self._links[key]
                paths.append(path)
                return entry._replace(name=name)
            if state.st_size > CHUNK:
                data, sparse = self._large(here, name, LargeFile(self._trees[tree], path, state)), is_sparse(state)
            else:
                data, sparse = read_small(file, state, self._add)
            entry = Entry(
                name, FILE, stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, read_xattrs(file),
                state.st_size, data, sparse, 0, state.st_mtime_ns,
            )  # fmt: skip
            if not same_state(state, os.fstat(file)):
                raise StateConflict(f"{os.fsdecode(path)} changed while it was read", "capture frozen layers only")
        finally:
            os.close(file)
        if state.st_nlink > 1:
            self._links[key] = (entry, [path])
        return entry

    def _large(self, here: _Folder, name: bytes, file: LargeFile) -> bytes:
        """Nothing yet, but for a file of several names, which all need it."""
        parts = [self._later(part) for part in file.parts()]
        if file.state.st_nlink > 1:
            return file.data((part.result() for part in parts), self._add)
        here.large.append((name, file, parts))
        return b""

    def _special(self, name: bytes, path: bytes, fd: int) -> Entry | None:
        state = os.stat(name, dir_fd=fd, follow_symlinks=False)
        mode, when = stat.S_IMODE(state.st_mode), state.st_mtime_ns
        if stat.S_ISLNK(state.st_mode):
            target = os.readlink(name, dir_fd=fd)
            xattrs = read_xattrs(b"/proc/self/fd/%d/%b" % (fd, name))
            return Entry(name, SYMLINK, mode, state.st_uid, state.st_gid, xattrs, data=target, mtime=when)
        if stat.S_ISFIFO(state.st_mode):
            xattrs = read_xattrs(b"/proc/self/fd/%d/%b" % (fd, name))
            return Entry(name, FIFO, mode, state.st_uid, state.st_gid, xattrs, mtime=when)
        if not is_whiteout(state):
            self.left_out[path] = "socket" if stat.S_ISSOCK(state.st_mode) else "device"
        return None

    def _erase(self, here: _Folder, name: bytes, path: bytes) -> None:
        if here.base_shows and self._base.stat(path) is not None:
            here.rows[name] = Entry(name, WHITEOUT)
        else:
            here.rows.pop(name, None)

    def _finish(self, here: _Folder) -> Entry | None:
        for folder, parent in here.late:
            _put(parent, folder.entry.name, self._close(folder))
        return self._close(here)

    def _close(self, here: _Folder) -> Entry | None:
        for name, file, parts in here.large:
            here.rows[name] = here.rows[name]._replace(data=file.data((part.result() for part in parts), self._add))
        entry, rows = here.entry, here.rows
        if here.path and (here.base_shows or entry.flag):
            below = self._base.names(here.path) if entry.flag or any(_hides(row) for row in rows.values()) else set()
            if entry.flag:
                entry = entry._replace(flag=bool(below))
            elif below and all(name in rows and _hides(rows[name]) for name in below):
                entry = entry._replace(flag=True)
                rows = {
                    name: row._replace(flag=False) if row.kind == DIR else row
                    for name, row in rows.items()
                    if row.kind != WHITEOUT
                }
        if here.path and not rows and here.base_shows and not entry.flag and self._as_in_base(here.path, entry):
            return None
        node = nodes.store([rows[name] for name in sorted(rows)], self._add_node)
        return entry._replace(size=node.size, data=node.digest, below=node.below, node=node.id)

    def _as_in_base(self, path: bytes, entry: Entry) -> bool:
        state = self._base.stat(path)
        return (
            state is not None
            and (entry.mode, entry.uid, entry.gid, entry.mtime)
            == (stat.S_IMODE(state.st_mode), state.st_uid, state.st_gid, state.st_mtime_ns)
            and entry.xattrs == self._base.xattrs(path)
        )

    def _report(self, size: int = 0, final: bool = False) -> None:
        self._done += not final
        self._bytes += size
        if self._progress is not None and (final or self._done % _REPORT_EVERY == 0):
            self._progress("capture", self._done, self._bytes)


def _config(trees: list[int], path: bytes) -> tuple[bool | None, bool]:
    """Whether the folder holds a pyvenv.cfg, None if these layers don't say; and whether all that is in it is in these."""
    found: bool | None = None
    for tree in trees:
        try:
            fd = open_folder(tree, path)
        except FileNotFoundError:
            continue
        except NotADirectoryError:
            return found, True
        try:
            if found is None:
                found = not is_whiteout(os.stat(b"pyvenv.cfg", dir_fd=fd, follow_symlinks=False))
        except FileNotFoundError:
            pass
        finally:
            opaque = is_opaque(fd)
            os.close(fd)
        if opaque:
            return found, True
    return found, False


def _put(folder: _Folder, name: bytes, entry: Entry | None) -> None:
    if entry is None:
        folder.rows.pop(name, None)
    else:
        folder.rows[name] = entry


def _hides(row: Entry) -> bool:
    return row.kind != DIR or row.flag
