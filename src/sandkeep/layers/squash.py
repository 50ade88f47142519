"""Many layers into one that shows the same: long stacks make every lookup slower."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from sandkeep.layers import overlay
from sandkeep.layers.copying import copy_contents


def squash(trees: list[Path], target: Path) -> None:
    """Merge `trees` (top first) into the fresh folder `target`. Whiteouts stay: there may be more below."""
    os.mkdir(target)
    _merge([os.fsencode(tree) for tree in trees], os.fsencode(target), {})


def _merge(sources: list[bytes], target: bytes, links: dict[tuple[int, int], bytes]) -> None:
    names: dict[bytes, list[bytes]] = {}
    for source in sources:
        with os.scandir(source) as entries:
            for entry in entries:
                names.setdefault(entry.name, []).append(entry.path)
    for name, paths in names.items():
        _entry(paths, os.path.join(target, name), links)
    overlay.copy_attributes(sources[0], target, os.lstat(sources[0]))


def _entry(paths: list[bytes], target: bytes, links: dict[tuple[int, int], bytes]) -> None:
    info = os.lstat(paths[0])
    if not stat.S_ISDIR(info.st_mode):
        _leaf(paths[0], target, info, links)
        return
    folders, opaque = [], False
    for path in paths:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            opaque = True
            break
        folders.append(path)
        if overlay.is_opaque(path):
            opaque = True
            break
    os.mkdir(target)
    if opaque:
        overlay.set_opaque(target)
    _merge(folders, target, links)


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
