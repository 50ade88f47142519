"""Whatever is acknowledged can be restored: from any home, after any history. Restoring needs the record and the blobs; what is
cached may be absent, stale or wrong, and costs only time."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sandkeep.checkpoints.capture import Source, capture, load_record
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import CheckpointNotFound
from sandkeep.model import State
from sandkeep.sandbox import keeping, squashing, sweeping
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.saving import Taken
from sandkeep.store.format import record_name
from trees import fill, quick_folder, whiteout

NAMES = ["etc/conf", "d/a", "d/e/b", "d/new", "f", "g/h"]


class Place:
    """One machine: a home, the sandboxes in it, its own cache of the shared store."""

    def __init__(self, root: Path, name: str) -> None:
        self.home = Home(root / name)
        self.home.ensure()
        self._root = root
        self.sandboxes: list[Machine] = []
        self.store = Store(root / "store", home=self.home.path)

    def reopen(self) -> None:
        self.store.close()
        self.store = Store(self._root / "store", home=self.home.path)

    def keep(self, machine: Machine, dice: random.Random, **how: object) -> str:
        """The sandbox works a little and is saved."""
        record = machine.record()
        stack = record.stack
        for _ in range(dice.randrange(3)):
            layer = self.home.layers.new_id()
            work(self.home.layers.begin(layer), dice)
            stack = [layer, *stack]
        record.stack = stack
        record.save(machine.folder)
        return keeping.keep(machine, record, Taken(stack, {"cwd": "/"}, [], "rotated"), self.store, **how).id  # type: ignore[arg-type]

    def sandbox(self, base: Path, stack: list[str], parent: str | None) -> Machine:
        id = self.home.new_id()
        machine = Machine(self.home, id)
        machine.folder.mkdir()
        record = Record(id=id, runtime="runc", base=str(base), state=State.PAUSED, stack=stack)
        record.parent, record.parent_stack = parent, list(stack)
        record.save(machine.folder)
        self.sandboxes.append(machine)
        return machine

    def stack_of(self, checkpoint: str) -> list[str]:
        return keeping.fetch(self.home, self.store, checkpoint, self.home.layers.new_id(), lambda stack: None)

    def shows(self, stack: list[str], checkpoint: str) -> bool:
        """Whether these layers are, entry by entry, what the checkpoint says."""
        assert self.home.layers.here(stack)
        record = load_record(self.store.repo, checkpoint)
        trees = [self.home.layers.tree(layer) for layer in reversed(stack)]
        below = keeping.below_of(Machine(self.home, self.home.new_id()).base(Record("", "", record.base["name"])))
        found = capture(
            self.store.repo,
            Source(trees, None, below),
            base=record.base,
            session={"cwd": "/"},
            unless=checkpoint,
        )
        if found.id != checkpoint:
            self.store.forget([found.id])
        return found.id == checkpoint


def work(tree: Path, dice: random.Random) -> None:
    tree.mkdir()
    for name in dice.sample(NAMES, dice.randrange(1, 4)):
        path = tree / name
        if any((tree / part).is_file() or (tree / part).is_char_device() for part in Path(name).parents):
            continue
        if dice.random() < 0.3 and not path.exists():
            whiteout(path)
        else:
            fill(tree, {name: dice.randbytes(dice.choice([3, 70, 5000]))})


class World:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.base = root / "base"
        fill(self.base, {"usr/bin/env": b"", "etc/conf": b"base", "d/a": b"base", "d/e/b": b"base"})
        self.places = [Place(root, "one"), Place(root, "two")]
        for place in self.places:
            place.sandbox(self.base, [], None)

    def step(self, what: str, dice: random.Random) -> None:
        place = dice.choice(self.places)
        getattr(self, what)(place, dice)

    def ids(self, place: Place) -> list[str]:
        return sorted(place.store.repo.list_records("checkpoints", full=True))

    def save(self, place: Place, dice: random.Random) -> None:
        how = {"exclude": ["/d/e/"]} if dice.random() < 0.2 else {}
        place.keep(dice.choice(place.sandboxes), dice, **how)

    def create(self, place: Place, dice: random.Random) -> None:
        for checkpoint in dice.sample(ids := self.ids(place), min(1, len(ids))):
            place.sandbox(self.base, place.stack_of(checkpoint), checkpoint)

    def forget(self, place: Place, dice: random.Random) -> None:
        ids = self.ids(place)
        for checkpoint in dice.sample(ids, min(len(ids), dice.randrange(1, 3))):
            place.store.forget([checkpoint])

    def take_back(self, place: Place, dice: random.Random) -> None:
        for info in place.store.forgotten():
            if dice.random() < 0.5:
                with suppress(
                    CheckpointNotFound
                ):  # a gc with a time of grace kept it, or one without took what it needs
                    place.store.unforget(info)

    def collect(self, place: Place, dice: random.Random) -> None:
        place.store.gc(grace=dice.choice([None, "1h"]))

    def sweep(self, place: Place, dice: random.Random) -> None:
        sweeping.gc(place.home, cache=dice.random() < 0.5)

    def kill(self, place: Place, dice: random.Random) -> None:
        if len(place.sandboxes) > 1:
            shutil.rmtree(place.sandboxes.pop(dice.randrange(1, len(place.sandboxes))).folder)

    def squash(self, place: Place, dice: random.Random) -> None:
        machine = dice.choice(place.sandboxes)
        record = machine.record()
        if len(record.stack) < 2:
            return
        at = dice.randrange(len(record.stack) - 1)
        run = record.stack[at:]
        layer = squashing.squash_now(place.home, str(self.base), run)
        if layer is not None:
            record.stack = squashing.swap(record.stack, layer, run)
            record.parent_stack = squashing.swap(record.parent_stack, layer, run)
            record.save(machine.folder)

    def lose_index(self, place: Place, dice: random.Random) -> None:
        place.store.close()
        shutil.rmtree(place.home.path / "cache")
        place.reopen()

    def keep_a_copy(self, place: Place, dice: random.Random) -> None:
        for name in ("cache", "known"):
            if (place.home.path / name).exists():
                shutil.copytree(place.home.path / name, place.home.path / f"old-{name}", dirs_exist_ok=True)

    def go_stale(self, place: Place, dice: random.Random) -> None:
        """What was cached some time ago is what is cached now."""
        name = dice.choice(["cache", "known"])
        old, now = place.home.path / f"old-{name}", place.home.path / name
        if old.exists():
            place.store.close()
            shutil.rmtree(now, ignore_errors=True)
            old.rename(now)
            place.reopen()

    def go_wrong(self, place: Place, dice: random.Random) -> None:
        """Files of `known` are cut short, nonsense, or name layers that never were."""
        for path in (place.home.path / "known").glob("*/*.json"):
            wrong = dice.choice(
                [None, b"", b'{"stack": ["ly_', b"[]", b'{"stack": 5}', b'{"stack": ["ly_0"]}', b"\xff"]
            )
            if wrong is not None:
                path.write_bytes(wrong)

    def lose_layers(self, place: Place, dice: random.Random) -> None:
        """Those that are only a cache."""
        used = {layer for machine in place.sandboxes for layer in machine.record().used_layers()}
        for layer in place.home.layers.ids():
            if layer not in used and dice.random() < 0.7:
                place.home.layers.discard(layer)

    def check(self) -> None:
        for place in self.places:
            for checkpoint in self.ids(place):
                stack = place.stack_of(checkpoint)
                assert place.shows(stack, checkpoint)
        assert self.places[0].store.verify() == []


STEPS = [
    "save", "save", "save", "create", "create", "forget", "forget", "take_back", "collect", "sweep", "kill", "squash", "lose_index",
    "keep_a_copy", "go_stale", "go_wrong", "lose_layers",
]  # fmt: skip


@settings(max_examples=25)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 2**32)), min_size=8, max_size=30))
def test_after_any_history_every_checkpoint_can_be_had_everywhere(history: list[tuple[str, int]]) -> None:
    with quick_folder() as root:
        world = World(root)
        try:
            for what, seed in history:
                world.step(what, random.Random(seed))
            world.check()
        finally:
            for place in world.places:
                place.store.close()


@pytest.fixture
def world(root: Path) -> Iterator[World]:
    made = World(root)
    yield made
    for place in made.places:
        place.store.close()


def line(world: World, count: int) -> list[str]:
    """Checkpoints of the first home's first sandbox, each the child of the one before, with something new in each."""
    place = world.places[0]
    (machine,) = place.sandboxes
    ids = []
    for number in range(count):
        record, layer = machine.record(), place.home.layers.new_id()
        fill(place.home.layers.begin(layer), {f"own/{number}": b"%d" % number * 100})
        record.stack = [layer, *record.stack]
        record.save(machine.folder)
        ids.append(place.keep(machine, random.Random(2)))
    return ids


