"""The reference model of a sandbox's files: a plain tree in memory that says what each edit must do, and whether it may."""

from __future__ import annotations

import errno
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import model_inside

Facts = list[Any]
Edit = list[Any]
LINKS_BREAK = True  # a name of a linked file in a lower layer gets a file of its own when it is changed (overlayfs)


@dataclass
class Node:
    """One inode. `mtime` is None until it has been seen after a change; `below` says that it lies in a lower layer."""

    kind: str
    mode: int
    uid: int = 0
    gid: int = 0
    tags: dict[str, str] = field(default_factory=dict)
    data: bytes | str = b""  # of a file its bytes, of a link its target
    mtime: int | None = None
    below: bool = False
    loose: bool = False  # written through a mapping: the kernel chooses when its time changes

    def twin(self) -> Node:
        return replace(self, tags=dict(self.tags))

    def facts(self) -> Facts:
        body = _body(self.data) if isinstance(self.data, bytes) and self.kind == "file" else self.data or None
        return [self.kind, self.mode, self.uid, self.gid, self.tags, body, None if self.loose else self.mtime]


@lru_cache(maxsize=4096)
def _body(data: bytes) -> str:
    return model_inside.body_of(data)


class Tree:
    """Nodes by path. `alone` are folders of which only mode and owner are followed."""

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.alone: dict[str, Node] = {}
        self.held: dict[str, Node] = {}
        self.spans: dict[str, int] = {}  # how much of it is mapped

    def copy(self) -> Tree:
        twin, twins = Tree(), dict[int, Node]()
        twin.spans = dict(self.spans)
        for mine, theirs in ((self.nodes, twin.nodes), (self.alone, twin.alone), (self.held, twin.held)):
            for path, node in mine.items():
                theirs[path] = twins.get(id(node)) or twins.setdefault(id(node), node.twin())
        return twin

    def settle(self) -> None:
        """All that is here lies in lower layers from now on, and nobody holds a file."""
        self.held = {}
        for node in self.nodes.values():
            node.below = True

    # What is there

    def node(self, path: str) -> Node:
        if path not in self.nodes:
            raise OSError(errno.ENOENT, path)
        return self.nodes[path]

    def inside(self, path: str) -> list[str]:
        return [other for other in self.nodes if other.startswith(path + "/")]

    def _parent(self, path: str) -> Node:
        parent = self.node(os.path.dirname(path))
        if parent.kind != "dir":
            raise OSError(errno.ENOTDIR, path)
        return parent

    def _changing(self, path: str, kind: str = "") -> Node:
        """The node behind a name, about to be changed through it."""
        node = self.node(path)
        if kind and node.kind != kind:
            raise OSError(errno.EINVAL, path)
        if node.below and node.kind != "dir":
            if LINKS_BREAK and sum(other is node for other in self.nodes.values()) > 1:
                node = node.twin()
                self.nodes[path] = node
            node.below = False
        return node

    def _new(self, path: str, node: Node) -> Node:
        parent = self._parent(path)
        if path in self.nodes:
            raise OSError(errno.EEXIST, path)
        if len(os.fsencode(os.path.basename(path))) > 255:
            raise OSError(errno.ENAMETOOLONG, path)
        parent.mtime = None
        self.nodes[path] = node
        return node

    # What edits do

    def edit(self, edit: Edit) -> None:
        verb, *arguments = edit
        getattr(self, f"_{verb}")(*arguments)

    def _file(self, path: str, data: bytes) -> None:
        node = self._changing(path, "file")
        node.data, node.mtime = data, None

    def _write(self, path: str, size: int, seed: int) -> None:
        if path not in self.nodes:
            self._new(path, Node("file", 0o644))
        self._file(path, model_inside.content(size, seed))

    def _bytes(self, path: str) -> bytes:
        node = self.node(path)
        if node.kind != "file":
            raise OSError(errno.EINVAL, path)
        assert isinstance(node.data, bytes)
        return node.data

    def _append(self, path: str, size: int, seed: int) -> None:
        self._file(path, self._bytes(path) + model_inside.content(size, seed))

    def _poke(self, path: str, at: int, size: int, seed: int) -> None:
        self._file(path, laid(self._bytes(path), at, model_inside.content(size, seed)))

    def _cut(self, path: str, size: int) -> None:
        data = self._bytes(path)
        self._file(path, data[:size] + bytes(max(0, size - len(data))))

    def _mapped(self, path: str) -> Node:
        data = self._bytes(path)
        node = self._changing(path, "file")
        if not data:
            raise OSError(errno.EINVAL, path)
        return node

    def _paint(self, path: str, size: int, seed: int) -> None:
        self._brush(self._mapped(path), size, seed)

    def _hold(self, path: str, name: str) -> None:
        self.held[name] = self._mapped(path)
        self.held[name].loose = True
        self.spans[name] = len(self._bytes(path))

    def _repaint(self, name: str, size: int, seed: int) -> None:
        if name not in self.held:
            raise OSError(errno.EINVAL, name)
        self._brush(self.held[name], min(size, self.spans[name]), seed)

    def _brush(self, node: Node, size: int, seed: int) -> None:
        assert isinstance(node.data, bytes)
        node.data = laid(node.data, 0, model_inside.content(min(size, len(node.data)), seed))
        node.mtime, node.loose = None, True

    def _own(self, path: str, uid: int, gid: int, mode: int) -> None:
        node = self.alone.get(path) or self._changing(path)
        node.uid, node.gid = uid, gid
        if node.kind != "symlink":
            node.mode = mode

    def _chmod(self, path: str, mode: int) -> None:
        node = self.alone.get(path) or self.node(path)
        if node.kind == "symlink":
            raise OSError(errno.ELOOP, path)
        node = self.alone.get(path) or self._changing(path)
        node.mode = mode

    def _tag(self, path: str, name: str, value: str) -> None:
        if self.node(path).kind not in ("file", "dir"):
            raise OSError(errno.EPERM, path)
        self._changing(path).tags[name] = value.encode().hex()

    def _untag(self, path: str, name: str) -> None:
        if name not in self.node(path).tags:
            raise OSError(errno.ENODATA, path)
        del self._changing(path).tags[name]

    def _date(self, path: str, at: int) -> None:
        self._changing(path).mtime = at

    def _mkdir(self, path: str, mode: int) -> None:
        self._new(path, Node("dir", mode))

    def _symlink(self, path: str, target: str) -> None:
        self._new(path, Node("symlink", 0o777, data=target))

    def _fifo(self, path: str, mode: int) -> None:
        self._new(path, Node("fifo", mode))

    def _remove(self, path: str) -> None:
        self.node(path)
        for gone in [path, *self.inside(path)]:
            del self.nodes[gone]
        self._parent(path).mtime = None

    def _link(self, path: str, other: str) -> None:
        if self.node(other).kind == "dir":
            raise OSError(errno.EPERM, path)
        _one_filesystem(path, other)
        self._parent(path)
        if path in self.nodes:
            raise OSError(errno.EEXIST, path)
        self._new(path, self._changing(other))

    def _rename(self, path: str, other: str) -> None:
        node, over = self.node(other), self.nodes.get(path)
        parent = self._parent(path)
        _one_filesystem(path, other)
        if over is node:
            if path != other and LINKS_BREAK and node.below:
                raise NotImplementedError("what a rename onto another name of a lower file does differs")
            return
        if node.kind == "dir" and path.startswith(other + "/"):
            raise OSError(errno.EINVAL, path)
        if over is not None:
            if over.kind == "dir" and node.kind != "dir":
                raise OSError(errno.EISDIR, path)
            if node.kind == "dir" and over.kind != "dir":
                raise OSError(errno.ENOTDIR, path)
            if self.inside(path):
                raise OSError(errno.ENOTEMPTY, path)
        if node.kind != "dir":
            node = self._changing(other)
        parent.mtime = None
        self._parent(other).mtime = None
        moving = {old: self.nodes.pop(old) for old in [other, *self.inside(other)]}
        self.nodes.update({path + old[len(other) :]: moved for old, moved in moving.items()})

    # What was seen

    def adopt(self, seen: dict[str, Facts]) -> None:
        """The times of what changed are what they are seen to be."""
        for path, node in self.nodes.items():
            if node.mtime is None and path in seen:
                node.mtime = seen[path][6]

    @classmethod
    def of(cls, seen: dict[str, Facts], alone: list[str], contents: dict[str, bytes]) -> Tree:
        """A tree as a fresh sandbox shows it."""
        tree = cls()
        for path, (kind, mode, uid, gid, tags, body, mtime, _) in seen.items():
            data = contents[path] if kind == "file" else body or b""
            node = Node(kind, mode, uid, gid, dict(tags), data, mtime, below=True)
            (tree.alone if path in alone else tree.nodes)[path] = node
        return tree

    def differences(self, seen: dict[str, Facts], links: bool) -> dict[str, tuple[Any, Any]]:
        """By path: what the model has, what was seen. With `links` names of one file must share an inode, and no others."""
        found: dict[str, tuple[Any, Any]] = {}
        wanted = {path: node.facts() for path, node in self.nodes.items()}
        for path in sorted(wanted.keys() | (seen.keys() - self.alone.keys())):
            mine = wanted.get(path)
            theirs = None if path not in seen else list(seen[path][:7])
            if mine and theirs and mine[6] is None:
                theirs[6] = None
            if mine != theirs:
                found[path] = (mine, theirs)
        for path, node in self.alone.items():
            if seen[path][1:4] != [node.mode, node.uid, node.gid]:
                found[path] = ([node.mode, node.uid, node.gid], seen[path][1:4])
        return found or (self._links(seen) if links else {})

    def _links(self, seen: dict[str, Facts]) -> dict[str, tuple[Any, Any]]:
        mine: dict[int, set[str]] = {}
        theirs: dict[int, set[str]] = {}
        for path, node in self.nodes.items():
            if node.kind != "dir":
                mine.setdefault(id(node), set()).add(path)
                theirs.setdefault(seen[path][7], set()).add(path)
        groups = {frozenset(names) for names in mine.values()}, {frozenset(names) for names in theirs.values()}
        if groups[0] == groups[1]:
            return {}
        wanted, found = (sorted(map(sorted, one - other)) for one, other in (groups, groups[::-1]))
        return {"names of one file": (wanted, found)}


def _one_filesystem(path: str, other: str) -> None:
    """/usr is an overlay of its own."""
    if path.startswith("/usr/") != other.startswith("/usr/"):
        raise OSError(errno.EXDEV, path)


def laid(data: bytes, at: int, new: bytes) -> bytes:
    """`new` written into `data` at a place that may lie beyond its end."""
    if not new:
        return data
    return data[:at] + bytes(max(0, at - len(data))) + new + data[at + len(new) :]
