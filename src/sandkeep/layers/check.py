"""The rules of layers, and who breaks them.

- A whiteout lies only in a folder that something below has too: a layer, or the base. In any other the kernel would list it.
- `user.overlay.opaque` is `y`, is on folders, and not on the root or on a `/usr` that is an overlay of its own: there it means
  nothing. No other `user.overlay.*` is there but what the kernel leaves in a top and does not read in a layer.
- Nothing is a device. `/usr`, where it is an overlay of its own, is a folder.
- No file has a name outside its layer: who writes there would change the layer.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandkeep.layers import overlay
from sandkeep.layers.squash import Below

_LEFT_BY_THE_KERNEL = ("user.overlay.origin", "user.overlay.impure", "user.overlay.uuid")


@dataclass(frozen=True)
class Break:
    tree: Path
    path: str
    why: str

    def __str__(self) -> str:
        return f"{self.tree}: /{self.path}: {self.why}"


def breaks(stack: list[Path], below: Below, own_usr: bool = False) -> list[Break]:
    """What is wrong with the layers of a stack (top first) that lies on `below`."""
    trees = [os.fsencode(tree) for tree in stack]
    return [
        Break(tree, os.fsdecode(path), why)
        for at, tree in enumerate(stack)
        for path, why in _Check(trees[at], trees[at + 1 :], below, own_usr).run()
    ]


class _Check:
    def __init__(self, tree: bytes, under: list[bytes], below: Below, own_usr: bool) -> None:
        self._tree = tree
        self._under = under
        self._below = below
        self._overlays = [b"", b"usr"] if own_usr else [b""]
        self._names: Counter[int] = Counter()
        self._files: dict[int, tuple[bytes, int]] = {}

    def run(self) -> Iterator[tuple[bytes, str]]:
        folders = [(b"", self._under, True)]
        while folders:
            path, under, shows = folders.pop()
            yield from self._attributes(path, is_folder=True)
            with os.scandir(os.path.join(self._tree, path)) as entries:
                for entry in entries:
                    name = os.path.join(path, entry.name)
                    if entry.is_dir(follow_symlinks=False):
                        folders.append((name, *self._merged(name, under, shows)))
                    else:
                        yield from self._leaf(name, entry.stat(follow_symlinks=False), bool(under) or shows)
        for number, (path, links) in self._files.items():
            if links != self._names[number]:
                yield path, f"has {links} names, {self._names[number]} of them in this layer"

    def _merged(self, path: bytes, under: list[bytes], shows: bool) -> tuple[list[bytes], bool]:
        """In which trees below this folder goes on, and whether the base's shows."""
        if path in self._overlays:
            return [tree for tree in under if os.path.isdir(os.path.join(tree, path))], True
        if overlay.is_opaque(os.path.join(self._tree, path)):
            return [], False
        found: list[bytes] = []
        for tree in under:
            place = os.path.join(tree, path)
            try:
                info = os.lstat(place)
            except FileNotFoundError:
                continue
            if not stat.S_ISDIR(info.st_mode):
                return found, False
            found.append(tree)
            if overlay.is_opaque(place):
                return found, False
        return found, shows and self._below.is_folder(path)

    def _leaf(self, path: bytes, info: os.stat_result, merged: bool) -> Iterator[tuple[bytes, str]]:
        if path in self._overlays:
            yield path, "is no folder, but an overlay of its own is to be there"
        if overlay.is_whiteout(info):
            if not merged:
                yield path, "a whiteout in a folder that nothing below has: the kernel lists it"
            return
        if stat.S_ISCHR(info.st_mode) or stat.S_ISBLK(info.st_mode):
            yield path, "a device"
        if stat.S_ISREG(info.st_mode):
            self._names[info.st_ino] += 1
            self._files[info.st_ino] = (path, info.st_nlink)
        yield from self._attributes(path, is_folder=False)

    def _attributes(self, path: bytes, is_folder: bool) -> Iterator[tuple[bytes, str]]:
        place = os.path.join(self._tree, path)
        for name in os.listxattr(place, follow_symlinks=False):
            if overlay.is_state(name) or name in _LEFT_BY_THE_KERNEL:
                continue
            if name != overlay.OPAQUE or not is_folder:
                yield path, f"the attribute {name} is foreign"
            elif not overlay.is_opaque(place):
                yield path, "opaque, but not by 'y'"
            elif path in self._overlays:
                yield path, "opaque, where that means nothing"
