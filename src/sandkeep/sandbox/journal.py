"""One entry per operation under way, written before its first effect and removed after its last.

Whoever next takes the sandbox's lock and finds an entry finishes or undoes that operation (see recovery.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sandkeep.sandbox.home import read_json, sync_folder, write_json

NAME = "journal.json"


def begin(folder: Path, operation: str, **facts: Any) -> None:
    write_json(folder / NAME, {"operation": operation, **facts})


def pending(folder: Path) -> dict[str, Any] | None:
    try:
        entry: dict[str, Any] = read_json(folder / NAME)
    except FileNotFoundError:
        return None
    return entry


def done(folder: Path) -> None:
    (folder / NAME).unlink(missing_ok=True)
    sync_folder(folder)


def step(name: str) -> None:
    """A named point between two effects. Nothing happens here; the crash tests die here."""
