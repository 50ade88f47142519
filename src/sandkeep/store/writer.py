"""The writer: blobs in, packs and an index object out, and records only after those are durable.

Small blobs are grouped in blocks and compressed together, large ones are blocks of their own. Compression and uploads run
in threads (zstd, CRC and I/O release the GIL); what waits in memory is bounded.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from itertools import pairwise
from types import TracebackType
from typing import Any, TypeVar

from sandkeep.errors import BadArgument, StateConflict
from sandkeep.store.format import (
    MAX_BLOB,
    PACK,
    Block,
    PackIndex,
    compress,
    crc32,
    index_object,
    new_index_name,
    pack_footer,
    record_name,
    seal,
    sha256,
    unique,
)
from sandkeep.store.index import Index
from sandkeep.store.lease import Lease
from sandkeep.store.objects import Objects, check_name

T = TypeVar("T")
Add = Callable[[bytes], bytes]

BIG = 128 << 10  # a blob from this size on is a block of its own
GROUP = 512 << 10  # raw bytes of a block of small blobs
PACK_SIZE = 16 << 20
WAITING = 12 << 20  # raw bytes between `add` and the pack
LATER = 256  # works that wait for a thread
UPLOADS = 2  # packs on their way at once
THOROUGH = 2 << 20  # the first bytes of a writer are compressed harder: most writers have no more
SAMPLES = 8  # pages looked at to see whether a large block is worth compressing


class _Group:
    """Blobs that wait for their block."""

    __slots__ = ("ids", "parts", "size")

    def __init__(self) -> None:
        self.ids: list[bytes] = []
        self.parts: list[bytes] = []
        self.size = 0


class _Pack:
    """A pack being filled."""

    def __init__(self) -> None:
        self.parts: list[bytes | memoryview] = [PACK]
        self.size = len(PACK)
        self.soon = True  # it may be read again soon
        self.blocks: list[Block] = []
        self.ids: list[bytes] = []
        self.lengths = array("I")


class Writer:
    """Use as a context manager. Not for several threads at once."""

    def __init__(
        self, objects: Objects, index: Index, duration: float, *, lease: Lease | None = None, dedup: bool = True
    ) -> None:
        self.new_blobs = 0
        self.new_bytes = 0  # stored bytes handed to the backend
        self.raw_bytes = 0  # of the new blobs, before compression
        self._objects, self._index, self._dedup = objects, index, dedup
        self._lease = lease or Lease(objects, "writer", duration)
        self._own_lease = lease is None
        self._seen: set[bytes] = set()
        self._groups = (_Group(), _Group())
        self._lock = threading.Lock()  # of the pack being filled, and of the packs done
        self._pack = _Pack()
        self._done: list[PackIndex] = []
        self._jobs: list[Future[Any]] = []
        self._waiting = 0
        self._room = threading.Condition()
        self._failed: BaseException | None = None
        self._upload_slots = threading.BoundedSemaphore(UPLOADS)
        self._later_slots = threading.BoundedSemaphore(LATER)

    def __enter__(self) -> Writer:
        if self._own_lease:
            self._lease.begin()
        try:
            self._index.sync(marks=self._lease.marks if self._own_lease else None)
        except BaseException:
            self._end()
            raise
        self._compressors = ThreadPoolExecutor(2, "compress")
        self._workers = ThreadPoolExecutor(2, "work")
        self._uploaders = ThreadPoolExecutor(UPLOADS, "upload")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing is flushed here: what was not flushed and published was not wanted."""
        self._workers.shutdown(cancel_futures=True)
        self._compressors.shutdown(cancel_futures=True)
        self._uploaders.shutdown(cancel_futures=True)
        self._end()

    def _end(self) -> None:
        if self._own_lease:
            self._lease.end()

    def add(self, data: bytes | bytearray | memoryview, meta: bool = False) -> bytes:
        """The blob's id, its SHA-256. It is stored unless the store has it. Blobs with `meta` are grouped apart from the
        others, so that who reads only those fetches only those."""
        blob = sha256(data)
        if blob in self._seen:
            return blob
        size = len(data)
        if size > MAX_BLOB:
            raise BadArgument(f"a blob of {size} bytes is above the limit of {MAX_BLOB}", "cut it into chunks")
        self._seen.add(blob)
        if size >= BIG:
            self._submit([blob], [data if type(data) is bytes else bytes(data)], size)
            return blob
        group = self._groups[meta]
        group.ids.append(blob)
        group.parts.append(data if type(data) is bytes else bytes(data))
        group.size += size
        if group.size >= GROUP:
            self._cut(meta)
        return blob

    def later(self, work: Callable[[Add], T]) -> Future[T]:
        """`work` in a thread, with an `add` of its own that hashes and compresses there and then: for large contents that need
        not pass through the caller's memory."""
        self._later_slots.acquire()
        job = self._workers.submit(self._work, work)
        self._watch(job)
        return job

    def _work(self, work: Callable[[Add], T]) -> T:
        with self._reported():
            try:
                self._check()
                return work(self._add_now)
            finally:
                self._later_slots.release()

    def _add_now(self, data: bytes) -> bytes:
        blob = sha256(data)
        with self._lock:
            if blob in self._seen:
                return blob
            self._seen.add(blob)
            level = self._level()
        if not (self._dedup and self._index.known([blob], self._lease.condemned)):
            self._count(1, len(data))
            self._store([blob], [len(data)], data, level)
        return blob

    def add_pieces(self, data: memoryview, ends: Sequence[int]) -> Future[list[bytes]]:
        """The ids of the pieces of `data` that end there, in order. A thread hashes them and stores those that are new as one block, all
        without a copy where all are new: the buffer must not change until this writer is done."""
        self._take_room(len(data))
        job = self._compressors.submit(self._pieces, data, ends)
        self._watch(job)
        return job

    def _pieces(self, data: memoryview, ends: Sequence[int]) -> list[bytes]:
        with self._reported():
            parts = [data[start:end] for start, end in pairwise([0, *ends])]
            ids = [sha256(part) for part in parts]
            with self._lock:
                new = {blob: part for blob, part in zip(ids, parts, strict=True) if blob not in self._seen}
                self._seen.update(new)
            for blob in self._index.known(list(new), self._lease.condemned) if self._dedup else ():
                del new[blob]
            if new:
                raw = data if len(new) == len(parts) else b"".join(new.values())
                self._count(len(new), len(raw))
                stored = compress(raw, 1) if _shrinks(raw) else raw
                if len(stored) >= len(raw):
                    stored = raw
                self._fill(list(new), list(map(len, new.values())), stored, len(raw), soon=False)
            self._give_room(len(data))
            return ids

    def has(self, blob: bytes) -> bool:
        """Whether `add` of this content would store nothing."""
        return blob in self._seen or bool(self._index.known([blob], self._lease.condemned))

    def _cut(self, meta: bool) -> None:
        group, fresh = self._groups[meta], _Group()
        self._groups = (self._groups[0], fresh) if meta else (fresh, self._groups[1])
        if group.ids:
            self._submit(group.ids, group.parts, group.size)

    def _submit(self, ids: list[bytes], parts: list[bytes], size: int) -> None:
        if self._dedup and (known := self._index.known(ids, self._lease.condemned)):
            kept = [(blob, part) for blob, part in zip(ids, parts, strict=True) if blob not in known]
            if not kept:
                return
            ids, parts = [blob for blob, _ in kept], [part for _, part in kept]
            size = sum(map(len, parts))
        level = self._level()
        self._count(len(ids), size)
        self._take_room(size)
        self._watch(self._compressors.submit(self._compress, ids, parts, size, level))

    def _level(self) -> int:
        return 1 if self.raw_bytes > THOROUGH else 6

    def _count(self, blobs: int, size: int) -> None:
        with self._lock:
            self.new_blobs += blobs
            self.raw_bytes += size

    def _take_room(self, size: int) -> None:
        with self._room:
            while self._waiting > WAITING and not self._failed:
                self._room.wait()
            self._check()
            self._waiting += size

    def _give_room(self, size: int) -> None:
        with self._room:
            self._waiting -= size
            self._room.notify()

    def _watch(self, job: Future[Any]) -> None:
        with self._lock:
            if len(self._jobs) > 256:
                self._jobs = [job for job in self._jobs if not job.done()]
            self._jobs.append(job)

    def _check(self) -> None:
        if self._failed:
            raise self._failed

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """A thread's failure is raised by the next `add` or `flush`."""
        try:
            yield
        except BaseException as error:
            with self._room:
                self._failed = self._failed or error
                self._room.notify_all()
            raise

    def _compress(self, ids: list[bytes], parts: list[bytes], size: int, level: int) -> None:
        with self._reported():
            self._store(ids, list(map(len, parts)), parts[0] if len(parts) == 1 else b"".join(parts), level)
            self._give_room(size)

    def _store(self, ids: list[bytes], lengths: list[int], raw: bytes, level: int) -> None:
        stored = compress(raw, level)
        self._fill(ids, lengths, stored if len(stored) < len(raw) else raw, len(raw))

    def _fill(
        self, ids: list[bytes], lengths: list[int], stored: bytes | memoryview, size: int, soon: bool = True
    ) -> None:
        """A block into the pack; a full pack is sent."""
        crc = crc32(stored)
        full = None
        with self._lock:
            pack = self._pack
            pack.blocks.append(Block(pack.size, len(stored), size, crc, len(ids)))
            pack.parts.append(stored)
            pack.size += len(stored)
            pack.soon = pack.soon and soon
            pack.ids += ids
            pack.lengths.extend(lengths)
            if pack.size >= PACK_SIZE:
                full, self._pack = pack, _Pack()
        if full:
            self._send(full)

    def _send(self, pack: _Pack) -> None:
        self._upload_slots.acquire()
        job = self._uploaders.submit(self._upload, pack)
        with self._lock:
            self._jobs.append(job)

    def _upload(self, pack: _Pack) -> None:
        with self._reported():
            try:
                if self._failed:
                    return
                index = PackIndex(f"packs/{unique()}", pack.blocks, b"".join(pack.ids), pack.lengths)
                footer = pack_footer(index)
                self._lease.check()
                self._objects.put(index.name, *pack.parts, footer, soon=pack.soon)
                with self._lock:
                    self._done.append(index)
                    self.new_bytes += pack.size + len(footer)
            finally:
                self._upload_slots.release()

    def flush(self) -> None:
        """Everything added is durable and found by others when this returns."""
        self._cut(False)
        self._cut(True)
        self._drain()
        if self._pack.blocks:
            full, self._pack = self._pack, _Pack()
            self._send(full)
            self._drain()
        if not self._done:
            return
        name = new_index_name()
        data = index_object(name, self._done)
        self._lease.put(name, data)
        self._index.add(name, self._done)
        self.new_bytes += len(data)
        self._done = []

    def _drain(self) -> None:
        while True:
            with self._lock:
                jobs, self._jobs = self._jobs, []
            if not jobs:
                break
            wait(jobs)
        self._check()

    def publish(self, kind: str, name: str, data: bytes) -> None:
        """Put the record that names what was added. This is the commit point: everything is flushed before."""
        self.flush()
        full = record_name(check_name(kind), check_name(name))
        if self._objects.size(full) is not None:
            raise StateConflict(f"{kind} {name} exists already", "records never change: choose a new name")
        self._lease.put(full, seal(full, data))


def _shrinks(raw: bytes | memoryview) -> bool:
    """Whether compressing is worth its time, by a few pages."""
    step = max(len(raw) // SAMPLES, 4096)
    sample = b"".join(raw[at : at + 4096] for at in range(0, len(raw), step))
    return len(compress(sample, 1)) < len(sample) * 0.95
