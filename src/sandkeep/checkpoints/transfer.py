"""One checkpoint as one self-contained file, written and read as a stream; on import nothing shows before all is verified.

`SANDKEEP EXPORT 1\\n`, then one zstd stream of frames: kind (1 byte), length (4 bytes, big-endian), payload. First the record
(`r`: id, newline, record), then every blob it needs (`b`), last the SHA-256 of all frames before (`e`).
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import BinaryIO

import zstandard

from sandkeep.checkpoints import records
from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.lost import note_parent
from sandkeep.checkpoints.merge import Progress
from sandkeep.checkpoints.needs import needed
from sandkeep.checkpoints.nodes import chunk_count
from sandkeep.checkpoints.plan import MOST
from sandkeep.errors import Corrupt, HostRefused, NotFound, StateConflict, StoreFull, disk_full, system
from sandkeep.owned import whole
from sandkeep.store.repository import Repository

_MAGIC = b"SANDKEEP EXPORT 1\n"
_HEAD = struct.Struct(">cI")
_MOST = 64 << 20  # bytes in a frame
_BATCH = 1024
_REPORT_EVERY = 64
_SLACK = 256 << 20  # bytes of session, history and lists
_ENTRY = 16 << 10  # bytes that describe an entry, on average
_REMEDY = "the file is damaged or cut short: export it again"


def export_checkpoint(repo: Repository, checkpoint: str, to: BinaryIO, progress: Progress | None = None) -> None:
    told = _Told("export", progress)
    record = load_record(repo, checkpoint)
    to.write(_MAGIC)
    total = sha256()
    with zstandard.ZstdCompressor(level=3, threads=2).stream_writer(to, closefd=False) as out:

        def put(kind: bytes, payload: bytes) -> None:
            head = _HEAD.pack(kind, len(payload))
            if kind != b"e":
                total.update(head)
                total.update(payload)
            out.write(head)
            out.write(payload)

        put(b"r", checkpoint.encode() + b"\n" + record.pack())
        for batch in _batches(needed(repo, record, set())):
            for _, data in repo.read_many(batch):
                put(b"b", data)
                told.blob(data)
        put(b"e", total.digest())


def export_to_path(repo: Repository, checkpoint: str, path: Path, progress: Progress | None = None) -> None:
    """The file appears whole, or not at all; what is there and no ordinary file (a pipe, a device) is written to."""
    with _named(path):
        if path.exists() and not path.is_file() and not path.is_dir():
            with open(path, "wb") as file:
                export_checkpoint(repo, checkpoint, file, progress)
            return
        with whole(path) as file:
            export_checkpoint(repo, checkpoint, file, progress)


def import_from_path(repo: Repository, path: Path, progress: Progress | None = None) -> str:
    with system(), open(path, "rb") as file:
        return import_checkpoint(repo, file, progress)


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors about the path that the caller knows, not about the one beside it."""
    try:
        yield
    except OSError as error:
        what = f"the export can't be written: {error.strerror or error}"
        if disk_full(error):
            raise StoreFull(what, "free some space, or name a file on another disk").at(path) from error
        raise HostRefused(what, "name a file in a folder that exists and may be written").at(path) from error


class _Told:
    """Progress in blobs and their bytes."""

    def __init__(self, phase: str, progress: Progress | None) -> None:
        self._phase, self._progress = phase, progress
        self._blobs = self._bytes = 0

    def blob(self, data: bytes) -> bytes:
        self._blobs += 1
        self._bytes += len(data)
        if self._progress is not None and self._blobs % _REPORT_EVERY == 0:
            self._progress(self._phase, self._blobs, self._bytes)
        return data


