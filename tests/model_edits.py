"""Edits that the model makes up: every kind of entry and name, and on purpose what comparisons and whiteouts are bad at."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

from model_tree import Edit, Tree

NAMES = [
    "a",
    "b",
    "c",
    "d",
    "e e",
    "ü",
    "n\nl",
    "-rf",
    "*",
    "'\"$x",
    ".wh.a",
    "\udcff",
    "x" * 255,
    "#work",
    ".."[:1] + "hid",
]
SIZES = [0, 1, 10, 4095, 4097, 20000]
MODES = [0o600, 0o644, 0o755, 0o444, 0o000, 0o1777]
TAGS = ["user.a", "user.b", "user.ü"]
DATES = [0, 1, 1_000_000_000, 1_700_000_000_123_456_789, 10**18]


class Editor:
    """Makes up edits for a tree, and makes them in it: what comes next knows what came before."""

    def __init__(
        self, rng: random.Random, tree: Tree, roots: list[str], lacks: Callable[[str], bool], near: str = ""
    ) -> None:
        self.rng, self.tree, self.roots, self.lacks, self.near = rng, tree, roots, lacks, near
        self.made: list[Edit] = []

    def some(self, count: int, holding: bool) -> list[Edit]:
        verbs: list[Callable[[], None]] = [
            *[self.write] * 4, *[self.append] * 2, self.poke, self.cut, self.paint, *[self.mkdir] * 3, self.symlink, self.fifo,
            *[self.link] * 2, *[self.rename] * 2, *[self.remove] * 2, *[self.again] * 3, self.other_kind, self.emptied,
            self.touched, self.swapped, self.rolled, self.linked_and_changed, self.chmod, self.own, self.tag, self.date,
        ]  # fmt: skip
        if holding:
            verbs += [self.hold, *[self.repaint] * 3]
        if not self.lacks("alone"):
            verbs.append(self.above)
        while len(self.made) < count:
            self.rng.choice(verbs)()
        return self.made

    def do(self, *edit: object) -> bool:
        self.made.append(list(edit))
        try:
            self.tree.edit(list(edit))
        except OSError:
            return False
        except NotImplementedError:
            self.made.pop()
            return False
        return True

    # Places

    def _of(self, *kinds: str) -> str | None:
        found = [path for path, node in self.tree.nodes.items() if node.kind in kinds and path not in self.roots]
        return self._nearest(found) if found else None

    def _nearest(self, found: list[str]) -> str:
        """Mostly where the edits before were: what goes wrong takes several at one place."""
        near = [path for path in found if path == self.near or path.startswith(self.near + "/")]
        return self.rng.choice(near if near and self.rng.random() < 0.7 else found)

    def _folder(self) -> str:
        found = [path for path, node in self.tree.nodes.items() if node.kind == "dir" and path.count("/") < 9]
        return self._nearest(found)

    def _place(self, free: bool = False) -> str:
        for _ in range(20):
            path = f"{self._folder()}/{self.rng.choice(NAMES[:4] if self.rng.random() < 0.7 else NAMES)}"
            if path not in self.tree.nodes or not free:
                break
        return path

    def _seed(self) -> int:
        return self.rng.randrange(1 << 30)

    def _some(self) -> tuple[int, int]:
        return self.rng.choice(SIZES), self._seed()

    # One thing each

    def write(self) -> None:
        path = self._place()
        if len(self.tree.nodes) < 150:
            self.do("write", path, *self._some())

    def append(self) -> None:
        if (path := self._of("file")) and len(self.tree._bytes(path)) < 200_000:
            self.do("append", path, *self._some())

    def poke(self) -> None:
        if path := self._of("file"):
            self.do("poke", path, self.rng.choice([0, 5, 5000, 300_000]), *self._some())

    def cut(self) -> None:
        if path := self._of("file"):
            self.do("cut", path, self.rng.choice([0, 3, 5000, 200_000]))

    def paint(self) -> None:
        if path := self._of("file"):
            self.do("paint", path, *self._some())

    def mkdir(self) -> None:
        self.do("mkdir", self._place(), self.rng.choice([0o755, 0o700, 0o1777]))

    def symlink(self) -> None:
        self.do("symlink", self._place(), self.rng.choice(["nowhere", "/nowhere/é", "x" * 200, "\udcfe\n"]))

    def fifo(self) -> None:
        if not self.lacks("fifo"):
            self.do("fifo", self._place(), self.rng.choice([0o600, 0o644]))

    def link(self) -> None:
        if path := self._of("file"):
            self.do("link", self._place(), path)

    def rename(self) -> None:
        if path := self._of("file", "dir", "symlink", "fifo"):
            self.do("rename", self._place(), path)

    def remove(self) -> None:
        if path := self._of("file", "dir", "symlink", "fifo"):
            self.do("remove", path)

    def chmod(self) -> None:
        if path := self._of("file", "dir", "fifo"):
            self.do("chmod", path, self.rng.choice(MODES))

    def own(self) -> None:
        if path := self._of("file", "dir", "symlink"):
            self.do("own", path, self.rng.choice([0, 1000, 65000]), self.rng.choice([0, 1000]), self.rng.choice(MODES))

    def tag(self) -> None:
        path, name = self._of("file", "dir"), self.rng.choice(TAGS)
        if path and name in self.tree.nodes[path].tags and self.rng.random() < 0.5:
            self.do("untag", path, name)
        elif path and not self.lacks("tag"):
            self.do("tag", path, name, self.rng.choice(["", "v", "long" * 50]))

    def date(self) -> None:
        if path := self._of("file", "dir", "symlink"):
            self.do("date", path, self.rng.choice(DATES))

    def above(self) -> None:
        """The folders that every sandbox has."""
        if self.rng.random() < 0.3:
            self.do("chmod", self.rng.choice(sorted(self.tree.alone)), self.rng.choice([0o755, 0o711, 0o751]))

    def hold(self) -> None:
        if path := self._of("file"):
            self.do("hold", path, f"h{len(self.tree.held) + 1}")

    def repaint(self) -> None:
        if self.tree.held:
            self.do("repaint", self.rng.choice(sorted(self.tree.held)), *self._some())

    # What deceives

    def again(self) -> None:
        """A folder removed and made again: most filesystems give it the inode number of the old one."""
        if path := self._of("dir"):
            inside = [os.path.basename(name) for name in self.tree.inside(path) if os.path.dirname(name) == path]
            mode = self.tree.nodes[path].mode
            self.do("remove", path)
            self.do("mkdir", path, mode)
            for name in self.rng.sample(inside, min(len(inside), self.rng.choice([0, 0, 1, 2]))):
                self.do("write", f"{path}/{name}", *self._some())

    def other_kind(self) -> None:
        if path := self._of("file", "dir", "symlink", "fifo"):
            self.do("remove", path)
            verb = self.rng.choice(["mkdir", "write", "symlink"])
            arguments = {"mkdir": (0o755,), "write": self._some(), "symlink": ("nowhere",)}[verb]
            self.do(verb, path, *arguments)

    def emptied(self) -> None:
        """Everything in a folder goes, the folder stays."""
        path = self._folder()
        for name in [name for name in self.tree.inside(path) if os.path.dirname(name) == path]:
            self.do("remove", name)

    def touched(self) -> None:
        """A change that is none but for the time of its folder."""
        path = f"{self._folder()}/passing"
        self.do("write", path, 1, 1)
        self.do("remove", path)

    def swapped(self) -> None:
        one, other = self._of("file", "dir"), self._of("file", "dir")
        if one and other and one != other and not one.startswith(other + "/") and not other.startswith(one + "/"):
            between = os.path.dirname(one) + "/between"
            self.do("rename", between, one) and self.do("rename", one, other) and self.do("rename", other, between)

    def rolled(self) -> None:
        if path := self._of("file"):
            older = path[:-1] + "1" if len(path) > 200 else path + ".1"
            if self.tree.nodes.get(older) is not self.tree.nodes[path]:
                self.do("rename", older, path)
                self.do("write", path, *self._some())

    def linked_and_changed(self) -> None:
        if path := self._of("file"):
            other = self._place(free=True)
            self.do("link", other, path)
            if other in self.tree.nodes and len(self.tree._bytes(path)) < 200_000:
                self.do("append", self.rng.choice([path, other]), *self._some())