def in_the_way(monkeypatch: pytest.MonkeyPatch, name: str, first: Callable[[], object]) -> None:
    """Once, before that function of `keeping` does its work."""
    inner, done = getattr(keeping, name), []

    def both(*given: Any, **named: Any) -> Any:
        if not done:
            done.append(first())
        return inner(*given, **named)

    monkeypatch.setattr(keeping, name, both)


@pytest.mark.parametrize("collected", [False, True])
def test_a_child_whose_parent_was_forgotten_is_had_where_the_parent_was_used(world: World, collected: bool) -> None:
    one, two = world.places
    parent, child = line(world, 2)
    two.stack_of(parent)
    one.store.forget([parent])
    if collected:
        one.store.gc()
    assert two.shows(two.stack_of(child), child)


def test_a_damaged_parent_does_not_stand_in_the_way_of_its_child(world: World) -> None:
    one, two = world.places
    parent, child = line(world, 2)
    two.stack_of(parent)
    damage(world, parent)
    assert two.shows(two.stack_of(child), child)
    damage(world, child)
    again = one.keep(one.sandboxes[0], random.Random(3), unless=child)
    assert two.shows(two.stack_of(again), again)


def damage(world: World, checkpoint: str) -> None:
    record = world.root / "store" / record_name("checkpoints", checkpoint)
    record.write_bytes(record.read_bytes()[:-1])


