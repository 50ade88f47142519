"""A sandbox's whole state as one self-contained file, and back. By way of a store of its own that is thrown away."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from sandkeep import owned
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import BadArgument
from sandkeep.model import RestoreReport
from sandkeep.sandbox import keeping
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.saving import take

PREFIX = "carry-"


def export_state(machine: Machine, to: BinaryIO | str | Path | None = None) -> bytes | None:
    """Returned as bytes, or streamed to `to`."""
    with machine.held() as record:
        machine.require_running(record)
        taken = take(machine, record)
        record.parent, record.parent_stack = None, []
        with _store(machine) as store:
            info = keeping.keep(machine, record, taken, store, remembered=False)
            if to is not None:
                store.export(info.id, to)
                return None
            blob = io.BytesIO()
            store.export(info.id, blob)
            return blob.getvalue()


def import_state(machine: Machine, blob: bytes | BinaryIO | str | Path) -> RestoreReport:
    """Verified whole before anything changes."""
    if isinstance(blob, (bytes, bytearray, memoryview)):
        blob = io.BytesIO(bytes(blob))
    elif not isinstance(blob, (str, Path)) and not hasattr(blob, "read"):
        raise BadArgument(
            f"{type(blob).__name__} is not an exported state", "give bytes, a path or a file opened for reading"
        )
    with _store(machine) as store:
        id = store.import_(blob)
        with machine.held() as record:
            return keeping.restore_from(machine, record, store, id, remembered=False)


@contextlib.contextmanager
def _store(machine: Machine) -> Iterator[Store]:
    """A store that exists for one block."""
    below = machine.home.path / "cache"
    below.mkdir(parents=True, exist_ok=True)
    with owned.folder(PREFIX, below) as folder, Store(folder / "store", home=folder) as store:
        yield store
