"""The end of sandboxes. It needs control groups and the pidfd of process 1 alone: never the guest, nor what an operation left undone.

While another operation holds the lock, its processes end at once and the folder carries the mark `killed`: whoever lets
go of the lock, or takes it next, removes what is left.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from sandkeep.errors import Busy, SandkeepError, disk_full, system
from sandkeep.layers.pool import throw_away
from sandkeep.runtime.driver import RUNC
from sandkeep.sandbox import journal
from sandkeep.sandbox.home import Home, lock
from sandkeep.sandbox.journal import step
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.sweeping import discard_unused, sweep_trash

MARK = "killed"
PATIENCE = 5.0  # for whoever holds the lock
AT_ONCE = 4
_PAUSE = 0.02


def kill(machine: Machine) -> None:
    """End it and remove all of it from this host. Checkpoints stay in their store. Killing what is gone is fine."""
    if _end(machine):
        discard_unused(machine.home)
    sweep_trash(machine.home)


def kill_all(home: Home, ids: Iterable[str]) -> dict[str, SandkeepError]:
    """Many at once, cleaned up after once; what could not be killed, with the reason."""

    def one(machine: Machine) -> tuple[bool, SandkeepError | None]:
        try:
            with system():
                return _end(machine), None
        except SandkeepError as error:
            return True, error

    machines = [Machine(home, id) for id in ids]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        ends = list(pool.map(one, machines))
    if any(had_layers for had_layers, _ in ends):
        discard_unused(home)
    sweep_trash(home)
    return {machine.id: error for machine, (_, error) in zip(machines, ends, strict=True) if error is not None}


def killed(folder: Path) -> bool:
    return (folder / MARK).exists()


def remove(machine: Machine) -> None:
    """Of whatever runtime, from whatever point, any number of times. The caller holds the lock."""
    machine.link.close()
    RUNC.stop(machine.id, machine.folder)
    step("kill: stopped")
    throw_away(machine.folder, machine.home.trash)


def _end(machine: Machine) -> bool:
    """Whether layers may be left that nobody uses."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            with lock(machine.folder / "lock", wait=False):
                return _remove(machine)
        except FileNotFoundError:
            return False
        except Busy:
            with contextlib.suppress(FileNotFoundError):
                _mark(machine.folder)
            RUNC.kill(machine.id, machine.folder)
        if time.monotonic() > until:
            raise Busy(
                f"the processes of sandbox {machine.id} are ended, but another operation holds what is left of it",
                "that goes when the operation ends; killing again waits for it",
                id=machine.id,
            )
        time.sleep(_PAUSE)


def _remove(machine: Machine) -> bool:
    had_layers = journal.pending(machine.folder) is not None or _on_layers(machine.folder)
    _mark(machine.folder)
    step("kill: marked")
    remove(machine)
    return had_layers


def _on_layers(folder: Path) -> bool:
    try:
        return (folder / "snapshots").is_dir() or bool(Record.load(folder).used_layers())
    except FileNotFoundError:
        return False
    except (ValueError, KeyError, TypeError):  # a damaged record keeps nothing alive
        return True


def _mark(folder: Path) -> None:
    """A full disk must not protect what fills it: without a mark, a kill that is cut short is one to be repeated."""
    try:
        (folder / MARK).touch()
    except OSError as error:
        if not disk_full(error):
            raise
