"""What processes leave that were killed: half-made files and folders, in places where nothing else has such a name."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from sandkeep import owned
from sandkeep.errors import Busy
from sandkeep.layers.pool import throw_away
from sandkeep.model import State
from sandkeep.runtime import base, cgroup, process
from sandkeep.runtime.doctor import PROBE
from sandkeep.runtime.driver import RUNC
from sandkeep.runtime.link import door
from sandkeep.sandbox.carrying import PREFIX
from sandkeep.sandbox.home import Home, lock
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.record import Record

_OWNED = (f"cache/{PREFIX}*", "cache/extract-*", "known/*/.*", "namespaces/*/.*", "layers/*/.*", "guest/.*")
_GROUP = re.compile(r"sandkeep-(sb-[0-9a-f]{12})-[0-9a-f]{8}")


def sweep(home: Home) -> list[str]:
    """All of the home but its sandboxes: whatever has lost its owner."""
    away = partial(throw_away, trash=home.trash)
    gone = [path for pattern in _OWNED for path in _matching(home, pattern) if owned.sweep(path, away)]
    gone += [path for path in _matching(home, f"{PROBE}*") if owned.sweep(path, partial(_end_probe, home=home))]
    gone += base.unfinished(home.path, away)
    return [str(path.relative_to(home.path)) for path in gone]


def _matching(home: Home, pattern: str) -> Iterable[Path]:
    return sorted(home.path.glob(pattern))


def _end_probe(folder: Path, home: Home) -> None:
    for group in cgroup.of_folder(folder):
        cgroup.destroy(group)
    RUNC.stop(folder.name, folder)
    throw_away(folder, home.trash)


def remains(home: Home, id: str) -> None:
    """A folder that its maker did not come to name a sandbox."""
    folder = home.sandbox(id)
    with contextlib.suppress(FileNotFoundError), lock(folder / "lock", wait=False):
        if not any((folder / name).exists() for name in ("record.json", "journal.json")):
            RUNC.stop(id, folder)
            throw_away(folder, home.trash)


def tidy(machine: Machine, record: Record) -> list[str]:
    """What is in a sandbox's folder and is no part of it. The caller holds the lock, and nothing is under way."""
    folder = machine.folder
    keep = {f"cursor-{record.copied[0]}" if record.copied else ""}
    found = [path for path in folder.iterdir() if path.name.startswith((".", "cursor-")) and path.name not in keep]
    found = [
        path for path in found if not path.name.startswith(".workflow.")
    ]  # under a lock of its own, and overwritten
    found += [path for path in _listed(folder / "snapshots") if path.name.startswith(".")]
    found += [path for path in _listed(folder / "tops") if path.name != str(record.top)]
    found += [path for path in (folder / "bundle/process.new",) if path.exists()]
    if record.state is not State.PAUSED:
        found += [path for path in (folder / "image",) if path.exists()]
    for path in found:
        throw_away(path, machine.home.trash)
    found += [*_half_workflow(folder), *_unheard(folder / door.SHOWN)]
    return [str(path.relative_to(machine.home.path)) for path in found]


def _half_workflow(folder: Path) -> list[Path]:
    """The driver's variables have a lock of their own."""
    half = folder / ".workflow.json.tmp"
    if not half.exists():
        return []
    with contextlib.suppress(Busy, FileNotFoundError), lock(folder / ".workflow.json.lock", wait=False):
        half.unlink()
        return [half]
    return []


def _unheard(folder: Path) -> list[Path]:
    """Sockets at which dead processes waited for a guest."""
    made = [path for path in _listed(folder) if path.is_socket()]
    heard = Path("/proc/net/unix").read_text() if made else ""
    dead = [path for path in made if path.name not in heard]
    for path in dead:
        path.unlink(missing_ok=True)
    return dead


def _listed(folder: Path) -> list[Path]:
    return list(folder.iterdir()) if folder.is_dir() else []


def lost(home: Home) -> list[str]:
    """Sandboxes of this home that run though their folders were removed: their control groups carry the folder's hash."""
    found = []
    for name in cgroup.names():
        matched = _GROUP.fullmatch(name)
        if (
            matched
            and not os.path.lexists(folder := home.sandbox(matched[1]))
            and cgroup.name_of(matched[1], folder) == name
            and not _has_folder(name, matched[1])
        ):
            found.append(matched[1])
    return sorted(found)


def _has_folder(group: str, id: str) -> bool:
    """Whether the folder is where we don't see it: the home was moved, or another file system lies on it or on ours."""
    return any(process.sees(pid, f"/{id}/run") for pid in cgroup.pids(group))


def end_lost(home: Home) -> list[str]:
    groups = {id: cgroup.name_of(id, home.sandbox(id)) for id in lost(home)}
    for group in groups.values():
        (cgroup.destroy if cgroup.pids(group) else cgroup.remove_empty)(group)
    return [id for id, group in groups.items() if not cgroup.groups(group)]
