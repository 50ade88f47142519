"""What lies below a sandbox's changes: where to look whether the base has a path. Reads the base, never changes it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field

from sandkeep.checkpoints.contents import read_xattrs


@dataclass(frozen=True)
class Base:
    """A base as folders of this host, by where each shows inside: {"/": root, "/usr": "/usr"}; empty: nothing below.

    Paths asked for are bytes relative to the sandbox's root, b"" being the root. A symlink of the base is itself an
    answer and never followed.
    """

    roots: Mapping[str, str] = field(default_factory=dict)

    def stat(self, path: bytes) -> os.stat_result | None:
        where = self._where(path)
        if where is None:
            return None
        try:
            return os.lstat(where)
        except (FileNotFoundError, NotADirectoryError):
            return None

    def is_folder(self, path: bytes) -> bool:
        found = self.stat(path)
        return found is not None and stat.S_ISDIR(found.st_mode)

    def names(self, path: bytes) -> set[bytes]:
        """What the base's folder holds, with the places where other roots show."""
        where = self._where(path)
        below = path + b"/" if path else b""
        shown = {r[len(below) :].split(b"/")[0] for r in self._inner() if r.startswith(below) and r != path}
        try:
            return shown | (set(os.listdir(where)) if where is not None else set())
        except (FileNotFoundError, NotADirectoryError):
            return shown

    def xattrs(self, path: bytes) -> tuple[tuple[bytes, bytes], ...] | None:
        where = self._where(path)
        return None if where is None else read_xattrs(where)

    def _inner(self) -> list[bytes]:
        return [r for r in (os.fsencode(root).strip(b"/") for root in self.roots) if r]

    def _where(self, path: bytes) -> bytes | None:
        best: tuple[int, bytes] | None = None
        for inside, outside in self.roots.items():
            root = os.fsencode(inside).strip(b"/")
            if (not root or path == root or path.startswith(root + b"/")) and (best is None or len(root) > best[0]):
                best = (len(root), os.path.join(os.fsencode(outside), path[len(root) :].lstrip(b"/")))
        return best[1] if best else None
