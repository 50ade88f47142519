"""The reader: blobs by id, each checked against its SHA-256, blocks fetched in runs and decompressed once."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import TypeVar

from sandkeep.errors import Corrupt, NotFound
from sandkeep.store.format import Place, unblock
from sandkeep.store.index import Index
from sandkeep.store.looking import again
from sandkeep.store.objects import Objects
from sandkeep.store.stored import Stored, cut

T = TypeVar("T")

WINDOW = 65_536  # ids whose places are held at once
RUN = 2 << 20  # stored bytes fetched at once
RUN_RAW = 4 << 20
GAP = 64 << 10  # unwanted bytes read rather than asked around
CACHED = 16 << 20  # raw bytes of blocks kept for single reads


class Reader:
    def __init__(self, objects: Objects, index: Index) -> None:
        self._objects, self._index = objects, index
        self._blocks: OrderedDict[tuple[str, int], bytes | memoryview] = OrderedDict()
        self._held = 0
        self._mutex = threading.Lock()
        self._rebuilt = False

    def read(self, blob: bytes) -> bytes:
        for look in range(3):
            self._look_again(look)
            for place in self._index.places([blob]):
                try:
                    return cut(self._block(place), place)
                except (Corrupt, NotFound):
                    self._drop(place)
                    break
        return self._recover(blob)

    def _drop(self, place: Place) -> None:
        """A block that came damaged does not stay."""
        with self._mutex:
            if (raw := self._blocks.pop((place.pack, place.offset), None)) is not None:
                self._held -= len(raw)

    def _look_again(self, look: int) -> None:
        """What is not where the cache says may have moved: look at the store's newest index objects, then at all."""
        if look:
            self._index.sync(full=look == 2)

    def _block(self, place: Place) -> bytes | memoryview:
        key = (place.pack, place.offset)
        with self._mutex:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
        raw = unblock(self._objects.get(place.pack, place.offset, place.stored), place.raw, place.pack)
        with self._mutex:
            if key not in self._blocks and len(raw) <= CACHED // 4:
                self._blocks[key] = raw
                self._held += len(raw)
                while self._held > CACHED:
                    self._held -= len(self._blocks.popitem(last=False)[1])
        return raw

    def _recover(self, blob: bytes) -> bytes:
        """The slow road: try every copy, then with a rebuilt cache, and say what is wrong."""
        damage: Corrupt | None = None
        for attempt in range(2):
            for place in list(self._index.places([blob])):
                try:
                    return again(lambda place=place: self._fetched(place))  # type: ignore[misc]
                except NotFound:
                    damage = Corrupt(
                        f"pack {place.pack} is missing: blob {blob.hex()} is lost", "run verify", object=place.pack
                    )
                except Corrupt as error:
                    damage = error
            if attempt or self._rebuilt:
                break
            self._rebuilt = True
            self._index.rebuild()
        if damage:
            raise damage
        if bad := self._index.bad():
            raise Corrupt(
                f"blob {blob.hex()} is not found, and index object {bad[0]} is damaged",
                "run gc, which mends the index",
                object=bad[0],
            )
        raise NotFound(f"blob {blob.hex()} is not in the store")

    def _fetched(self, place: Place) -> bytes:
        return cut(unblock(self._objects.get(place.pack, place.offset, place.stored), place.raw, place.pack), place)

    def read_many(self, blobs: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for ids in _windows(blobs):
            missing = dict.fromkeys(ids)
            for look in range(3):
                self._look_again(look)
                for found in self._ahead(lambda run: list(self._stored(run).blobs()), list(missing)):
                    for blob, data in found:
                        del missing[blob]
                        yield blob, data
                if not missing:
                    break
            for blob in missing:
                yield blob, self._recover(blob)

    def stored(self, blobs: Iterable[bytes]) -> Iterator[Stored]:
        """What holds these blobs, unopened and unchecked. Those it does not come with are for `read_many`."""
        for ids in _windows(blobs):
            yield from self._ahead(self._stored, ids)

    def _ahead(self, work: Callable[[list[Place]], T], ids: list[bytes]) -> Iterator[T]:
        """`work` on every run that holds some of these blobs, in threads, a few runs ahead."""
        places: dict[bytes, Place] = {}
        for place in self._index.places(ids):
            places.setdefault(place.id, place)
        runs = _runs(sorted(places.values(), key=lambda place: (place.pack, place.offset, place.start)))
        waiting: deque[Future[T]] = deque()
        pool = ThreadPoolExecutor(self._objects.parallel, "read")
        try:
            for run in islice(runs, self._objects.parallel + 1):
                waiting.append(pool.submit(work, run))
            while waiting:
                done = waiting.popleft().result()
                for run in islice(runs, 1):
                    waiting.append(pool.submit(work, run))
                yield done
        finally:
            pool.shutdown(cancel_futures=True)

    def _stored(self, run: list[Place]) -> Stored:
        start, end = run[0].offset, run[-1].offset + run[-1].stored
        try:
            return Stored(run, self._objects.get(run[0].pack, start, end - start))
        except (Corrupt, NotFound):
            return Stored([], b"")


def _windows(blobs: Iterable[bytes]) -> Iterator[list[bytes]]:
    source = iter(blobs)
    while ids := list(dict.fromkeys(islice(source, WINDOW))):
        yield ids


def _runs(places: list[Place]) -> Iterator[list[Place]]:
    """Neighbours in one pack, to be fetched by one ranged read."""
    run: list[Place] = []
    raw = 0
    for place in places:
        if run:
            last = run[-1]
            same = place.pack == last.pack and place.offset == last.offset
            near = place.pack == last.pack and place.offset - last.offset - last.stored <= GAP
            if not same and (
                not near or place.offset + place.stored - run[0].offset > RUN or raw + place.raw > RUN_RAW
            ):
                yield run
                run, raw = [], 0
            elif same:
                raw -= place.raw
        run.append(place)
        raw += place.raw
    if run:
        yield run
