"""Copy what changed in a live top since the last copy into a new layer, while everything in the sandbox stands still.

The cursor remembers what each entry looked like when it was copied. Nothing is taken for the same because of its number: entries
are compared by name, folders by what they are (mode, owner, time, attributes, opaque or not), all else by a change time that
is older than the copy. An entry whose change time lies within a clock tick of the copy, or means nothing on this file system,
is in doubt: doubt never equals anything, so it is copied again next time. A cursor that is not of this boot, of this
format, or of a clock that was set back, is none: all is copied, over the layers that the top was mounted on.
"""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from sandkeep.layers import filesystem, overlay
from sandkeep.layers.deep import Deep, deep

FORMAT = 3
TICK_NS = 20_000_000
COARSE_NS = 2_000_000_000  # where times are kept in whole seconds
Key = tuple[int | bytes, ...]


@dataclass
class Seen:
    """One entry at the last copy: its key (none when in doubt), and for folders what was inside and whether it was opaque."""

    key: Key
    children: dict[bytes, Seen] | None = None
    opaque: bool = False

    def same(self, key: Key) -> bool:
        return len(key) > 0 and self.key == key

    def pack(self) -> list[Any]:
        """Flat, since folders may be deeper than msgpack nests: each entry before what is in it."""
        rows: list[Any] = []
        todo = [(b"", self)]
        while todo:
            name, seen = todo.pop()
            inside = seen.children
            rows.append([name, seen.key, None if inside is None else len(inside), seen.opaque])
            todo += (inside or {}).items()
        return rows

    @classmethod
    def unpack(cls, rows: list[Any]) -> Seen:
        above: list[tuple[Seen, int]] = []
        root = cls(())
        for name, key, count, opaque in rows:
            seen = cls(tuple(key), None if count is None else {}, opaque)
            while above and len(above[-1][0].children or ()) == above[-1][1]:
                above.pop()
            if not above:
                root = seen
            elif (inside := above[-1][0].children) is not None:
                inside[name] = seen
            above.append((seen, count or 0))
        return root


def load_cursor(path: Path) -> Seen | None:
    """None where there is no cursor that can be believed."""
    try:
        packed = msgpack.unpackb(path.read_bytes(), strict_map_key=False)
        version, boot, offset, instant, tree = packed
        if version != FORMAT or boot != _boot():
            return None
        slewed = abs(time.time_ns() - instant) // 1000
        if _clock() < offset - slewed - TICK_NS:
            return None
        return Seen.unpack(tree)
    except (FileNotFoundError, ValueError, TypeError, msgpack.UnpackException):
        return None


def dump_cursor(seen: Seen) -> bytes:
    packed: bytes = msgpack.packb([FORMAT, _boot(), _clock(), time.time_ns(), seen.pack()])
    return packed


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _clock() -> int:
    """By how much the wall clock is ahead of the time since boot: less than before, and it was set back."""
    return time.time_ns() - time.clock_gettime_ns(time.CLOCK_BOOTTIME)


@dataclass
class Copied:
    """`changed` entries; none: the layer holds nothing. `anew`: it lies on what the top was mounted on, not on earlier copies."""

    changed: int
    cursor: bytes
    left_out: list[str]
    anew: bool


