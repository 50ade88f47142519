"""Deciding what a layer must hold so that a checkpoint shows: all of it over the base, or the difference over another one.

Reads nodes; writes nothing. Directories come before what is in them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from sandkeep.checkpoints import nodes
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.nodes import DIR, FILE, WHITEOUT, Entry
from sandkeep.checkpoints.places import join
from sandkeep.errors import Corrupt, HostRefused
from sandkeep.store.repository import Repository

_BATCH = 512  # nodes read at a time
MOST = 20_000_000  # entries in one checkpoint
_MEMORY = 512  # bytes that an entry takes


def _most_entries() -> int:
    """What half of the free memory can hold."""
    with open("/proc/meminfo", "rb") as facts:
        free = next(int(line.split()[1]) << 10 for line in facts if line.startswith(b"MemAvailable"))
    return min(MOST, free // 2 // _MEMORY)


@dataclass
class Plan:
    """What to write. Paths are relative to the layer's root, which is not among the folders."""

    root: Entry
    folders: list[tuple[bytes, Entry]] = field(default_factory=list)
    files: list[tuple[bytes, Entry]] = field(default_factory=list)
    others: list[tuple[bytes, Entry]] = field(default_factory=list)
    groups: list[list[bytes]] = field(default_factory=list)
    room: int = field(default_factory=_most_entries)

    def put(self, path: bytes, entry: Entry) -> None:
        self.room -= 1
        if self.room < 0:
            raise HostRefused(
                f"the checkpoint has more than {len(self)} entries, too many for this machine's memory",
                "restore it where more memory is free",
            )
        (self.folders if entry.kind == DIR else self.files if entry.kind == FILE else self.others).append((path, entry))

    def __len__(self) -> int:
        return len(self.folders) + len(self.files) + len(self.others)


class OutOfReach(Exception):
    """The base would have to show where the lower checkpoint hides it: no layer on top can say that."""


def walk(repo: Repository, root: Entry) -> Iterator[tuple[bytes, Entry]]:
    """Every entry below `root`, level by level."""
    if root.below > MOST:
        raise Corrupt(f"a checkpoint states {root.below} entries", f"at most {MOST} are possible")
    level: list[tuple[bytes, Entry]] = [(b"", root)]
    while level:
        below: list[tuple[bytes, Entry]] = []
        for path, entries in children(repo, level):
            for entry in entries:
                at = join(path, entry.name)
                yield at, entry
                if entry.kind == DIR:
                    below.append((at, entry))
        level = below


def children(repo: Repository, folders: list[tuple[bytes, Entry]]) -> Iterator[tuple[bytes, list[Entry]]]:
    """The entries of many directories, their nodes read together."""
    for start in range(0, len(folders), _BATCH):
        batch = folders[start : start + _BATCH]
        found = dict(repo.read_many({folder.node for _, folder in batch}))
        for path, folder in batch:
            yield path, nodes.load(folder, partial(_either, found, repo))


def _either(found: dict[bytes, bytes], repo: Repository, blob: bytes) -> bytes:
    return found[blob] if blob in found else repo.read(blob)


def whole(repo: Repository, root: Entry, groups: list[list[bytes]], base: Base | None = None) -> Plan:
    plan = Plan(root)
    for path, entry in walk(repo, root):
        if _is_hidden(path, entry, base):
            plan.put(path, entry)
    plan.groups = groups
    return plan


def _is_hidden(path: bytes, entry: Entry, base: Base | None) -> bool:
    """False for a whiteout in a folder that this base has not, though the one it was saved on had: the kernel would list it."""
    return entry.kind != WHITEOUT or base is None or base.is_folder(os.path.dirname(path))


def difference(
    repo: Repository,
    root: Entry,
    groups: list[list[bytes]],
    below: Entry,
    below_groups: list[list[bytes]],
    base: Base | None,
) -> Plan:
    """What turns `below` into `root` when laid over it; raises OutOfReach if nothing does."""
    here, there = {tuple(g) for g in groups}, {tuple(g) for g in below_groups}
    forced = {path for group in here ^ there for path in group}
    above_forced = {path[:at] for path in forced for at, c in enumerate(path) if c == 0x2F}
    plan = Plan(root)
    if root.node == below.node and not forced:
        return plan
    todo: list[tuple[bytes, Entry, Entry, bool]] = [(b"", root, below, base is None or base.is_folder(b""))]
    while todo:
        path, new, old, shows = todo.pop()
        was = {e.name: e for e in nodes.load(old, repo.read)}
        for entry in nodes.load(new, repo.read):
            at = join(path, entry.name)
            before = was.pop(entry.name, None)
            if entry == before and at not in forced and at not in above_forced:
                continue
            merged = entry.kind == DIR and before is not None and before.kind == DIR and before.flag == entry.flag
            plan.put(at, entry._replace(flag=False) if merged else entry)  # opaque here would hide what lies below
            if entry.kind != DIR:
                continue
            base_folder = shows and not entry.flag and (base is None or base.is_folder(at))
            if merged and before is not None:
                if before.node != entry.node or at in above_forced:
                    todo.append((at, entry, before, base_folder))
                continue
            if base_folder and before is not None:
                raise OutOfReach
            for inner, item in walk(repo, entry):
                if _is_hidden(join(at, inner), item, base):
                    plan.put(join(at, inner), item)
        for name, gone in was.items():
            at = join(path, name)
            if gone.kind == WHITEOUT or (shows and (base is None or base.stat(at) is not None)):
                raise OutOfReach
            plan.put(at, Entry(name, WHITEOUT))
    written = {path for path, _ in plan.files}
    plan.groups = [group for group in groups if group[0] in written]
    return plan


def check_groups(groups: Iterable[object], checkpoint: str) -> list[list[bytes]]:
    """Link groups as a store gave them; only their shape is checked, their paths when they are used."""
    good: list[list[bytes]] = []
    seen: set[bytes] = set()
    for group in groups:
        if (
            not isinstance(group, list)
            or len(group) < 2
            or not all(isinstance(p, bytes) for p in group)
            or group != sorted(set(group))
        ):
            raise Corrupt(f"checkpoint {checkpoint} has a malformed list of hard links", "run verify")
        if not seen.isdisjoint(group):
            raise Corrupt(f"checkpoint {checkpoint} links {os.fsdecode(group[0])} twice", "run verify")
        seen.update(group)
        good.append(group)
    return good
