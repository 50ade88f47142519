"""What differs between two checkpoints. Equal subtrees are never read."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from sandkeep.checkpoints import nodes, plan
from sandkeep.checkpoints.nodes import DIR, KINDS, WHITEOUT, Entry
from sandkeep.checkpoints.places import join
from sandkeep.store.repository import Repository


@dataclass(frozen=True)
class Change:
    """`what` says in which ways a changed entry differs: kind, content, mode, owner, attributes, links, time, base
    (a folder hides, or no longer hides, the base's). Beside files `kind` is one of cwd, user (with `old` and `new`), env, variable,
    function, alias, option, workflow, process, memory, and `path` the name."""

    path: str
    change: Literal["added", "removed", "changed"]
    kind: str
    what: tuple[str, ...] = ()
    size: int = 0
    old_size: int = 0
    old: str = ""
    new: str = ""


Groups = list[list[bytes]]


def compare(
    repo: Repository, a: Entry, b: Entry, a_groups: Groups, b_groups: Groups, times: bool = True
) -> Iterator[Change]:
    """From `a` to `b`, in no particular order. A file of the base that only one of them changed counts as added or removed."""
    relinked = {path for group in {tuple(g) for g in a_groups} ^ {tuple(g) for g in b_groups} for path in group}
    above = {path[:at] for path in relinked for at, c in enumerate(path) if c == 0x2F} | ({b""} if relinked else set())
    if (root := _ways(a, b, times)) and root != ("content",):
        yield Change("/", "changed", "dir", root)
    todo = [(b"", a, b)]
    while todo:
        path, old, new = todo.pop()
        if path not in above and (old.node == new.node if times else old.data == new.data):
            continue
        was = {e.name: e for e in nodes.load(old, repo.read)}
        for entry in nodes.load(new, repo.read):
            at = join(path, entry.name)
            before = was.pop(entry.name, None)
            gone, here = before is None or before.kind == WHITEOUT, entry.kind != WHITEOUT
            if before is not None and not gone and here:
                ways = _ways(before, entry, times) + (("links",) if at in relinked else ())
                if entry.kind == before.kind == DIR:
                    todo.append((at, before, entry))
                    ways = tuple(way for way in ways if way != "content")
                if ways:
                    yield Change(_shown(at), "changed", KINDS[entry.kind], ways, entry.size, before.size)
                if entry.kind != before.kind:
                    yield from _all(repo, at, before, "removed", below=True)
                    yield from _all(repo, at, entry, "added", below=True)
            elif here:
                yield from _all(repo, at, entry, "added")
            elif before is None:
                yield Change(_shown(at), "removed", "base")
            elif not gone:
                yield from _all(repo, at, before, "removed")
        for name, before in was.items():
            at = join(path, name)
            if before.kind == WHITEOUT:
                yield Change(_shown(at), "added", "base")
            else:
                yield from _all(repo, at, before, "removed")


def _all(
    repo: Repository, path: bytes, entry: Entry, change: Literal["added", "removed"], below: bool = False
) -> Iterator[Change]:
    def one(at: bytes, e: Entry) -> Change:
        sizes = (e.size, 0) if change == "added" else (0, e.size)
        return Change(_shown(at), change, KINDS[e.kind], (), *sizes)

    if not below:
        yield one(path, entry)
    if entry.kind == DIR:
        for inner, item in plan.walk(repo, entry):
            if item.kind != WHITEOUT:
                yield one(join(path, inner), item)


def _ways(a: Entry, b: Entry, times: bool) -> tuple[str, ...]:
    differ = {
        "kind": a.kind != b.kind,
        "content": a.kind == b.kind and (a.size, a.data) != (b.size, b.data),
        "mode": a.mode != b.mode,
        "owner": (a.uid, a.gid) != (b.uid, b.gid),
        "attributes": a.xattrs != b.xattrs,
        "base": a.kind == b.kind == DIR and a.flag != b.flag,
        "time": times and a.mtime != b.mtime,
    }
    return tuple(way for way, does in differ.items() if does)


def _shown(path: bytes) -> str:
    return "/" + os.fsdecode(path)
