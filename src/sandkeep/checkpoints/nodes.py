"""The Merkle tree of a checkpoint: one content-addressed node per directory. Owns the format of nodes, nothing else.

A node is msgpack `[1, rows, mtimes, children]`: `rows` is itself packed and holds everything about the entries but their
times; `children` is the node ids of the directories among them. So a directory has two names: its node id, which is
exact, and its digest (SHA-256 of `rows`), which is equal for equal states whenever they were written. A directory of
many entries is `[2, parts]`: its rows are cut where the hash of a name says so, which depends on the names and their number.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from typing import Any, NamedTuple

import msgpack

from sandkeep.errors import Corrupt

FILE, DIR, SYMLINK, FIFO, WHITEOUT = range(5)
KINDS = ("file", "dir", "symlink", "fifo", "whiteout")
CHUNK = 256 << 10  # files are cut on a fixed grid: pages changed in place stay where they are
INLINE = 64  # shorter contents live in the row
DIRECT = 64  # files of more chunks name segments (lists of chunk ids) instead of chunks
SEGMENT = 1024  # chunk ids in a segment
HOLE = bytes(32)  # stands for a chunk, or a segment, of zeros

_SPLIT_ABOVE = 64
_MAX_SIZE = 1 << 60

Read = Callable[[bytes], bytes]
Add = Callable[[bytes], bytes]


class Entry(NamedTuple):
    """One name in a directory. The first ten fields are its row; the last two are kept beside the rows."""

    name: bytes
    kind: int
    mode: int = 0
    uid: int = 0
    gid: int = 0
    xattrs: tuple[tuple[bytes, bytes], ...] | None = None
    size: int = 0  # of a file; of a directory: the bytes of all files below
    data: bytes = b""  # a file's contents, chunk ids or segment ids; a symlink's target; a directory's digest
    flag: bool = False  # a sparse file; an opaque directory (hides the base's)
    below: int = 0  # entries below a directory, whiteouts included
    mtime: int = 0
    node: bytes = b""


_ROW = 10
_NUMBERS = (int, int, int, int, int, bool, int, int)


class Node(NamedTuple):
    """A directory as stored: where, what it is equal to, and what is below."""

    id: bytes
    digest: bytes
    size: int
    below: int


def describes(blob: bytes) -> bool:
    """Whether it looks like a node. A wrong guess costs nothing but the place it gets in a pack."""
    return blob[:2] in (b"\x94\x01", b"\x92\x02")


def chunk_count(size: int) -> int:
    return -(-size // CHUNK)


def store(entries: list[Entry], add: Add) -> Node:
    """Write a directory's entries, sorted by name."""
    size = sum(e.size for e in entries)
    below = len(entries) + sum(e.below for e in entries)
    if len(entries) <= _SPLIT_ABOVE:
        return Node(*_store_leaf(entries, add), size, below)
    parts = [(part[0].name, *_store_leaf(part, add)) for part in _cut(entries)]
    digest = sha256(b"".join(part[2] for part in parts)).digest()
    return Node(add(msgpack.packb([2, parts])), digest, size, below)


def _store_leaf(entries: list[Entry], add: Add) -> tuple[bytes, bytes]:
    rows = msgpack.packb([e[:_ROW] for e in entries])
    packed = msgpack.packb([1, rows, [e.mtime for e in entries], b"".join(e.node for e in entries)])
    return add(packed), sha256(rows).digest()