def test_the_parent_is_collected_while_its_child_is_fetched(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = world.places
    parent, child = line(world, 2)
    two.stack_of(parent)

    def gone() -> None:
        one.store.forget([parent])
        one.store.gc()

    in_the_way(monkeypatch, "unpack_here", gone)
    assert two.shows(two.stack_of(child), child)


def test_a_parent_forgotten_elsewhere_while_its_child_is_saved(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = world.places
    (parent,) = line(world, 1)

    def gone() -> None:
        two.store.forget([parent])
        two.store.gc()

    in_the_way(monkeypatch, "capture_here", gone)
    child = one.keep(one.sandboxes[0], random.Random(1))
    assert one.store.get(child).parent_id == parent
    assert two.shows(two.stack_of(child), child)


def test_layers_that_a_fetch_builds_on_are_not_swept_meanwhile(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    _, two = world.places
    parent, child = line(world, 2)
    two.stack_of(parent)
    machine = two.sandboxes[0]
    in_the_way(monkeypatch, "unpack_here", lambda: sweeping.discard_unused(two.home, cache=True))
    stack = keeping.fetched(machine, two.store, child)
    assert len(stack) > 1
    sweeping.discard_unused(two.home, cache=True)
    assert two.shows(stack, child)


def test_layers_of_another_life_of_the_host_are_not_believed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """They were never synced: after a power cut they may be anything."""
    one, _ = world.places
    (kept,) = line(world, 1)
    before = one.stack_of(kept)
    for layer in before:
        for path in one.home.layers.tree(layer).rglob("*"):
            if path.is_file():
                path.write_bytes(b"")
    monkeypatch.setattr(keeping, "boot", lambda: "another")
    assert one.shows(one.stack_of(kept), kept)


def test_what_a_checkpoint_left_out_is_not_in_what_is_had_from_it(world: World) -> None:
    one, _ = world.places
    line(world, 1)
    kept = one.keep(one.sandboxes[0], random.Random(2), exclude=["/own/"])
    assert one.shows(one.stack_of(kept), kept)
    assert [info.name for info in one.store.ls(kept)] == []


def test_the_parent_stayed_in_another_store(world: World) -> None:
    one, two = world.places
    line(world, 1)
    with Store(world.root / "other", home=one.home.path) as other:
        keeping.choose_store(one.sandboxes[0], other)
        one.store.close()
        one.store = other
        child = one.keep(one.sandboxes[0], random.Random(1))
        assert other.get(child).parent_id is not None
        assert other.verify() == []
        two.store.close()
        two.store = other
        assert two.shows(two.stack_of(child), child)


def test_where_a_store_is_is_remembered_and_its_keys_are_not(world: World) -> None:
    one, _ = world.places
    keys = {"access_key": "AKIDEXAMPLE", "secret_key": "wJalrXUtnFEMI"}
    about = {"region": "here", "endpoint": "http://127.0.0.1:1"}
    one.store.spec = replace(one.store.spec, url="s3://bucket/prefix", options={**about, **keys})
    machine = one.sandboxes[0]
    keeping.choose_store(machine, one.store)
    assert keeping.address(one.store) == ("s3://bucket/prefix", about)
    assert machine.record().store_options == about
    for path in machine.folder.rglob("*"):
        assert not any(key.encode() in path.read_bytes() for key in keys.values() if path.is_file())
