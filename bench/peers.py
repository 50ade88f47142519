"""Other ways to keep a folder: how each saves it first, saves it again, and gives it back."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from bench.measure import timed


class Peer(NamedTuple):
    """Shell commands; `{tree}` is the folder, `{at}` is where it is kept, `{out}` an empty folder for the restore."""

    first: str
    again: str
    restore: str


_GIT = "git --git-dir={at}/r --work-tree={tree}"
PEERS = {
    "tar|gzip": Peer(
        "tar -C {tree} -c . | gzip > {at}/x.gz", "tar -C {tree} -c . | gzip > {at}/x.gz", "tar -C {out} -xzf {at}/x.gz"
    ),
    "borg": Peer(
        "borg init -e none {at}/b && cd {tree} && borg create {at}/b::first .",
        "cd {tree} && borg create {at}/b::{{now:%H%M%S%f}} .",
        "cd {out} && borg extract {at}/b::first",
    ),
    "git": Peer(
        f"git init -q --bare {{at}}/r && {_GIT} add -A && {_GIT} write-tree",
        f"{_GIT} add -A && {_GIT} write-tree",
        "git --git-dir={at}/r --work-tree={out} checkout-index -a",
    ),
    "casync": Peer(
        "casync make --store={at}/c {at}/x.caidx {tree}",
        "casync make --store={at}/c {at}/y.caidx {tree}",
        "casync extract --store={at}/c {at}/x.caidx {out}",
    ),
    "cp -a": Peer("cp -a {tree} {at}/copy", "rm -rf {at}/more && cp -a {tree} {at}/more", "cp -a {at}/copy/. {out}"),
}


def shell(command: str) -> Callable[[], object]:
    return lambda: subprocess.run(command, shell=True, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


class Others:
    """Those peers that are installed, each asked once: most are slow."""

    def __init__(self, folder: Path, tree: Path) -> None:
        self._folder, self._tree = folder / "others", tree
        self._installed = [name for name in PEERS if name.startswith(("tar", "cp")) or shutil.which(name)]

    def first(self) -> dict[str, float]:
        for name in self._installed:
            self._at(name).mkdir(parents=True)
        return {name: self._run(name, PEERS[name].first) for name in self._installed}

    def again(self) -> dict[str, float]:
        return {name: self._run(name, PEERS[name].again) for name in self._installed}

    def restore(self) -> dict[str, float]:
        return {name: self._run(name, PEERS[name].restore) for name in self._installed}

    def _at(self, name: str) -> Path:
        return self._folder / name.translate({ord("|"): None, ord(" "): None})

    def _run(self, name: str, command: str) -> float:
        out = self._folder / "out"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        os.sync()
        return timed(shell(command.format(tree=self._tree, at=self._at(name), out=out)))
