"""Many layers into one that shows the same: long stacks make every lookup slower.

A whiteout stays only where it lies in a folder that something below the new layer has too. In any other the kernel would not
hide it: it lists the folder as it is.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Protocol

from sandkeep.layers import overlay
from sandkeep.layers.copying import copy_contents
from sandkeep.layers.deep import Deep, deep


class Below(Protocol):
    """What lies under the lowest of the layers: the base."""

    def is_folder(self, path: bytes) -> bool: ...


def squash(trees: list[Path], target: Path, below: Below) -> None:
    """Merge `trees` (top first), which lie on `below`, into the fresh folder `target`."""
    os.mkdir(target)
    deep(_Squash(os.fsencode(target), below).merge([os.fsencode(tree) for tree in trees], b"", shows=True))


class _Squash:
    def __init__(self, target: bytes, below: Below) -> None:
        self._target = target
        self._below = below
        self._links: dict[tuple[int, int], bytes] = {}

    def merge(self, sources: list[bytes], path: bytes, shows: bool) -> Deep[None]:
        """The folder `path`. `shows`: the base has it too, and nothing hides it."""
        names: dict[bytes, list[bytes]] = {}
        for source in sources:
            with os.scandir(source) as entries:
                for entry in entries:
                    names.setdefault(entry.name, []).append(entry.path)
        for name, paths in names.items():
            yield self._entry(paths, os.path.join(path, name), shows)
        overlay.copy_attributes(sources[0], os.path.join(self._target, path), os.lstat(sources[0]))

    def _entry(self, paths: list[bytes], path: bytes, shows: bool) -> Deep[None]:
        target = os.path.join(self._target, path)
        info = os.lstat(paths[0])
        if not stat.S_ISDIR(info.st_mode):
            if shows or not overlay.is_whiteout(info):
                _leaf(paths[0], target, info, self._links)
            return
        folders, opaque = [], False
        for source in paths:
            if not stat.S_ISDIR(os.lstat(source).st_mode):
                opaque = True
                break
            folders.append(source)
            if overlay.is_opaque(source):
                opaque = True
                break
        os.mkdir(target)
        if opaque:
            overlay.set_opaque(target)
        yield self.merge(folders, path, shows and not opaque and self._below.is_folder(path))


def _leaf(source: bytes, target: bytes, info: os.stat_result, links: dict[tuple[int, int], bytes]) -> None:
    identity = (info.st_dev, info.st_ino)
    if info.st_nlink > 1 and identity in links:
        os.link(links[identity], target, follow_symlinks=False)
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
        return
    overlay.copy_attributes(source, target, info)
    if info.st_nlink > 1:
        links[identity] = target
