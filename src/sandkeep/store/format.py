"""The bytes of the store: sealed objects, packs, index objects and names. Pure: no I/O, no state.

docs/design.md, section 7, is the specification.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import struct
import sys
import threading
import time
import zlib
from array import array
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import zstandard

from sandkeep.errors import Corrupt

VERSION = 3
SEAL = b"SKSEAL\x01\n"
PACK = b"SKPACK\x01\n"
MAX_BLOB = 64 << 20
MAX_INDEX = 1 << 30  # bytes of one decompressed index object

_LONG = re.compile(r"[A-Za-z0-9_-]{20,}")
_PACK_NAME = re.compile(r"packs/[0-9a-f]{14}-[0-9a-f]{16}")
_HEAD = struct.Struct("<II")
_BLOCK = struct.Struct("<IIII")
_TRAILER = struct.Struct("<I")
_COUNT = struct.Struct("<I")
_NAME = 15  # bytes of a unique name
_local = threading.local()


def unique() -> str:
    """A name nobody else will pick; later ones sort later as far as clocks agree."""
    return f"{time.time_ns() // 1000:014x}-{secrets.token_hex(8)}"


def record_name(kind: str, name: str) -> str:
    """Where a record lies. For names that begin with a time, as checkpoints' do, a folder is 12 days, 17 minutes or a second."""
    return f"records/{kind}/{_foldered(name, 7, 9, 11) if _LONG.fullmatch(name) else name}"


def new_index_name() -> str:
    """Folders of 19 hours, 4 minutes and a second."""
    return f"index/{_foldered(unique(), 5, 7, 9)}"


def _foldered(name: str, *cuts: int) -> str:
    """In folders by its beginning, so that the last names are found without listing all."""
    return "/".join([*(name[start:end] for start, end in pairwise((0, *cuts))), name])


def sha256(data: bytes | bytearray | memoryview) -> bytes:
    return hashlib.sha256(data).digest()


def compress(data: bytes | memoryview, level: int) -> bytes:
    """Compressors are reused: one for each thread and level."""
    made: dict[int, zstandard.ZstdCompressor] = _local.__dict__.setdefault("compressors", {})
    if level not in made:
        made[level] = zstandard.ZstdCompressor(level=level, write_content_size=True)
    found = made[level].compress(data)
    # The library shrinks a buffer as large as the input; what is held for long must not keep its place among freed ones.
    return memoryview(found).tobytes() if len(found) < len(data) // 2 else found


def decompress(data: bytes | memoryview, size: int | None, limit: int, what: str) -> bytes:
    """Exactly `size` bytes if given, never more than `limit`: what a frame claims is checked before memory is taken."""
    if "decompressor" not in _local.__dict__:
        _local.decompressor = zstandard.ZstdDecompressor()
    try:
        claimed = zstandard.frame_content_size(data)
        if not 0 <= claimed <= limit or (size is not None and claimed != size):
            raise Corrupt(f"{what} claims {claimed} bytes", "run verify", object=what)
        raw: bytes = _local.decompressor.decompress(data, max_output_size=claimed, allow_extra_data=False)
    except (zstandard.ZstdError, MemoryError) as error:
        raise Corrupt(f"{what} does not decompress: {error}", "run verify", object=what) from error
    if len(raw) != claimed:
        raise Corrupt(f"{what} is {len(raw)} bytes, not {claimed}", "run verify", object=what)
    return raw


def seal(name: str, payload: bytes) -> bytes:
    """A small object that shows any change of its bytes, and that it is not another one under a wrong name."""
    return SEAL + _seal_sum(name, payload) + payload


def unseal(name: str, data: bytes) -> bytes:
    payload = data[40:]
    if len(data) < 40 or data[:8] != SEAL or data[8:40] != _seal_sum(name, payload):
        raise Corrupt(f"{name} is damaged: its checksum is wrong", "run verify", object=name)
    return payload


def _seal_sum(name: str, payload: bytes) -> bytes:
    return hashlib.sha256(name.encode() + b"\0" + payload).digest()


@dataclass(frozen=True)
class Block:
    """A run of blobs compressed together; stored as it is when that did not make it smaller."""

    offset: int  # in the pack
    stored: int
    raw: int
    crc: int  # of the stored bytes
    blobs: int


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


