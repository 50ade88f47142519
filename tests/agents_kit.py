"""What the tests of agents share: a home that leaves nothing, and a look into every byte of a store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import zstandard

from sandkeep.sandbox import Sandbox
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc

PACKAGES = Path(__file__).resolve().parent.parent / ".build" / "agents"
_MAGIC = zstandard.FRAME_HEADER


@contextmanager
def home_at(path: Path) -> Iterator[Path]:
    """A home; its sandboxes are killed and its layers dropped at the end."""
    try:
        yield path
    finally:
        for info in Sandbox.list(home=path):
            Sandbox.attach(info.id, home=path).kill()
        gc(Home(path), cache=True)


def contents(folder: Path) -> Iterator[bytes]:
    """Every file below, raw, and whatever is compressed in it, plain."""
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.is_symlink():
            continue
        data = path.read_bytes()
        yield data
        at = data.find(_MAGIC)
        while at >= 0:
            try:
                plain = zstandard.ZstdDecompressor().decompressobj()
                yield plain.decompress(data[at:])
                taken = len(data) - at - len(plain.unused_data)
            except zstandard.ZstdError:
                taken = 1
            at = data.find(_MAGIC, at + max(taken, 1))


def holds(folder: Path, *words: bytes) -> bool:
    return any(word in piece for piece in contents(folder) for word in words)
