"""Folders of plain files kept beside a checkpoint's tree: memory images. Owns how they are cut.

Memory moves by whole pages: one more page in the middle shifts all behind it, which a fixed grid would store again. So a
file is cut where a page's checksum says so. It is kept as a directory named like the file, whose files are the pieces,
named by their offsets: an ordinary tree for whoever verifies, copies or collects.
"""

from __future__ import annotations

import mmap
import os
import stat
import zlib
from collections.abc import Iterator
from concurrent.futures import Future
from functools import partial
from itertools import chain, pairwise
from pathlib import Path

from sandkeep.checkpoints import nodes
from sandkeep.checkpoints.contents import is_zeros
from sandkeep.checkpoints.nodes import CHUNK, DIR, FILE, HOLE, INLINE, Entry
from sandkeep.errors import BadArgument, Corrupt
from sandkeep.store.repository import Repository
from sandkeep.store.writer import Writer

PAGE = 4096
_LOOK = 256  # bytes of a page that say whether a piece ends there
_CUT = 8 - 1  # one page in eight does: pieces of 32 KiB on average, CHUNK at most
_BLOCK = 1 << 20


def attach(writer: Writer, folder: Path) -> Entry:
    """Store a folder that holds nothing but files. They must not change until the writer is done."""
    add_node = partial(writer.add, meta=True)
    found = []
    with os.scandir(folder) as listing:
        for item in sorted(listing, key=lambda item: os.fsencode(item.name)):
            state = item.stat(follow_symlinks=False)
            if not stat.S_ISREG(state.st_mode):
                raise BadArgument(f"{item.path} is not a plain file", "attach folders of plain files")
            pieces = _pieces(writer, _map(item.path)) if state.st_size else []
            found.append(_folder(os.fsencode(item.name), state, nodes.store(pieces, add_node)))
    return _folder(b"", os.stat(folder), nodes.store(found, add_node))


def _map(path: str) -> memoryview:
    with open(path, "rb", buffering=0) as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _folder(name: bytes, state: os.stat_result, node: nodes.Node) -> Entry:
    mode = stat.S_IMODE(state.st_mode)
    return Entry(
        name, DIR, mode, size=node.size, data=node.digest, below=node.below, mtime=state.st_mtime_ns, node=node.id
    )


def _pieces(writer: Writer, data: memoryview) -> list[Entry]:
    """Neighbours go to the writer together; what is short or zeros goes into the entry itself."""
    spans: list[tuple[int, int]] = []
    held: list[bytes | Future[list[bytes]]] = []  # of each span; a future stands for a run of them
    start, ends = 0, list[int]()

    def hand_over() -> None:
        nonlocal ends
        if ends:
            held.append(writer.add_pieces(data[start : start + ends[-1]], ends))
            ends = []

    for begin, end in pairwise(chain([0], _cuts(data))):
        spans.append((begin, end))
        piece = data[begin:end]
        if end - begin <= INLINE or is_zeros(piece):
            hand_over()
            held.append(bytes(piece) if end - begin <= INLINE else HOLE)
            continue
        if not ends:
            start = begin
        ends.append(end - start)
        if end - start >= _BLOCK:
            hand_over()
    hand_over()
    ids = chain.from_iterable([one] if isinstance(one, bytes) else one.result() for one in held)
    return [
        Entry(b"%016x" % begin, FILE, 0o600, size=end - begin, data=blob)
        for (begin, end), blob in zip(spans, ids, strict=True)
    ]


def _cuts(data: memoryview) -> Iterator[int]:
    """Where the pieces of a file end."""
    begin = 0
    for page in range(0, len(data) - PAGE + 1, PAGE):
        end = page + PAGE
        if zlib.crc32(data[page : page + _LOOK]) & _CUT == 1 or end - begin == CHUNK:
            yield end
            begin = end
    if begin < len(data):
        yield len(data)


def detach(repo: Repository, root: Entry, to: Path) -> int:
    """Write what was attached into the empty folder `to`; the bytes written."""
    total = 0
    for folder in nodes.load(root, repo.read):
        if folder.kind != DIR:
            raise Corrupt(f"attached file {os.fsdecode(folder.name)} is malformed", "run verify")
        path = os.path.join(to, os.fsdecode(folder.name))
        with open(path, "xb", buffering=0) as file:
            _write(repo, folder, file.fileno())
            os.fchmod(file.fileno(), folder.mode & 0o777)
        os.utime(path, ns=(folder.mtime, folder.mtime))
        total += folder.size
    os.chmod(to, root.mode & 0o777)
    os.utime(to, ns=(root.mtime, root.mtime))
    return total


def _write(repo: Repository, folder: Entry, fd: int) -> None:
    places: dict[bytes, list[tuple[int, int]]] = {}
    end = 0
    for piece in nodes.load(folder, repo.read):
        if piece.kind != FILE or piece.name != b"%016x" % end or piece.size > CHUNK:
            raise Corrupt(f"attached file {os.fsdecode(folder.name)} is malformed", "run verify")
        if piece.size <= INLINE:
            os.pwrite(fd, piece.data, end)
        elif piece.data != HOLE:
            places.setdefault(piece.data, []).append((end, piece.size))
        end += piece.size
    os.ftruncate(fd, end)
    for blob, data in repo.read_many(places):
        for offset, size in places[blob]:
            if len(data) != size:
                raise Corrupt(f"attached file {os.fsdecode(folder.name)} is malformed", "run verify")
            os.pwrite(fd, data, offset)
