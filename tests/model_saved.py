"""What was saved, looked at without a sandbox: a snapshot's layers mounted aside, a checkpoint as the store shows it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import model_inside
from model_tree import Facts, Tree
from sandkeep.checkpoints.browse import Tree as Files
from sandkeep.errors import SandkeepError
from sandkeep.runtime import kernel
from sandkeep.runtime.base import Base


def shown(trees: list[Path], base: Base, place: Path, roots: list[str], alone: list[str]) -> dict[str, Facts]:
    """What these layers (top first) show over the base."""

    def look() -> dict[str, Facts]:
        kernel.private_mounts()
        place.mkdir(exist_ok=True)
        mount([*trees, base.root], place)
        if base.usr:
            usr = [tree / "usr" for tree in trees if (tree / "usr").is_dir()]
            usr += [base.root / "usr"] if os.listdir(base.root / "usr") else []
            mount([*usr, Path("/usr")], place / "usr")
        return model_inside.look(roots, alone, str(place))

    return kernel.in_thread(look)


def mount(lowers: list[Path], place: Path) -> None:
    if len(lowers) == 1:
        kernel.mount(str(lowers[0]), str(place), None, kernel.MS_BIND)
        return
    settings = f"userxattr,xino=off,index=off,lowerdir={':'.join(map(str, lowers))}"
    kernel.mount("overlay", str(place), "overlay", 1, settings)


def odd_in_store(files: Files, root: str, tree: Tree) -> str:
    """The first thing below `root` that is not as in the model."""
    mine = {path for path in tree.nodes if path.startswith(root + "/")}
    found, todo = set[str](), [root]
    while todo:
        with contextlib.suppress(SandkeepError):
            for entry in files.ls(todo.pop()):
                found.add(entry.path)
                todo += [entry.path] if entry.kind == "dir" else []
                node = tree.nodes.get(entry.path)
                if node and (node.kind, node.mode) != (entry.kind, entry.mode):
                    return f"{entry}, wanted {node}"
                if node and node.kind == "file" and files.read(entry.path) != node.data:
                    return f"{entry.path!r} has other contents"
    return "" if found == mine else f"has {sorted(found - mine)}, lacks {sorted(mine - found)}"