@dataclass(frozen=True)
class PackIndex:
    """What one pack holds: its blocks in order, and the ids and lengths of their blobs in order."""

    name: str
    blocks: list[Block]
    ids: bytes
    lengths: array[int]

    def place(self, blob: bytes, number: int) -> Place:
        """Where the blob with this number lies."""
        at = bisect_right(self._firsts, number) - 1
        block, start = self.blocks[at], self._starts[number] - self._starts[self._firsts[at]]
        return Place(blob, self.name, block.offset, block.stored, block.raw, block.crc, start, self.lengths[number])

    @cached_property
    def _firsts(self) -> list[int]:
        """Of each block the number of its first blob."""
        return list(accumulate((block.blobs for block in self.blocks[:-1]), initial=0))

    @cached_property
    def _starts(self) -> array[int]:
        return array("Q", accumulate(self.lengths, initial=0))

    @property
    def size(self) -> int:
        """Bytes of blocks with the head of the pack, without its footer."""
        return len(PACK) + sum(block.stored for block in self.blocks)

    def encode(self, ids: bool = True) -> bytes:
        head = _HEAD.pack(len(self.blocks), len(self.lengths))
        return b"".join(
            [
                head,
                *(_BLOCK.pack(b.stored, b.raw, b.crc, b.blobs) for b in self.blocks),
                self.ids if ids else b"",
                _little(self.lengths).tobytes(),
            ]
        )

    @staticmethod
    def length(data: bytes, at: int) -> int:
        """Of the one that begins there."""
        blocks, blobs = _HEAD.unpack_from(data, at)
        return int(_HEAD.size + blocks * _BLOCK.size + 36 * blobs)

    @classmethod
    def decode(cls, name: str, data: bytes, ids: bool = True) -> PackIndex:
        width = 32 if ids else 0
        try:
            blocks_count, blobs_count = _HEAD.unpack_from(data)
            ids_at = _HEAD.size + blocks_count * _BLOCK.size
            if len(data) != ids_at + (width + 4) * blobs_count:
                raise ValueError("wrong length")
            lengths = array("I")
            lengths.frombytes(data[ids_at + width * blobs_count :])
            lengths = _little(lengths)
            blocks, offset, at = [], len(PACK), 0
            for stored, raw, crc, blobs in _BLOCK.iter_unpack(data[_HEAD.size : ids_at]):
                if raw > MAX_BLOB or stored > raw or sum(lengths[at : at + blobs]) != raw:
                    raise ValueError("sizes do not add up")
                blocks.append(Block(offset, stored, raw, crc, blobs))
                offset, at = offset + stored, at + blobs
            if at != blobs_count:
                raise ValueError("blobs without a block")
        except (ValueError, struct.error) as error:
            raise Corrupt(f"the index of pack {name} makes no sense: {error}", "run verify", object=name) from error
        return cls(name, blocks, data[ids_at : ids_at + width * blobs_count], lengths)


def _little(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers = array("I", numbers)
        numbers.byteswap()
    return numbers


def is_pack(name: str) -> bool:
    """Whether it is a name that a writer gives a pack: an index can't have others."""
    return _PACK_NAME.fullmatch(name) is not None


def pack_footer(index: PackIndex) -> bytes:
    footer = seal(index.name, compress(index.encode(), 1))
    return footer + _TRAILER.pack(len(footer))


def footer_length(last4: bytes) -> int:
    return int(_TRAILER.unpack(last4)[0])


def read_footer(name: str, footer: bytes) -> PackIndex:
    return PackIndex.decode(name, decompress(unseal(name, footer), None, MAX_INDEX, name))


def index_object(name: str, packs: Iterable[PackIndex]) -> bytes:
    """Names are not compressed, so that how long it is depends on what the packs hold alone."""
    found = list(packs)
    names = b"".join(bytes.fromhex(pack.name.removeprefix("packs/").replace("-", "")) for pack in found)
    return seal(name, _COUNT.pack(len(found)) + names + compress(b"".join(pack.encode() for pack in found), 1))


def read_index_object(name: str, data: bytes) -> list[PackIndex]:
    payload = unseal(name, data)
    found, at = [], 0
    try:
        (count,) = _COUNT.unpack_from(payload)
        names = payload[_COUNT.size : (start := _COUNT.size + count * _NAME)]
        raw = decompress(payload[start:], None, MAX_INDEX, name)
        for number in range(count):
            text = names[number * _NAME : (number + 1) * _NAME].hex()
            end = at + PackIndex.length(raw, at)
            found.append(PackIndex.decode(f"packs/{text[:14]}-{text[14:]}", raw[at:end]))
            at = end
        if at != len(raw) or len(names) != count * _NAME:
            raise ValueError("its parts do not fit")
    except (ValueError, struct.error) as error:
        raise Corrupt(f"{name} makes no sense: {error}", "run verify", object=name) from error
    return found


def unblock(stored: bytes | memoryview, raw: int, what: str) -> bytes | memoryview:
    """A block's bytes from its stored form."""
    return stored if len(stored) == raw else decompress(stored, raw, MAX_BLOB, what)


def crc32(data: bytes | memoryview) -> int:
    return zlib.crc32(data)
