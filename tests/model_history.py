"""Histories: made up from a seed, played, and made as short as still goes wrong."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from model_edits import Editor
from model_world import Rules, Step, World, Wrong


@dataclass
class Played:
    """What came of a history."""

    history: list[Step]
    wrong: Wrong | None = None
    steps: int = 0
    edits: int = 0
    limits: int = 0
    killed: int = 0
    seconds: float = 0.0
    seen: dict[str, int] = field(default_factory=dict)


class Author:
    """Makes up the next step for a world as it is."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.count = 0
        self.calm = self.rng.random() < 0.3  # whether nothing runs beside in this world
        self.name, self.near, self.saves = "", "", False

    def _name(self, kind: str) -> str:
        self.count += 1
        return f"{kind}{self.count}"

    def next(self, world: World) -> Step:
        rng = self.rng
        if not world.boxes:
            return ["create", self._name("b"), rng.randrange(2)]
        if self.name not in world.boxes or rng.random() < 0.15:
            self.name = rng.choice(list(world.boxes))
        name, box = self.name, world.boxes[self.name]
        if box.paused:
            return ["resume", name] if rng.random() < 0.7 else self._elsewhere(world)
        chance = rng.random()
        self.saves = not self.saves
        if not box.process and not self.calm and chance < 0.15:
            return ["busy", name]
        if box.process and chance < 0.05:
            return ["idle", name]
        if chance < 0.80:
            if not self.saves:
                return self._edit(world, name)
            return ["snapshot", name, self._name("s")] if chance < 0.7 else ["checkpoint", name, self._name("c")]
        if chance < 0.85 and (box.snapshots or world.saved):
            return ["restore", name, rng.choice([*box.snapshots, *world.saved])]
        return self._elsewhere(world, name)

    def _edit(self, world: World, name: str) -> Step:
        box, rng = world.boxes[name], self.rng
        if self.near not in box.tree.nodes or rng.random() < 0.2:
            self.near = rng.choice([path for path, node in box.tree.nodes.items() if node.kind == "dir"])
        editor = Editor(rng, box.tree.copy(), world.rules.roots, world.rules.lacks, self.near)
        return ["edit", name, editor.some(rng.choice([1, 2, 5, 15]), bool(box.process))]

    def _elsewhere(self, world: World, name: str = "") -> Step:
        rng = self.rng
        box = world.boxes.get(name)
        steps: list[Step] = [
            ["store_gc", rng.randrange(2)],
            ["home_gc", rng.randrange(2), rng.random() < 0.4],
            ["forget", rng.choice([1, 2, 3]), rng.randrange(2)],
        ]
        if world.saved:
            steps += [["create_from", self._name("b"), rng.choice(list(world.saved)), rng.randrange(2)]] * (
                3 if len(world.boxes) < 3 else 0
            )
            steps.append(["forget_one", rng.choice(list(world.saved)), rng.randrange(2)])
        if world.forgotten:
            steps.append(["unforget", rng.choice(list(world.forgotten)), rng.randrange(2)])
        if rng.random() < 0.2:
            steps.append(["lose_cache", rng.randrange(2)])
        if box:
            steps += [["pause", name, self._name("c")], ["export", name, self._name("x")]]
            if rng.random() < 0.3:
                steps.append(["crash", name, rng.choice(["snapshot", "checkpoint", "fork"]), round(rng.random(), 3)])
            steps += [["fork", name, self._name("b")]] * (2 if len(world.boxes) < 3 else 0)
            steps += [["kill", name]] * (len(world.boxes) > 1) + [["kill", name]] * (len(world.boxes) > 2)
            steps += [["delete_snapshot", name, rng.choice(list(box.snapshots))]] if box.snapshots else []
            steps += [["import_", name, rng.choice(list(world.blobs))]] if world.blobs else []
        return rng.choice(steps)


def made_up(seed: int, steps: int) -> Callable[[World], Iterator[Step]]:
    def history(world: World) -> Iterator[Step]:
        author = Author(seed)
        for _ in range(steps):
            yield author.next(world)

    return history


def given(steps: list[Step]) -> Callable[[World], Iterator[Step]]:
    return lambda world: iter(steps)


def play(rules: Rules, history: Callable[[World], Iterator[Step]], until: float = float("inf")) -> Played:
    """A whole history, or as much of it as is made `until` then."""
    played, began = Played([]), time.monotonic()
    with World(rules) as world:
        try:
            for step in history(world):
                played.history.append(step)
                played.seen[step[0]] = played.seen.get(step[0], 0) + world.step(step)
                if time.monotonic() > until:
                    break
            world.end()
        except Wrong as wrong:
            played.wrong = wrong
        played.steps, played.edits, played.limits, played.killed = world.steps, world.edits, world.limits, world.killed
    played.seconds = time.monotonic() - began
    return played


def shrunk(rules: Rules, played: Played, seconds: float) -> Played:
    """The shortest history found in this time that goes wrong in the same way."""
    assert played.wrong is not None
    until, best = time.monotonic() + seconds, played
    kind = _kind(played.wrong)

    def better(steps: list[Step]) -> bool:
        nonlocal best
        tried = play(rules, given(steps))
        if tried.wrong is None or _kind(tried.wrong) != kind:
            return False
        best = tried
        return True

    _less(lambda: best.history, lambda items: better(items), until)
    for at in reversed(range(len(best.history))):
        if at < len(best.history) and best.history[at][0] == "edit":
            steps = list(best.history)

            def edits(at: int = at) -> list[Step]:
                step: list[Step] = best.history[at][2]
                return step

            def with_edits(items: list[Step], steps: list[Step] = steps, at: int = at) -> bool:
                return better([*steps[:at], [*steps[at][:2], items], *steps[at + 1 :]])

            _less(edits, with_edits, until)
    return best


def _less(now: Callable[[], list[Step]], works: Callable[[list[Step]], bool], until: float) -> None:
    """Take out runs of items, long ones first, as long as it still goes wrong."""
    size = max(1, len(now()) // 2)
    while time.monotonic() < until:
        at, fewer = 0, False
        while at < len(now()) and time.monotonic() < until:
            items = now()
            if works(items[:at] + items[at + size :]):
                fewer = True
            else:
                at += size
        if size == 1 and not fewer:
            return
        size = max(1, size // 2)


def _kind(wrong: Wrong) -> str:
    return wrong.what.split(" ")[0]
