"""Whether the layers of a home keep the rules, in every stack that a sandbox, a snapshot or a known checkpoint stands on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sandkeep.checkpoints.base import Base as Below
from sandkeep.errors import BadArgument
from sandkeep.layers.check import Break, breaks
from sandkeep.runtime.base import resolve
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox import squashing
from sandkeep.sandbox.home import Home, read_json, read_known
from sandkeep.sandbox.record import Record
from sandkeep.sandbox.sweeping import remembered

Stack = tuple[str, ...]


@dataclass(frozen=True)
class Unknown:
    """A base that can't be asked: it may have every folder."""

    def is_folder(self, path: bytes) -> bool:
        return True


def check(home: Home) -> list[Break]:
    with home.layers_lock():
        stacks = dict(_stacks(home))
        for stack, base in list(stacks.items()):
            for layer, of in squashing.known(home).items():
                stacks[tuple(squashing.swap(list(stack), layer, of))] = base
        asked = [
            (home.layers.trees(stack), *_below(home, base)) for stack, base in stacks.items() if home.layers.here(stack)
        ]
        return sorted(set(elevated(_breaks, asked)), key=str)


def _breaks(asked: list[tuple[list[Path], Below | Unknown, bool]]) -> list[Break]:
    return [one for stack, below, own_usr in asked for one in breaks(stack, below, own_usr)]


def _stacks(home: Home) -> Iterator[tuple[Stack, str]]:
    """Every stack in use and the base it lies on: of a known checkpoint nobody wrote that down."""
    for path in remembered(home):
        yield tuple((read_known(path) or {}).get("stack", [])), ""
    for id in home.ids():
        with contextlib.suppress(FileNotFoundError):
            record = Record.load(home.sandboxes / id)
            for path in (home.sandboxes / id / "snapshots").glob("sn_*.json"):
                yield tuple(read_json(path)["layers"]), record.base
            for stack in (record.stack, record.copied):
                yield tuple(stack), record.base


def _below(home: Home, base: str) -> tuple[Below | Unknown, bool]:
    try:
        found = resolve(base, home.path)
    except BadArgument:
        return Unknown(), False
    return Below(found.roots()), found.usr
