"""Nothing is left behind: layers that nobody uses, remains of crashes, the trash. `gc` is the whole of it."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from sandkeep.errors import Busy, NotFound
from sandkeep.layers.pool import empty_trash, empty_trash_later
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox import journal, squashing
from sandkeep.sandbox.home import Home, lock, read_json, read_known
from sandkeep.sandbox.record import Record

CACHED = 16  # checkpoints whose layers stay here for a quick restore though no sandbox stands on them


@dataclass
class Swept:
    sandboxes: list[str] = field(default_factory=list)
    layers: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)


def gc(home: Home, *, dry_run: bool = False, cache: bool = False) -> Swept:
    """Finish what crashes left, drop layers without users, empty the trash. With `cache` also layers kept only for quick restores.

    What may hold secrets goes first.
    """
    from sandkeep.sandbox import leftovers
    from sandkeep.sandbox.machine import Machine

    if dry_run:
        return Swept(layers=discard_unused(home, dry_run=True, cache=cache))
    swept = Swept(leftovers=leftovers.sweep(home))
    for id in home.ids():
        try:
            leftovers.remains(home, id)
            with Machine(home, id).held(wait=False) as record:
                swept.leftovers += leftovers.tidy(Machine(home, id), record)
        except Busy:
            continue
        except NotFound:
            swept.sandboxes.append(id)
    swept.sandboxes += leftovers.end_lost(home)
    elevated(empty_trash, home.trash)
    swept.layers = discard_unused(home, cache=cache)
    if swept.layers:
        elevated(empty_trash, home.trash)
    return swept


def discard_unused(home: Home, *, dry_run: bool = False, cache: bool = False) -> list[str]:
    """Layers first, users second: a layer is journalled before it is made, so whoever is listed has its user on record."""
    with home.layers_lock():
        present = home.layers.ids()
        used = users(home, cache=not cache)
        for layer, of in squashing.known(home).items():
            if used.issuperset(of):
                used.add(layer)
        gone = [layer for layer in present if layer not in used and not _being_made(home, layer)]
        if not dry_run:
            for layer in gone:
                home.layers.discard(layer)
            if gone:
                forget_gone(home)
    if gone and not dry_run:
        sweep_trash(home)
    return gone


def users(home: Home, *, cache: bool) -> set[str]:
    """Every layer that a sandbox, a snapshot, an operation under way or (with `cache`) a known checkpoint stands on."""
    used: set[str] = set()
    for id in home.ids():
        folder = home.sandboxes / id
        try:
            entry = journal.pending(folder) or {}
            used.update(entry.get("stack", []), [entry["layer"]] if "layer" in entry else [])
            used |= Record.load(folder).used_layers()
            for path in (folder / "snapshots").glob("sn_*.json"):
                used.update(read_json(path)["layers"])
        except FileNotFoundError:
            continue
    if cache:
        for path in remembered(home)[:CACHED]:
            used.update((read_known(path) or {}).get("stack", []))
    return used


def remembered(home: Home) -> list[Path]:
    """What is known of checkpoints' layers here, the last used first."""
    return sorted((home.path / "known").glob("*/*.json"), key=lambda path: path.stat().st_mtime_ns, reverse=True)


def forget_gone(home: Home) -> None:
    for path in remembered(home):
        known = read_known(path)
        if known is None or not home.layers.here(known["stack"]):
            path.unlink(missing_ok=True)


def _being_made(home: Home, layer: str) -> bool:
    if not (home.layers.folder / layer / "making.json").exists():
        return False
    try:
        with lock(home.path / "squash.lock", wait=False):
            return False
    except Busy:
        return True


def sweep_trash(home: Home) -> None:
    if os.geteuid() == 0:
        empty_trash_later(home.trash)
    else:
        elevated(empty_trash, home.trash)
