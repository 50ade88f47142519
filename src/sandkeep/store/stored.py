"""Blobs as they are stored: where each lies, and how it is had out of the bytes there, checked against its SHA-256."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from sandkeep.errors import Corrupt
from sandkeep.store.format import sha256, unblock


class Place(NamedTuple):
    """Where one copy of a blob lies."""

    id: bytes
    pack: str
    offset: int
    stored: int
    raw: int
    crc: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Stored:
    """Neighbours in one pack, as they are stored there."""

    places: list[Place]
    data: bytes

    def blobs(self) -> Iterator[tuple[bytes, bytes]]:
        """(id, content) of those that are right."""
        data = memoryview(self.data)
        for offset, group in groupby(self.places, key=lambda place: place.offset):
            members = list(group)
            first, at = members[0], offset - self.places[0].offset
            try:
                raw = unblock(data[at : at + first.stored], first.raw, first.pack)
            except Corrupt:
                continue
            for place in members:
                try:
                    yield place.id, cut(raw, place)
                except Corrupt:
                    continue


def cut(raw: bytes | memoryview, place: Place) -> bytes:
    data = raw if len(raw) == place.length else memoryview(raw)[place.start : place.start + place.length]
    if sha256(data) != place.id:
        raise Corrupt(
            f"blob {place.id.hex()} in {place.pack} is damaged: its SHA-256 is another", "run verify", object=place.pack
        )
    return bytes(data)
