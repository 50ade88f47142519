"""The layers of one home: each an immutable tree with an id. Who uses which is decided above; here they are made and thrown away."""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterable
from pathlib import Path

from sandkeep.layers.detached import detach


class Layers:
    """`<home>/layers/<id>/tree`, and `<home>/trash` for what is on its way out."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "layers"
        self.trash = home / "trash"

    def new_id(self) -> str:
        return f"ly_{secrets.token_hex(8)}"

    def tree(self, layer: str) -> Path:
        return self.folder / layer / "tree"

    def trees(self, stack: Iterable[str]) -> list[Path]:
        return [self.tree(layer) for layer in stack]

    def here(self, stack: Iterable[str]) -> bool:
        return all(self.tree(layer).is_dir() for layer in stack)

    def begin(self, layer: str) -> Path:
        """The folder of a layer in the making; its tree does not exist yet."""
        folder = self.folder / layer
        folder.mkdir(parents=True)
        return folder / "tree"

    def ids(self) -> list[str]:
        return sorted(entry.name for entry in self.folder.iterdir()) if self.folder.is_dir() else []

    def discard(self, layer: str) -> None:
        throw_away(self.folder / layer, self.trash)


def throw_away(path: Path, trash: Path) -> None:
    """Out of sight at once; the bytes go later, see `empty_trash`."""
    if not os.path.lexists(path):
        return
    trash.mkdir(parents=True, exist_ok=True)
    os.rename(path, trash / f"{secrets.token_hex(8)}-{path.name}")


def remove_later(path: Path, trash: Path) -> None:
    """Throw away what is this user's own and large: the bytes go while others work on."""
    if path.exists():
        trash.mkdir(parents=True, exist_ok=True)
        gone = trash / f"{secrets.token_hex(8)}-{path.name}"
        os.rename(path, gone)
        detach(["rm", "-rf", "--", str(gone)])


def empty_trash(trash: Path) -> None:
    """Remove everything thrown away. Runs with the rights that the files need."""
    entries = [str(entry) for entry in trash.iterdir()] if trash.is_dir() else []
    if entries:
        subprocess.run(["rm", "-rf", "--", *entries], stderr=subprocess.DEVNULL, check=False)


def empty_trash_later(trash: Path) -> None:
    """The same in a process of its own that outlives this one; what it does not finish is left for `gc`."""
    entries = [str(entry) for entry in trash.iterdir()] if trash.is_dir() else []
    if entries:
        detach(["rm", "-rf", "--", *entries])
