"""Keep stacks short: a long run of layers is merged into one in the background, and used from the next rotation on.

A squashed layer's folder holds `of.json` with the ids that it stands for, so any stack that ends in them can use it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from sandkeep.checkpoints.base import Base as Below
from sandkeep.errors import Busy
from sandkeep.layers.detached import detach
from sandkeep.layers.squash import squash
from sandkeep.runtime.base import resolve
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox.home import Home, lock, read_json, write_json

LONG = 24
KEEP = 4  # the newest layers stay as they are: they are the parents of what comes next


def find(home: Home, stack: list[str]) -> tuple[str, list[str]] | None:
    """A squashed layer that can stand for a run of this stack, if the stack is long."""
    if len(stack) <= LONG:
        return None
    return next(((layer, of) for layer, of in known(home).items() if swap(stack, layer, of) != stack), None)


def swap(stack: list[str], layer: str, of: list[str]) -> list[str]:
    """The stack with `layer` in place of the run `of`, where it holds that run."""
    for at in range(len(stack) - len(of) + 1):
        if stack[at : at + len(of)] == of:
            return [*stack[:at], layer, *stack[at + len(of) :]]
    return stack


def known(home: Home) -> dict[str, list[str]]:
    """Squashed layers, those that stand for most first."""
    found = {}
    for layer in home.layers.ids():
        path = home.layers.folder / layer / "of.json"
        if path.exists():
            found[layer] = list(read_json(path))
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def later(home: Home, base: str, stack: list[str]) -> None:
    """Begin to squash in a process of its own, if the stack is long and nobody is at it."""
    if len(stack) > LONG:
        detach([sys.executable, "-m", "sandkeep.sandbox.squashing", str(home.path), base, *stack[KEEP:]])


def squash_now(home: Home, base: str, stack: list[str]) -> str | None:
    """Merge these layers, the lowest of which lies on the base, into a new one; None when they are merged already, being
    merged, or gone."""
    layers = home.layers
    try:
        with lock(home.path / "squash.lock", wait=False):
            if stack in known(home).values() or not layers.here(stack):
                return None
            layer = layers.new_id()
            tree = layers.begin(layer)
            write_json(tree.parent / "making.json", stack)
            elevated(squash, layers.trees(stack), tree, Below(resolve(base, home.path).roots()))
            os.sync()  # what it stands for may be long on disk, and goes
            write_json(tree.parent / "of.json", stack)
            (tree.parent / "making.json").unlink()
            return layer
    except Busy:
        return None


if __name__ == "__main__":
    squash_now(Home(Path(sys.argv[1])), sys.argv[2], sys.argv[3:])
