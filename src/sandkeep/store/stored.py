"""Blobs out of the bytes that a store holds, checked against their SHA-256."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from sandkeep.errors import Corrupt
from sandkeep.store.format import Place, sha256, unblock


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
