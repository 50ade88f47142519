"""What the tests of agents share: a home that leaves nothing, agents in one, and a look into every byte of a store.

(PYTEST_DONT_REWRITE, as in `serving`.)
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import zstandard

from sandkeep.agents import Agent
from sandkeep.errors import SandkeepError
from sandkeep.sandbox import Sandbox
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc

PACKAGES = Path(__file__).resolve().parent.parent / ".build" / "agents"
_MAGIC = zstandard.FRAME_HEADER
SECRET = "correct-horse-battery-staple"
MakeAgent = Callable[..., Agent]


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


@pytest.fixture
def make_agent(home: Path, tmp_path: Path) -> MakeAgent:
    """Agents in that home, with a store beside it."""

    def make(type: str = "shell", **options: Any) -> Agent:
        return Agent(type, **{"home": home, "storage": str(tmp_path / "store"), **options})

    return make


def in_background(act: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    got: list[Any] = []

    def run() -> None:
        try:
            got.append(act())
        except SandkeepError as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got