def _cut(entries: list[Entry]) -> Iterable[list[Entry]]:
    """About as many parts as entries in a part: what one change writes anew is the list of parts and one of them."""
    mask = (1 << len(entries).bit_length() // 2) - 1
    part: list[Entry] = []
    for entry in entries:
        if part and zlib.crc32(entry.name) & mask == 0:
            yield part
            part = []
        part.append(entry)
    yield part


def load(folder: Entry, read: Read) -> list[Entry]:
    """A directory's entries, checked: whatever a store holds, what comes out is a well-formed directory."""
    node = folder.node
    try:
        tag, *rest = msgpack.unpackb(read(node), use_list=False)
        if tag == 1:
            entries = _leaf(rest, folder.data)
        elif tag == 2:
            entries = _parts(rest, folder.data, read)
        else:
            raise ValueError(f"unknown kind of node {tag!r}")
        previous, size, below = b"", 0, len(entries)
        for entry in entries:
            _check(entry)
            if entry.name <= previous:
                raise ValueError(f"name {entry.name!r} is out of order or twice")
            previous = entry.name
            size += entry.size
            below += entry.below
        if (size, below) != (folder.size, folder.below):
            raise ValueError("what it holds does not add up to what its parent says")
    except (ValueError, TypeError, IndexError, msgpack.UnpackException) as error:
        raise Corrupt(
            f"directory node {node.hex()} is malformed: {error}", "run verify to see which checkpoints suffer"
        )
    return entries


def _leaf(rest: list[Any], digest: bytes) -> list[Entry]:
    rows, mtimes, children = rest
    if sha256(rows).digest() != digest:
        raise ValueError("its rows are not those its parent names")
    found = msgpack.unpackb(rows, use_list=False)
    if len(found) != len(mtimes):
        raise ValueError("rows and times differ in number")
    entries, at = [], 0
    for row, mtime in zip(found, mtimes, strict=True):
        if len(row) != _ROW:
            raise ValueError("a row has a wrong number of fields")
        child = b""
        if row[1] == DIR:
            child = children[at : at + 32]
            at += 32
        entries.append(Entry._make((*row, mtime, child)))
    if at != len(children):
        raise ValueError("directories and child nodes differ in number")
    return entries


def _parts(rest: list[Any], digest: bytes, read: Read) -> list[Entry]:
    (parts,) = rest
    if sha256(b"".join(part[2] for part in parts)).digest() != digest:
        raise ValueError("its parts are not those its parent names")
    entries: list[Entry] = []
    for first, node, part_digest in parts:
        tag, *leaf = msgpack.unpackb(read(_id(node)), use_list=False)
        if tag != 1:
            raise ValueError("a part is not a leaf")
        found = _leaf(leaf, part_digest)
        if not found or found[0].name != first:
            raise ValueError("a part does not begin where it should")
        entries += found
    return entries


def _id(value: Any) -> bytes:
    if not isinstance(value, bytes) or len(value) != 32:
        raise ValueError("not a blob id")
    return value


def _check(e: Entry) -> None:
    name, kind, mode, uid, gid, xattrs, size, data, flag, below, mtime, node = e
    if type(name) is not bytes or not 0 < len(name) <= 255 or name in (b".", b"..") or b"/" in name or b"\0" in name:
        raise ValueError(f"bad name {name!r}")
    kinds = (type(kind), type(mode), type(uid), type(gid), type(size), type(flag), type(below), type(mtime))
    if kinds != _NUMBERS:
        raise ValueError(f"bad numbers at {name!r}")
    if not (
        0 <= kind <= WHITEOUT
        and 0 <= mode <= 0o7777
        and 0 <= uid < 1 << 32
        and 0 <= gid < 1 << 32
        and 0 <= size <= _MAX_SIZE
        and below >= 0
        and -(1 << 63) <= mtime < 1 << 63
    ):
        raise ValueError(f"numbers out of range at {name!r}")
    if not isinstance(data, bytes) or (xattrs is not None and not _good_xattrs(xattrs)):
        raise ValueError(f"bad contents at {name!r}")
    if kind == FILE:
        good = len(data) == data_length(size)
    elif kind == DIR:
        good = len(data) == 32 and len(node) == 32
    elif kind == SYMLINK:
        good = 0 < len(data) <= 4096 and b"\0" not in data
    else:
        good = not data
    if not good or (kind != DIR and below) or (kind > DIR and (flag or size)):
        raise ValueError(f"contents do not fit the kind at {name!r}")


def data_length(size: int) -> int:
    """How long a file row's `data` must be."""
    if size <= INLINE:
        return size
    chunks = chunk_count(size)
    return 32 * (chunks if chunks <= DIRECT else -(-chunks // SEGMENT))


def _good_xattrs(xattrs: Any) -> bool:
    return isinstance(xattrs, tuple) and all(
        isinstance(pair, tuple)
        and len(pair) == 2
        and isinstance(pair[0], bytes)
        and isinstance(pair[1], bytes)
        and b"\0" not in pair[0]
        and pair[0]
        for pair in xattrs
    )


def split_ids(data: bytes) -> list[bytes]:
    return [data[at : at + 32] for at in range(0, len(data), 32)]


def chunk_ids(entry: Entry, read: Read, first: int = 0, last: int | None = None) -> list[bytes]:
    """The ids of a file's chunks [first, last); only the segments they lie in are read."""
    total = chunk_count(entry.size)
    last = total if last is None else min(last, total)
    if entry.size <= INLINE:
        return []
    if total <= DIRECT:
        return split_ids(entry.data)[first:last]
    ids: list[bytes] = []
    for number in range(first // SEGMENT, -(-last // SEGMENT)):
        segment = entry.data[32 * number : 32 * number + 32]
        low, high = number * SEGMENT, min((number + 1) * SEGMENT, total)
        packed = bytes(32 * (high - low)) if segment == HOLE else read(segment)
        if len(packed) != 32 * (high - low):
            raise Corrupt(
                f"chunk list {segment.hex()} has a wrong length", "run verify to see which checkpoints suffer"
            )
        ids += split_ids(packed)[max(first - low, 0) : last - low]
    return ids


def data_chunks(entry: Entry, read: Read) -> Iterator[tuple[int, bytes]]:
    """(number, id) of a file's chunks that are not holes, without ever holding a list of all."""
    total = chunk_count(entry.size)
    if entry.size <= INLINE:
        return
    step = total if total <= DIRECT else SEGMENT
    for first in range(0, total, step):
        if total > DIRECT and entry.data[32 * (first // SEGMENT) : 32 * (first // SEGMENT) + 32] == HOLE:
            continue
        for number, blob in enumerate(chunk_ids(entry, read, first, first + step), first):
            if blob != HOLE:
                yield number, blob


def segment_ids(entry: Entry) -> list[bytes]:
    """The chunk-list blobs of a large file."""
    if entry.kind != FILE or chunk_count(entry.size) <= DIRECT:
        return []
    return [segment for segment in split_ids(entry.data) if segment != HOLE]
