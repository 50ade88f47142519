"""The world that the model drives: sandboxes in two homes on one store, what was saved of them, and what each must be.

A history is a list of plain steps. Each step is made in the world and in the model, then what is there is compared. A step
that names what is not there does nothing, so a history with steps taken out is a history.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import model_inside
from model_kills import Nursery
from model_saved import odd_in_store, shown
from model_tree import Edit, Facts, Tree
from sandkeep import Sandbox, Store
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.catalog import Store as AnyStore
from sandkeep.errors import CheckpointNotFound, SandkeepError, SnapshotNotFound
from sandkeep.layers.check import breaks
from sandkeep.sandbox import squashing
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc

Step = list[Any]
ROOTS = ["/home/user/workspace", "/opt"]
OF_USR = ["/usr/local/src", "/usr/share/debconf"]
ALONE = ["/", "/usr", "/etc", "/srv"]
LONG, KEEP = 4, 1  # layers in a stack before it is squashed
INSIDE = Path(model_inside.__file__).read_text() + "\nmain()\n"
START = "exec python3 -I -S -c 'import sys; exec(sys.argv[1])' "


class Wrong(AssertionError):
    """What is there is not what the model says."""

    def __init__(self, what: str, detail: str, differences: dict[str, Any] | None = None) -> None:
        super().__init__(f"{what}: {detail}")
        self.what, self.differences = what, differences or {}


@dataclass
class Box:
    sandbox: Sandbox
    home: int
    tree: Tree
    snapshots: dict[str, tuple[str, Tree]] = field(default_factory=dict)
    paused: bool = False
    lines: Any = None  # of a process inside that makes edits, as long as it runs
    process: Any = None


@dataclass(frozen=True)
class Rules:
    """Where the world is, and what it leaves out."""

    folder: Path
    runtime: str = "runc"
    without: frozenset[str] = frozenset()

    def lacks(self, what: str) -> bool:
        return what in self.without or (self.runtime == "runsc" and what in ("tag", "fifo"))

    @property
    def alone(self) -> list[str]:
        return [] if self.lacks("alone") else ALONE

    @property
    def roots(self) -> list[str]:
        return ROOTS if "usr" in self.without else ROOTS + [path for path in OF_USR if os.path.isdir(path)]


class World:
    """`rules.folder` keeps the homes' bases for the next world; store and exports are this world's own."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules
        self.homes = [rules.folder / "home0", rules.folder / "home1"]
        self.own = Path(tempfile.mkdtemp(prefix="world-", dir=rules.folder))
        self.boxes: dict[str, Box] = {}
        self.saved: dict[str, tuple[str, Tree]] = {}
        self.forgotten: dict[str, tuple[str, Tree]] = {}
        self.parents: dict[str, str | None] = {}
        self.blobs: dict[str, tuple[Path, Tree]] = {}
        self.steps = self.edits = self.limits = self.killed = 0
        self.nursery: Nursery | None = None

    # The life of a world

    def __enter__(self) -> World:
        self._was = squashing.LONG, squashing.KEEP, squashing.later
        squashing.LONG, squashing.KEEP = LONG, KEEP
        squashing.later = _at_once
        return self

    def __exit__(self, *_: object) -> None:
        if self.nursery is not None:
            self.nursery.close()
        squashing.LONG, squashing.KEEP, squashing.later = self._was
        for home in self.homes:
            for id in Home(home).ids():
                with contextlib.suppress(SandkeepError):
                    Sandbox.attach(id, home=home).kill()
            for name in ("cache", "known"):
                shutil.rmtree(home / name, ignore_errors=True)
            if home.exists():
                gc(Home(home), cache=True)
        shutil.rmtree(self.own, ignore_errors=True)

    def end(self) -> None:
        """Whatever is saved can still be had, and when all is killed nothing is left."""
        for number, name in enumerate(self.saved):
            self.step(["create_from", "last", name, number % 2])
            self.step(["kill", "last"])
        for name in list(self.boxes):
            self.step(["kill", name])
        for home in self.homes:
            if home.exists():
                self._left(home)
        with self.store(0) as store:
            damage = store.verify()
            if damage:
                raise Wrong("verify", repr(damage))

    def _left(self, home: Path) -> None:
        gc(Home(home), cache=True)
        left = [str(path) for name in ("sandboxes", "layers", "trash") for path in (home / name).iterdir()]
        if left:
            raise Wrong("left", repr(left))

    def store(self, home: int) -> AnyStore:
        return Store(self.own / "store", home=self.homes[home])

    # Steps

    def step(self, step: Step) -> bool:
        """Whether it was anything at all."""
        verb, *arguments = step
        try:
            done = getattr(self, verb)(*arguments)
        except SandkeepError as error:
            raise Wrong(f"{verb} failed", f"{type(error).__name__} {error}") from error
        self.steps += done is not False
        return done is not False

    def create(self, name: str, home: int) -> bool | None:
        if name in self.boxes:
            return False
        sandbox = Sandbox(home=self.homes[home], runtime=self.rules.runtime, store=self.own / "store")
        box = self.boxes[name] = Box(sandbox, home, Tree())
        box.tree = self._as_it_is(box)
        return None

    def _as_it_is(self, box: Box) -> Tree:
        seen = self._ask(box, [])["after"]
        contents = {path: box.sandbox.files.read(path) for path, found in seen.items() if found[0] == "file"}
        tree = Tree.of(seen, self.rules.alone, contents)
        for root in self.rules.roots:
            tree.nodes[root].loose = True  # as old as the home is
        return tree

    def edit(self, name: str, edits: list[Edit]) -> bool | None:
        if not (box := self._running(name)):
            return False
        told = self._ask(box, edits)
        self._compare(f"live in {name}", box.tree, told["before"])
        for edit, ended in zip(edits, told["ended"], strict=True):
            self._made(box.tree, edit, ended)
        self.edits += len(edits)
        box.tree.adopt(told["after"])
        self._compare(f"live in {name}", box.tree, told["after"], f"after {edits}")
        return None

    def _made(self, tree: Tree, edit: Edit, ended: int) -> None:
        if edit[0] == "rename" and ended == 18 and tree.nodes.get(edit[2]) and tree.nodes[edit[2]].kind == "dir":
            self.limits += 1  # overlayfs: a folder of a lower layer can't be renamed
            return
        try:
            tree.edit(edit)
            mine = 0
        except OSError as error:
            mine = error.errno or -1
        if bool(mine) != bool(ended):
            raise Wrong("edit", f"{edit} ended with {ended}, in the model with {mine}")

    def busy(self, name: str) -> bool | None:
        """A process that goes on: it makes the edits, keeps files mapped, and states are copied while it runs."""
        if not (box := self._running(name)) or box.process:
            return False
        box.process = box.sandbox.commands.run(_command(), background=True, user="root")
        box.lines = _lines(box.process.output())
        return None

    def idle(self, name: str) -> bool | None:
        if not (box := self._running(name)) or not box.process:
            return False
        self._quiet(box)
        return None

    def snapshot(self, name: str, saved: str) -> bool | None:
        if not (box := self._running(name)):
            return False
        info = self._saving(box, box.sandbox.snapshot)
        box.snapshots[saved] = info.id, box.tree.copy()
        if not os.geteuid() and info.layers:
            machine = box.sandbox._held
            base, trees = machine.base(machine.record()), machine.home.layers.trees(info.layers)
            if broken := breaks(trees, Base(base.roots()), base.usr):
                raise Wrong("layers", "; ".join(map(str, broken)))
            seen = shown(trees, base, self.own / "mounted", self.rules.roots, self.rules.alone)
            self._compare(f"snapshot of {box.sandbox.id}", box.tree, seen, saved, links=True)
        return None

    def _saving(self, box: Box, save: Any) -> Any:
        """A save; the model learns whether the top has become a layer."""
        before = box.sandbox._held.record().top
        found = save()
        if box.sandbox._held.record().top != before:
            box.tree.settle()
        return found

    def restore(self, name: str, saved: str) -> bool | None:
        box = self._running(name)
        found = box and (box.snapshots.get(saved) or self.saved.get(saved))
        if not box or not found:
            return False
        box.sandbox.restore(found[0])
        self._became(box, found[1])
        return self._check(name)

    def delete_snapshot(self, name: str, saved: str) -> bool | None:
        if not (box := self._running(name)) or saved not in box.snapshots:
            return False
        id, _ = box.snapshots.pop(saved)
        box.sandbox.delete_snapshot(id)
        with contextlib.suppress(SnapshotNotFound):
            box.sandbox.restore(id)
            raise Wrong("snapshot", f"{saved} was deleted and can be restored")
        return self._check(name)

    def checkpoint(self, name: str, saved: str) -> bool | None:
        if not (box := self._running(name)):
            return False
        info = self._saving(box, box.sandbox.checkpoint)
        self.saved[saved], self.parents[info.id] = (info.id, box.tree.copy()), info.parent_id
        with self.store(1) as store:
            for root in ROOTS:  # the base has nothing of its own there
                if odd := odd_in_store(store.files(info.id), root, box.tree):
                    raise Wrong("store", f"{saved}: {odd}")
        return None

    def create_from(self, name: str, saved: str, home: int) -> bool | None:
        if name in self.boxes or saved not in self.saved:
            return False
        id, tree = self.saved[saved]
        store = self.own / "store"
        sandbox = Sandbox(home=self.homes[home], runtime=self.rules.runtime, store=store, from_checkpoint=id)
        box = self.boxes[name] = Box(sandbox, home, Tree())
        self._became(box, tree)
        return self._check(name)

    def fork(self, name: str, child: str) -> bool | None:
        if not (box := self._running(name)) or child in self.boxes:
            return False
        twin = self.boxes[child] = Box(self._saving(box, box.sandbox.fork), box.home, Tree())
        self._became(twin, box.tree)
        return self._check(child)

    def kill(self, name: str) -> bool | None:
        box = self.boxes.pop(name, None)
        if box is None:
            return False
        box.sandbox.kill()
        return None

    def pause(self, name: str, saved: str) -> bool | None:
        if not (box := self._running(name)):
            return False
        self._quiet(box)
        info = box.sandbox.pause()
        self.saved[saved], self.parents[info.id] = (info.id, box.tree.copy()), info.parent_id
        box.paused = True
        return None

    def resume(self, name: str) -> bool | None:
        box = self.boxes.get(name)
        if box is None or not box.paused:
            return False
        box.sandbox.resume()
        box.paused = False
        self._became(box, box.tree)
        return self._check(name)

    def export(self, name: str, blob: str) -> bool | None:
        if not (box := self._running(name)):
            return False
        path = self.own / f"{blob}.blob"
        self._saving(box, lambda: box.sandbox.export_state(path))
        self.blobs[blob] = path, box.tree.copy()
        return self._check(name)

    def import_(self, name: str, blob: str) -> bool | None:
        if not (box := self._running(name)) or blob not in self.blobs:
            return False
        path, tree = self.blobs[blob]
        box.sandbox.import_state(path)
        self._became(box, tree)
        return self._check(name)

    def crash(self, name: str, verb: str, part: float) -> bool | None:
        """kill -9 of whoever snapshots, checkpoints or forks, after a part of the time that it takes: nothing here changes."""
        if not (box := self._running(name)):
            return False
        if self.nursery is None:
            self.nursery = Nursery(self.own / "store", self.rules.runtime)
        self.killed += self._saving(
            box, lambda: self.nursery.run(self.homes[box.home], verb, [box.sandbox.id, ""], part * 0.3)["killed"]
        )
        self.home_gc(box.home, False)
        known = {other.sandbox.id for other in self.boxes.values()}
        for info in Sandbox.list(home=self.homes[box.home]):
            if info.id not in known:
                Sandbox.attach(info.id, home=self.homes[box.home]).kill()
        with self.store(box.home) as store:
            for info in store.checkpoints():
                if info.id not in {id for id, _ in self.saved.values()}:
                    self.saved[info.id], self.parents[info.id] = (info.id, box.tree.copy()), info.parent_id
        return self._check(name)

    # The store and the homes

    def forget(self, keep: int, home: int) -> bool | None:
        """By a rule: the newest, and the newest of each line, stay."""
        if len(self.saved) <= keep:
            return False
        above = {ancestor for id, _ in self.saved.values() for ancestor in self._above(id)}
        old = sorted(self.saved, key=lambda name: self.saved[name][0])[: len(self.saved) - keep]
        going = [name for name in old if self.saved[name][0] in above]
        with self.store(home) as store:
            told = {gone.id for gone in store.forget(keep_last=keep).forgotten}
            if told != {self.saved[name][0] for name in going}:
                raise Wrong(
                    "forget", f"keep_last={keep} let go of {len(told)} of {len(self.saved)}, wanted {len(going)}"
                )
            self._let_go(store, going)
        return None

    def _above(self, id: str) -> Iterator[str]:
        while above := self.parents.get(id):
            yield above
            id = above

    def forget_one(self, saved: str, home: int) -> bool | None:
        if saved not in self.saved or len(self.saved) < 2:
            return False
        with self.store(home) as store:
            store.forget([self.saved[saved][0]])
            self._let_go(store, [saved])
        return None

    def unforget(self, saved: str, home: int) -> bool | None:
        """Until the store's gc, what was forgotten can be had again."""
        if saved not in self.forgotten:
            return False
        with self.store(home) as store:
            store.unforget(self.forgotten[saved][0])
            self.saved[saved] = self.forgotten.pop(saved)
            self._listed(store)
        return None

    def _let_go(self, store: AnyStore, names: list[str]) -> None:
        for name in names:
            self.forgotten[name] = self.saved.pop(name)
            with contextlib.suppress(CheckpointNotFound):
                store.get(self.forgotten[name][0])
                raise Wrong("forget", f"{name} is forgotten and still there")
        self._listed(store)

    def _listed(self, store: AnyStore) -> None:
        listed = {info.id for info in store.checkpoints()}
        if listed != {id for id, _ in self.saved.values()}:
            raise Wrong("forget", f"{len(listed)} checkpoints are listed, {len(self.saved)} were kept")

    def store_gc(self, home: int) -> None:
        with self.store(home) as store:
            store.gc()
        self.forgotten.clear()

    def home_gc(self, home: int, cache: bool) -> None:
        gc(Home(self.homes[home]), cache=cache)

    def lose_cache(self, home: int) -> None:
        shutil.rmtree(self.homes[home] / "cache", ignore_errors=True)

    # What is there

    def _running(self, name: str) -> Box | None:
        box = self.boxes.get(name)
        return None if box is None or box.paused else box

    def _became(self, box: Box, tree: Tree) -> None:
        box.tree = tree.copy()
        box.tree.settle()
        self._quiet(box)

    def _quiet(self, box: Box) -> None:
        """Nothing but the guest runs."""
        box.process = box.lines = None
        box.tree.held = {}
        for one in box.sandbox.commands.list():
            if one.running:
                process = box.sandbox.commands.connect(one.pid)
                process.kill()
                process.wait(60)

    def _check(self, name: str) -> None:
        box = self.boxes[name]
        told = self._ask(box, [])
        box.tree.adopt(told["after"])
        self._compare(f"live in {name}", box.tree, told["after"])

    def _ask(self, box: Box, edits: list[Edit]) -> dict[str, Any]:
        request = json.dumps({"roots": self.rules.roots, "alone": self.rules.alone, "edits": edits}) + "\n"
        if box.process:
            box.process.send_stdin(request)
            line = next(box.lines, b"")
        else:
            ran = box.sandbox.commands.run(_command(), stdin=request.encode(), user="root", timeout=120)
            line = ran.stdout_bytes
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise Wrong("guest", f"no answer: {line[:300]!r}") from None
        return answer

    def _compare(self, what: str, tree: Tree, seen: dict[str, Facts], detail: str = "", links: bool = False) -> None:
        if differences := tree.differences(seen, links):
            shown = "\n".join(
                f"  {path!r}: wanted {mine}, found {found}" for path, (mine, found) in differences.items()
            )
            raise Wrong(what, f"{detail}\n{shown}", differences)


def _at_once(home: Home, base: str, stack: list[str]) -> None:
    if len(stack) > LONG:
        squashing.squash_now(home, base, stack[KEEP:])


def _command() -> str:
    return START + "'" + INSIDE.replace("'", "'\\''") + "'"


def _lines(output: Any) -> Any:
    kept = b""
    for stream, data in output:
        if stream == "stderr":
            raise Wrong("guest", data.decode(errors="replace"))
        kept += data
        while b"\n" in kept:
            line, _, kept = kept.partition(b"\n")
            yield line