@dataclass
class Copier:
    """One pass over a top. `changed` counts entries written to the new layer; sockets and devices stay behind."""

    top: Path
    layer: Path
    without: frozenset[bytes] = frozenset()
    changed: int = 0
    left_out: list[str] = field(default_factory=list)
    _links: dict[int, bytes] = field(default_factory=dict)
    _left: dict[int, list[bytes]] = field(default_factory=dict)  # names of files with several, that seem unchanged
    _instant: int = field(default_factory=time.time_ns)
    _tells: bool = False

    def run(self, before: Seen) -> Seen:
        self._tells = filesystem.tells(self.top)
        info = os.lstat(self.top)
        os.mkdir(self.layer)
        key, opaque = self._folder_key(b"", info)
        self.changed += not before.same(key)
        after = Seen(key, deep(self._folder(b"", before.children or {})), opaque)
        self._finish_folder(b"", info)
        self._other_names()
        return after

    def _key(self, info: os.stat_result) -> Key:
        if overlay.is_whiteout(info):
            return (info.st_mode,)
        age = self._instant - info.st_ctime_ns
        if not self._tells or age <= (TICK_NS if info.st_ctime_ns % 1_000_000_000 else COARSE_NS):
            return ()
        return (info.st_ino, info.st_ctime_ns, info.st_size, info.st_mode, info.st_nlink, info.st_mtime_ns)

    def _folder_key(self, path: bytes, info: os.stat_result) -> tuple[Key, bool]:
        state, opaque = overlay.attributes(self._from(path))
        packed: bytes = msgpack.packb(state) if state else b""
        return (info.st_mode, info.st_uid, info.st_gid, info.st_mtime_ns, packed), opaque

    def _folder(self, path: bytes, before: dict[bytes, Seen]) -> Deep[dict[bytes, Seen]]:
        after: dict[bytes, Seen] = {}
        with os.scandir(self._from(path)) as listing:
            entries = list(listing)
        for entry in entries:
            at = os.path.join(path, entry.name)
            if at in self.without:
                continue
            info, seen = entry.stat(follow_symlinks=False), before.get(entry.name)
            if stat.S_ISDIR(info.st_mode):
                after[entry.name] = yield self._directory(at, info, seen)
            else:
                after[entry.name] = self._entry(at, info, seen)
        for name in before.keys() - after.keys():
            self._parents(path)
            overlay.make_whiteout(self._to(os.path.join(path, name)))
            self.changed += 1
        return after

    def _entry(self, path: bytes, info: os.stat_result, before: Seen | None) -> Seen:
        key = self._key(info)
        if before is None or not before.same(key):
            self._parents(os.path.dirname(path))
            self._copy(path, info)
            self.changed += 1
        elif info.st_nlink > 1:
            self._left.setdefault(info.st_ino, []).append(path)
        return Seen(key)

    def _directory(self, path: bytes, info: os.stat_result, before: Seen | None) -> Deep[Seen]:
        """It goes on from the last copy, name by name, whichever folder it is now. Unless the layers below show through the one
        and not through the other: then the copy hides them."""
        key, opaque = self._folder_key(path, info)
        inside = before.children if before is not None and (before.opaque or not opaque) else None
        written = self.changed
        if before is None or inside is None or not before.same(key):
            self._parents(path)
            self.changed += 1
        children = yield self._folder(path, inside or {})
        if self.changed != written:
            self._finish_folder(path, info)
            if inside is None and (before is not None or opaque):
                overlay.set_opaque(self._to(path))
        return Seen(key, children, opaque)

    def _other_names(self) -> None:
        """A file that is copied under one name is copied under all: else the layer would part them."""
        folders: set[bytes] = set()
        for number, paths in self._left.items():
            first = self._links.get(number)
            for path in paths if first is not None else []:
                self._parents(os.path.dirname(path))
                os.link(first or b"", self._to(path), follow_symlinks=False)
                self.changed += 1
                while path:
                    path = os.path.dirname(path)
                    folders.add(path)
        for folder in sorted(folders, reverse=True):
            self._finish_folder(folder, os.lstat(self._from(folder)))

    def _copy(self, path: bytes, info: os.stat_result) -> None:
        source, target = self._from(path), self._to(path)
        first = self._links.get(info.st_ino) if info.st_nlink > 1 else None
        if first is not None:
            os.link(first, target, follow_symlinks=False)
            return
        if overlay.is_whiteout(info):
            overlay.make_whiteout(target)
            return
        if stat.S_ISREG(info.st_mode):
            copy_contents(source, target, info.st_size)
        elif stat.S_ISLNK(info.st_mode):
            os.symlink(os.readlink(source), target)
        elif stat.S_ISFIFO(info.st_mode):
            os.mkfifo(target)
        else:
            self.left_out.append(os.fsdecode(path))
            return
        overlay.copy_attributes(source, target, info)
        if info.st_nlink > 1:
            self._links[info.st_ino] = target

    def _parents(self, path: bytes) -> None:
        missing = []
        while path and not os.path.lexists(self._to(path)):
            missing.append(path)
            path = os.path.dirname(path)
        for path in reversed(missing):
            os.mkdir(self._to(path))

    def _finish_folder(self, path: bytes, info: os.stat_result) -> None:
        if os.path.lexists(self._to(path)):
            overlay.copy_attributes(self._from(path), self._to(path), info)

    def _from(self, path: bytes) -> bytes:
        return os.path.join(os.fsencode(self.top), path)

    def _to(self, path: bytes) -> bytes:
        return os.path.join(os.fsencode(self.layer), path)


def copy_contents(source: bytes, target: bytes, size: int) -> None:
    """The bytes of a regular file, holes kept, shared with the original where the filesystem can (copy_file_range)."""
    read = os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        write = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            at = 0
            while at < size:
                try:
                    at = os.lseek(read, at, os.SEEK_DATA)
                except OSError:
                    break
                end = os.lseek(read, at, os.SEEK_HOLE)
                while at < end:
                    done = os.copy_file_range(read, write, end - at, at, at)
                    if done == 0:
                        raise OSError(f"{os.fsdecode(source)} became shorter while it was copied")
                    at += done
            os.ftruncate(write, size)
        finally:
            os.close(write)
    finally:
        os.close(read)


def copy_top(
    top: Path, layer: Path, cursor: Path, begun: Collection[bytes] = (), without: Collection[bytes] = ()
) -> Copied:
    """Copy the changes of `top` since `cursor` into the fresh folder `layer`. `begun`: folders (the root, `usr`) that were made
    with the top and are as they were made. `without`: entries that are passed over."""
    copier = Copier(top, layer, frozenset(without))
    before = load_cursor(cursor)
    after = copier.run(before or _beginning(copier, begun))
    return Copied(copier.changed, dump_cursor(after), copier.left_out, anew=before is None)


def _beginning(copier: Copier, begun: Collection[bytes]) -> Seen:
    """What a top looked like before anything was done in it."""

    def seen(path: bytes) -> Seen:
        key = copier._folder_key(path, os.lstat(copier._from(path)))[0] if path in begun else ()
        return Seen(key, {})

    root = seen(b"")
    root.children = {path: seen(path) for path in begun if path}
    return root
