"""Packs made of blobs that other packs hold. For the same blobs always the same packs: what a collector will write can be told
before, without writing it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

from sandkeep.errors import NotFound
from sandkeep.store.format import PACK, Block, PackIndex, Place, compress, crc32, pack_footer, unique
from sandkeep.store.writer import BIG, GROUP, PACK_SIZE

if TYPE_CHECKING:
    from sandkeep.store.repository import Repository

LEVEL = 6  # what is packed again is small, and was kept for a while

Describes = Callable[
    [bytes], bool
]  # of a blob's content: whether it describes, and is grouped apart from what contains
Send = Callable[
    [PackIndex, Sequence[bytes]], None
]  # the last part is the footer; when nothing is written, the only one


class _Group:
    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.parts: list[bytes] = []
        self.size = 0


class Packer:
    """Hands full packs to `send`."""

    def __init__(self, send: Send, describes: Describes) -> None:
        self._send, self._describes = send, describes
        self._seen: set[bytes] = set()
        self._groups = {False: _Group(), True: _Group()}
        self._renew()

    def _renew(self) -> None:
        self._blocks: list[Block] = []
        self._ids: list[bytes] = []
        self._lengths = array("I")
        self._parts: list[bytes] = [PACK]
        self._size = len(PACK)

    def add(self, blob: bytes, data: bytes) -> None:
        """One of several in a block: it gets a new block with others."""
        if blob in self._seen:
            return
        self._seen.add(blob)
        group = self._groups[describes := self._describes(data)]
        group.ids.append(blob)
        group.parts.append(data)
        group.size += len(data)
        if group.size >= GROUP:
            self._cut(describes)

    def copy(self, places: list[Place], block: bytes | None) -> bool:
        """A block as it is; None: its bytes are not wanted. Not if some of its blobs are here already."""
        ids = [place.id for place in places]
        if not self._seen.isdisjoint(ids):
            return False
        self._seen.update(ids)
        first = places[0]
        self._fill(ids, [place.length for place in places], first.stored, first.raw, first.crc, block)
        return True

    def end(self) -> None:
        self._cut(False)
        self._cut(True)
        if self._blocks:
            self._close()

    def _cut(self, describes: bool) -> None:
        group, self._groups[describes] = self._groups[describes], _Group()
        if group.ids:
            raw = b"".join(group.parts)
            stored = compress(raw, LEVEL)
            if len(stored) >= len(raw):
                stored = raw
            self._fill(group.ids, list(map(len, group.parts)), len(stored), len(raw), crc32(stored), stored)

    def _fill(self, ids: list[bytes], lengths: list[int], size: int, raw: int, crc: int, stored: bytes | None) -> None:
        self._blocks.append(Block(self._size, size, raw, crc, len(ids)))
        self._ids += ids
        self._lengths.extend(lengths)
        if stored is not None:
            self._parts.append(stored)
        self._size += size
        if self._size >= PACK_SIZE:
            self._close()

    def _close(self) -> None:
        index = PackIndex(f"packs/{unique()}", self._blocks, b"".join(self._ids), self._lengths)
        self._send(index, [*self._parts, pack_footer(index)])
        self._renew()


def pack_again(repo: Repository, ids: list[bytes], packer: Packer, read: bool) -> None:
    """Put these blobs into new packs: large blocks as they are, if all they hold is wanted. Unless `read`, those are only
    counted. Raises if one of the blobs can't be read."""
    places: dict[bytes, Place] = {}
    for place in repo.index.places(ids):
        places.setdefault(place.id, place)
    if len(places) < len(ids):
        raise NotFound("a blob is no longer where it was", "run gc again")
    in_order = sorted(places.values(), key=lambda place: (place.pack, place.offset, place.start))
    blocks = [list(group) for _, group in groupby(in_order, key=lambda place: (place.pack, place.offset))]
    whole = {block[0].id for block in blocks if sum(p.length for p in block) == block[0].raw >= BIG}
    copied = {place.id for block in blocks if block[0].id in whole for place in block}
    shared = dict(repo.read_many([blob for blob in places if blob not in copied]))
    stored = dict(_as_stored(repo, copied)) if read else dict.fromkeys(whole)
    for block in blocks:
        first, members = block[0].id, [place.id for place in block]
        if first in whole and not (first in stored and packer.copy(block, stored[first])):
            shared |= dict(repo.read_many(members))
        for blob in members if members[0] in shared else ():
            packer.add(blob, shared.pop(blob))


def _as_stored(repo: Repository, blobs: set[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """The blocks, by their first blob, of which all of these blobs are right."""
    for run in repo.stored(sorted(blobs)):
        right = {blob for blob, _ in run.blobs()}
        for offset, group in groupby(run.places, key=lambda place: place.offset):
            block, at = list(group), offset - run.places[0].offset
            data = run.data[at : at + block[0].stored]
            if crc32(data) == block[0].crc and all(place.id in right for place in block):
                yield block[0].id, data
