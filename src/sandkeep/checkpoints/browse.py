"""Reading a checkpoint without starting anything: only the nodes and chunks that are needed are fetched."""

from __future__ import annotations

import os
from collections.abc import Iterator

from sandkeep.checkpoints import nodes, plan
from sandkeep.checkpoints.globs import Glob
from sandkeep.checkpoints.nodes import CHUNK, DIR, FILE, HOLE, INLINE, KINDS, SYMLINK, WHITEOUT, Entry
from sandkeep.checkpoints.places import join
from sandkeep.errors import BadArgument, Corrupt, FileError, FileMissing
from sandkeep.model import FileInfo
from sandkeep.store.repository import Repository


def as_path(path: str | bytes) -> bytes:
    """A path inside, relative to the root: b"" is the root."""
    parts = [part for part in os.fsencode(path).split(b"/") if part not in (b"", b".")]
    if b".." in parts or any(b"\0" in part for part in parts):
        raise BadArgument(
            f"{os.fsdecode(path)!r} is not a path inside the sandbox", "write it from the root, without '..'"
        )
    return b"/".join(parts)


class Tree:
    """The files of one checkpoint, as changed over its base. Symlinks are shown, never followed."""

    def __init__(self, repo: Repository, root: Entry) -> None:
        self._repo = repo
        self.root = root

    def entry(self, path: str | bytes) -> Entry:
        here = self.root
        for name in as_path(path).split(b"/"):
            if not name:
                continue
            if here.kind != DIR:
                raise FileMissing(f"{os.fsdecode(path)} is not in the checkpoint", "list the folder above it")
            found = next((e for e in nodes.load(here, self._repo.read) if e.name == name), None)
            if found is None or found.kind == WHITEOUT:
                raise FileMissing(
                    f"{os.fsdecode(path)} is not in the checkpoint", "what was never changed is in the base"
                )
            here = found
        return here

    def stat(self, path: str | bytes) -> FileInfo:
        return _info(as_path(path), self.entry(path))

    def ls(self, path: str | bytes = "/") -> list[FileInfo]:
        folder = self.entry(path)
        if folder.kind != DIR:
            raise FileError(f"{os.fsdecode(path)} is not a folder")
        entries = nodes.load(folder, self._repo.read)
        return [_info(join(as_path(path), e.name), e) for e in entries if e.kind != WHITEOUT]

    def read(self, path: str | bytes, offset: int = 0, length: int | None = None) -> bytes:
        if offset < 0 or (length is not None and length < 0):
            raise BadArgument("offset and length must not be negative")
        entry = self.entry(path)
        if entry.kind != FILE:
            raise FileError(f"{os.fsdecode(path)} is a {KINDS[entry.kind]}, not a file")
        end = entry.size if length is None else min(offset + length, entry.size)
        return b"".join(self.pieces(entry, offset, end))

    def pieces(self, entry: Entry, start: int, end: int) -> Iterator[bytes]:
        """A file's bytes [start, end), a chunk at a time."""
        if start >= end:
            return
        if entry.size <= INLINE:
            yield entry.data[start:end]
            return
        first = start // CHUNK
        for number, blob in enumerate(nodes.chunk_ids(entry, self._repo.read, first, -(-end // CHUNK)), first):
            at = number * CHUNK
            want = min(CHUNK, entry.size - at)
            data = bytes(want) if blob == HOLE else self._repo.read(blob)
            if len(data) != want:
                raise Corrupt(f"chunk {blob.hex()} has a wrong size", "run verify to see which checkpoints suffer")
            yield data[max(start - at, 0) : end - at]

    def find(self, pattern: str) -> Iterator[FileInfo]:
        glob = Glob(pattern)
        try:
            start = self.entry(glob.start)
        except FileMissing:
            return
        if start.kind != DIR:
            return
        above = as_path(glob.start)
        for below, entry in plan.walk(self._repo, start):
            path = join(above, below)
            if entry.kind != WHITEOUT and glob.matches(os.fsdecode(path)):
                yield _info(path, entry)


def _info(path: bytes, e: Entry) -> FileInfo:
    shown = "/" + os.fsdecode(path)
    return FileInfo(
        path=shown,
        name=os.fsdecode(e.name),
        kind=KINDS[e.kind],  # type: ignore[arg-type]
        size=e.size,
        mode=e.mode,
        uid=e.uid,
        gid=e.gid,
        mtime_ns=e.mtime,
        target=os.fsdecode(e.data) if e.kind == SYMLINK else None,
    )