def import_checkpoint(repo: Repository, file: BinaryIO, progress: Progress | None = None) -> str:
    """Add the file's checkpoint to the store under its own id, and return that; one the store has already is left as it is."""
    if file.read(len(_MAGIC)) != _MAGIC:
        raise Corrupt("this is not an exported checkpoint", "export one with `sandkeep checkpoint export`")
    frames = _frames(file)
    kind, head = next(frames, (b"", b""))
    name, _, packed = head.partition(b"\n")
    checkpoint = name.decode(errors="replace")
    if kind != b"r" or not records.is_id(checkpoint):
        raise Corrupt("the exported checkpoint does not begin with its record", _REMEDY)
    record = records.unpack_record(checkpoint, packed)
    with repo.writer() as writer:
        told = _Told("import", progress)
        carried = {writer.add(told.blob(data)) for data in _within(record, frames)}
        writer.flush()
        for blob in _complete(repo, record):
            if blob not in carried:  # even if the store has it: who can name a blob need not be allowed to read it
                raise Corrupt(f"the exported checkpoint lacks blob {blob.hex()}", _REMEDY)
        try:
            there = repo.get_record(records.KIND, checkpoint)
        except NotFound:
            note_parent(repo, record.parent_id)
            writer.publish(records.KIND, checkpoint, record.pack())
            return checkpoint
    if there != record.pack():
        raise StateConflict(
            f"the store has another checkpoint {checkpoint}", "one of the two was tampered with: compare their hashes"
        )
    return checkpoint


def _within(record: records.Record, frames: Iterator[tuple[bytes, bytes]]) -> Iterator[bytes]:
    """The blobs, as long as they are no more than a checkpoint of so many entries and bytes can need."""
    roots = (record.root, *record.attachments.values())
    entries, size = sum(root.below for root in roots), sum(root.size for root in roots)
    if entries > MOST:
        raise Corrupt(f"the exported checkpoint states {entries} entries", f"at most {MOST} are possible")
    blobs_left, bytes_left = 16 + 3 * entries + 2 * chunk_count(size), _SLACK + _ENTRY * entries + size
    for _, data in frames:
        blobs_left, bytes_left = blobs_left - 1, bytes_left - len(data)
        if min(blobs_left, bytes_left) < 0:
            raise Corrupt("the exported checkpoint holds more than it can need", _REMEDY)
        yield data


def _complete(repo: Repository, record: records.Record) -> Iterator[bytes]:
    try:
        yield from needed(repo, record, set())
    except NotFound as error:
        raise Corrupt(f"the exported checkpoint is not whole: {error.message}", _REMEDY)


def _frames(file: BinaryIO) -> Iterator[tuple[bytes, bytes]]:
    """The frames, the last one checked and not given; raises unless they are whole."""
    total = sha256()
    try:
        with zstandard.ZstdDecompressor(max_window_size=1 << 27).stream_reader(file, closefd=False) as stream:
            while True:
                head = _exactly(stream, _HEAD.size)
                kind, length = _HEAD.unpack(head)
                if length > _MOST:
                    raise Corrupt(f"the exported checkpoint has a frame of {length} bytes", _REMEDY)
                payload = _exactly(stream, length)
                if kind == b"e":
                    if payload != total.digest() or stream.read(1):
                        raise Corrupt("the exported checkpoint's checksum is wrong", _REMEDY)
                    return
                if kind not in b"rb":
                    raise Corrupt(f"the exported checkpoint has a frame of kind {kind!r}", _REMEDY)
                total.update(head)
                total.update(payload)
                yield kind, payload
    except zstandard.ZstdError as error:
        raise Corrupt(f"the exported checkpoint can't be decompressed: {error}", _REMEDY)


def _exactly(stream: zstandard.ZstdDecompressionReader, length: int) -> bytes:
    parts, left = [], length
    while left:
        part = stream.read(left)
        if not part:
            raise Corrupt("the exported checkpoint is cut short", _REMEDY)
        parts.append(part)
        left -= len(part)
    return b"".join(parts)


def _batches(blobs: Iterator[bytes]) -> Iterator[list[bytes]]:
    """Groups of different blobs; one that comes again much later is given again."""
    batch: dict[bytes, None] = {}
    for blob in blobs:
        batch[blob] = None
        if len(batch) >= _BATCH:
            yield list(batch)
            batch = {}
    if batch:
        yield list(batch)
