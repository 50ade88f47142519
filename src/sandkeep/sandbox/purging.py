"""All of a home at once: every sandbox killed, also those whose folders are gone, and the home removed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from sandkeep.errors import BadArgument
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox import killing, leftovers
from sandkeep.sandbox.home import Home

_MARKS = ("sandboxes", "layers")
_PARTS = {
    *_MARKS, "known", "trash", "namespaces", "bases", "guest", "store", "cache", "agents", "agents.lock", "layers.lock", "squash.lock", "runtimes.json",
}  # fmt: skip


def kill_all(home: Home) -> None:
    """The first that could not be killed is raised, once the others are."""
    left = killing.kill_all(home, home.ids())
    leftovers.end_lost(home)
    for error in left.values():
        raise error


def check(home: Home) -> None:
    if not all((home.path / name).is_dir() for name in _MARKS) and not leftovers.lost(home):
        raise BadArgument(
            f"{home.path} is no home of Sandkeep's: nothing was removed", "name the right one with --home"
        )


def purge(home: Home) -> list[str]:
    """What in that folder is not ours and stays, if anything. If a sandbox can't be killed nothing is removed."""
    check(home)
    kill_all(home)
    if not home.path.is_dir():
        return []
    leftovers.sweep(home)
    elevated(_remove, home.path)
    left = sorted(os.listdir(home.path))
    if not left:
        home.path.rmdir()
    return left


def _remove(home: Path) -> None:
    parts = [str(home / name) for name in sorted(_PARTS.intersection(os.listdir(home)))]
    subprocess.run(["rm", "-rf", "--", *parts], check=True)
