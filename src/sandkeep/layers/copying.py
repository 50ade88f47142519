"""Copy what changed in a live top since the last copy into a new layer, while everything in the sandbox stands still.

The cursor remembers what each entry looked like when it was copied. An entry whose change time lies within a clock tick of
the copy is in doubt: doubt never equals anything, so it is copied again next time.
"""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgpack

from sandkeep.layers import overlay

TICK_NS = 20_000_000
Key = tuple[int, ...]


@dataclass
class Seen:
    """One entry at the last copy: its key (the inode alone when in doubt), and for folders what was inside."""

    key: Key
    children: dict[bytes, Seen] | None = None

    def same(self, key: Key) -> bool:
        return len(key) > 1 and self.key == key

    def pack(self) -> list[Any]:
        inside = None if self.children is None else {name: child.pack() for name, child in self.children.items()}
        return [list(self.key), inside]

    @classmethod
    def unpack(cls, data: list[Any]) -> Seen:
        key, inside = data
        return cls(tuple(key), None if inside is None else {name: cls.unpack(child) for name, child in inside.items()})


def load_cursor(path: Path) -> Seen:
    try:
        return Seen.unpack(msgpack.unpackb(path.read_bytes(), strict_map_key=False))
    except FileNotFoundError:
        return Seen((), {})


def dump_cursor(seen: Seen) -> bytes:
    packed: bytes = msgpack.packb(seen.pack())
    return packed


@dataclass
class Copier:
    """One pass over a top. `changed` counts entries written to the new layer; sockets and devices stay behind."""

    top: Path
    layer: Path
    changed: int = 0
    left_out: list[str] = field(default_factory=list)
    _links: dict[int, bytes] = field(default_factory=dict)
    _instant: int = field(default_factory=time.time_ns)

    def run(self, before: Seen) -> Seen:
        info = os.lstat(self.top)
        os.mkdir(self.layer)
        key = self._key(info)
        self.changed += not before.same(key) and len(before.key) > 1
        after = Seen(key, self._folder(b"", before.children or {}))
        self._finish_folder(b"", info)
        return after

    def _key(self, info: os.stat_result) -> Key:
        if info.st_ctime_ns >= self._instant - TICK_NS:
            return (info.st_ino,)
        return (info.st_ino, info.st_ctime_ns, info.st_size, info.st_mode, info.st_nlink, info.st_mtime_ns)

    def _folder(self, path: bytes, before: dict[bytes, Seen]) -> dict[bytes, Seen]:
        after: dict[bytes, Seen] = {}
        with os.scandir(os.path.join(os.fsencode(self.top), path)) as entries:
            for entry in entries:
                seen = self._entry(
                    os.path.join(path, entry.name), entry.stat(follow_symlinks=False), before.get(entry.name)
                )
                after[entry.name] = seen
        for name in before.keys() - after.keys():
            self._parents(path)
            overlay.make_whiteout(self._to(os.path.join(path, name)))
            self.changed += 1
        return after

    def _entry(self, path: bytes, info: os.stat_result, before: Seen | None) -> Seen:
        key = self._key(info)
        if stat.S_ISDIR(info.st_mode):
            return self._directory(path, info, key, before)
        if before is None or not before.same(key):
            self._parents(os.path.dirname(path))
            self._copy(path, info)
            self.changed += 1
        return Seen(key)

    def _directory(self, path: bytes, info: os.stat_result, key: Key, before: Seen | None) -> Seen:
        goes_on = before is not None and before.children is not None and before.key[0] == info.st_ino
        written = self.changed
        if before is None or not goes_on or not before.same(key):
            self._parents(path)
            self.changed += 1
        children = self._folder(path, (before.children or {}) if before is not None and goes_on else {})
        if self.changed != written:
            self._finish_folder(path, info)
            if not goes_on and (before is not None or overlay.is_opaque(self._from(path))):
                overlay.set_opaque(self._to(path))
        return Seen(key, children)

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
        target = self._to(path)
        if path and not os.path.lexists(target):
            self._parents(os.path.dirname(path))
            os.mkdir(target)

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


def copy_top(top: Path, layer: Path, cursor: Path) -> tuple[int, bytes, list[str]]:
    """Copy the changes of `top` since `cursor` into the fresh folder `layer`: how many, the new cursor, what was left out."""
    copier = Copier(top, layer)
    after = copier.run(load_cursor(cursor))
    return copier.changed, dump_cursor(after), copier.left_out
