"""Looking again: a byte changed on the wire is told from damage at rest, which is there each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from sandkeep.errors import Corrupt
from sandkeep.store.format import PackIndex, read_index_object, unseal
from sandkeep.store.objects import Objects

T = TypeVar("T")

LOOKS = 3


def again(look: Callable[[], T]) -> T:
    """What `look` fetches and finds whole; `Corrupt` if it is damaged each time."""
    for _ in range(LOOKS - 1):
        try:
            return look()
        except Corrupt:
            continue
    return look()


def read_payload(objects: Objects, name: str) -> bytes:
    """Of a sealed object."""
    return again(lambda: unseal(name, objects.get(name)))


def read_index(objects: Objects, name: str) -> list[PackIndex]:
    return again(lambda: read_index_object(name, objects.get(name)))
