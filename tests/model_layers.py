"""The model against layers alone: real overlay mounts, no sandboxes, so that hundreds of steps a second are reached.

Edits go through a mounted top; saves are copies of it, or rotations; stacks are squashed; each saved stack is mounted and
compared with what the model had then.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import model_inside
from model_edits import Editor
from model_tree import Edit, Facts, Node, Tree
from sandkeep.checkpoints.base import Base
from sandkeep.layers.check import breaks
from sandkeep.layers.copying import copy_top
from sandkeep.layers.squash import squash
from sandkeep.runtime import kernel

Step = list[Any]
ROOT = "/r"


class Wrong(AssertionError):
    pass


class Layers:
    """A base, a stack of layers (top first), a top that is mounted over them at `live`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.count, self.edits = folder, 0, 0
        self.base, self.live = self._new("base"), self._new("live")
        (self.base / "r").mkdir()
        self.below = Base({"/": str(self.base)})
        self.stack: list[Path] = []
        self.copies: list[Path] = []
        self.cursor = self.folder / "cursor"
        self.saved: list[tuple[list[Path], Tree]] = []
        self.tree = Tree()
        self._mount_top()
        self.tree.nodes[ROOT] = Node("dir", 0o755, mtime=0, loose=True, below=True)
        self.edit([["own", ROOT, 0, 0, 0o755]])

    def _new(self, name: str) -> Path:
        self.count += 1
        path = self.folder / f"{name}{self.count}"
        path.mkdir(parents=True)
        return path

    def _mount_top(self) -> None:
        self.top, work = self._new("top"), self._new("work")
        lowers = ":".join(map(str, [*self.stack, self.base]))
        kernel.mount(
            "overlay", str(self.live), "overlay", 0, f"{OPTIONS},lowerdir={lowers},upperdir={self.top},workdir={work}"
        )
        self.copies = []
        self.cursor.unlink(missing_ok=True)

    def edit(self, edits: list[Edit]) -> None:
        ended = model_inside.edit([self._there(edit) for edit in edits])
        for edit, number in zip(edits, ended, strict=True):
            self._made(edit, number)
        self.edits += len(edits)
        seen = self._look(self.live)
        self.tree.adopt(seen)
        self._compare("live", self.tree, seen)

    def _there(self, edit: Edit) -> Edit:
        paths = {"link": 3, "rename": 3, "repaint": 1}.get(edit[0], 2)
        return [edit[0], *(f"{self.live}{word}" for word in edit[1:paths]), *edit[paths:]]

    def _made(self, edit: Edit, ended: int) -> None:
        if edit[0] == "rename" and ended == 18:
            return
        try:
            self.tree.edit(edit)
            mine = 0
        except OSError as error:
            mine = error.errno or -1
        if bool(mine) != bool(ended):
            raise Wrong(f"{edit} ended with {ended}, in the model with {mine}")

    def copy(self) -> None:
        layer = self.folder / f"copy{self.count}"
        self.count += 1
        copied = copy_top(self.top, layer, self.cursor)
        if copied.anew:
            self.copies = []
        if copied.changed:
            self.cursor.write_bytes(copied.cursor)
            self.copies.insert(0, layer)
        self._keep([*self.copies, *self.stack])

    def rotate(self) -> None:
        """The top becomes a layer; copies of it are worth nothing more."""
        self._unmount()
        self.stack.insert(0, self.top)
        self._mount_top()
        self.tree.settle()
        self._keep(self.stack)

    def restore(self, number: int) -> None:
        if self.saved:
            stack, tree = self.saved[number % len(self.saved)]
            self._unmount()
            self.stack, self.tree = list(stack), tree.copy()
            self.tree.settle()
            self._mount_top()
            self._compare("restored", self.tree, self._look(self.live))

    def squash(self, which: int, keep: int) -> None:
        """All but the newest of a saved stack: the new layer stands for those wherever they are."""
        stacks = [stack for stack, _ in self.saved if len(stack) > keep + 1]
        if stacks:
            run = list(stacks[which % len(stacks)][keep:])
            merged = self.folder / f"merged{self.count}"
            self.count += 1
            squash(run, merged, self.below)
            for stack, tree in self.saved:
                if stack[-len(run) :] == run:
                    stack[-len(run) :] = [merged]
                    self._show(stack, tree, "squashed")

    def _keep(self, stack: list[Path]) -> None:
        if stack:
            self.saved.append((list(stack), self.tree.copy()))
            self._show(stack, self.tree, "saved")

    def _show(self, stack: list[Path], tree: Tree, what: str) -> None:
        if broken := breaks(stack, self.below):
            raise Wrong(f"{what}: {'; '.join(map(str, broken))}")
        place = self._new("shown")
        kernel.mount(
            "overlay", str(place), "overlay", 1, f"{OPTIONS},lowerdir={':'.join(map(str, [*stack, self.base]))}"
        )
        try:
            self._compare(what, tree, self._look(place), links=True)
        finally:
            kernel.umount(str(place))

    def _look(self, place: Path) -> dict[str, Facts]:
        return model_inside.look([ROOT], [], str(place))

    def _compare(self, what: str, tree: Tree, seen: dict[str, Facts], links: bool = False) -> None:
        if differences := tree.differences(seen, links):
            raise Wrong(
                f"{what}: " + "; ".join(f"{path!r}: wanted {a}, found {b}" for path, (a, b) in differences.items())
            )

    def _unmount(self) -> None:
        model_inside.let_go()
        kernel.umount(str(self.live))


OPTIONS = "userxattr,xino=off,index=off,redirect_dir=nofollow"


def steps_of(seed: int, count: int, world: Layers, history: list[Step]) -> None:
    """Make up and make `count` steps; each is added to the history before it is made."""
    rng, near = random.Random(seed), ""
    for _ in range(count):
        verb = rng.choice(["edit"] * 5 + ["copy"] * 4 + ["rotate", "restore", "squash", "squash"])
        step: Step = [verb]
        if verb == "edit":
            if near not in world.tree.nodes or rng.random() < 0.2:
                near = rng.choice([path for path, node in world.tree.nodes.items() if node.kind == "dir"])
            editor = Editor(rng, world.tree.copy(), [ROOT], lambda what: what == "alone", near)
            step.append(editor.some(rng.choice([1, 2, 6]), False))
        elif verb in ("restore", "squash"):
            step += [rng.randrange(100)] if verb == "restore" else [rng.randrange(100), rng.randrange(3)]
        history.append(step)
        getattr(world, verb)(*step[1:])


def played(folder: Path, seed: int, count: int) -> tuple[list[Step], str, int]:
    """The history, what was wrong, how many edits were made."""
    history: list[Step] = []
    return history, *_in_own_mounts(folder, lambda world: steps_of(seed, count, world, history))


def replayed(folder: Path, history: list[Step]) -> str:
    def again(world: Layers) -> None:
        for verb, *arguments in history:
            getattr(world, verb)(*arguments)

    return _in_own_mounts(folder, again)[0]


def _in_own_mounts(folder: Path, act: Any) -> tuple[str, int]:
    def inside() -> tuple[str, int]:
        kernel.private_mounts()
        world = Layers(folder)
        try:
            act(world)
        except Wrong as wrong:
            return str(wrong), world.edits
        finally:
            model_inside.let_go()
        return "", world.edits

    return kernel.in_thread(inside)
