"""The reader: blobs by id, each checked against its SHA-256, blocks fetched in runs and decompressed once."""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby, islice

from sandkeep.errors import Corrupt, NotFound
from sandkeep.store.format import sha256, unblock
from sandkeep.store.index import Index, Place
from sandkeep.store.objects import Objects

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
                    return _cut(self._block(place), place)
                except (Corrupt, NotFound):
                    break
        return self._recover(blob)

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
                    return _cut(
                        unblock(self._objects.get(place.pack, place.offset, place.stored), place.raw, place.pack), place
                    )
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

    def read_many(self, blobs: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        source = iter(blobs)
        while ids := list(dict.fromkeys(islice(source, WINDOW))):
            yield from self._window(ids)

    def _window(self, ids: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        for look in range(3):
            self._look_again(look)
            places: dict[bytes, Place] = {}
            for place in self._index.places(ids):
                places.setdefault(place.id, place)
            lost = [blob for blob in ids if blob not in places]
            yield from self._fetch(
                _runs(sorted(places.values(), key=lambda place: (place.pack, place.offset, place.start))), lost
            )
            if not lost:
                return
            ids = lost
        for blob in ids:
            yield blob, self._recover(blob)

    def _fetch(self, runs: Iterator[list[Place]], lost: list[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """Blobs of these runs, several runs at once; ids of those that were not right are added to `lost`."""
        waiting: deque[Future[tuple[list[tuple[bytes, bytes]], list[bytes]]]] = deque()
        pool = ThreadPoolExecutor(self._objects.parallel, "read")
        try:
            for run in islice(runs, self._objects.parallel + 1):
                waiting.append(pool.submit(self._run, run))
            while waiting:
                found, bad = waiting.popleft().result()
                lost += bad
                for run in islice(runs, 1):
                    waiting.append(pool.submit(self._run, run))
                yield from found
        finally:
            pool.shutdown(cancel_futures=True)

    def _run(self, run: list[Place]) -> tuple[list[tuple[bytes, bytes]], list[bytes]]:
        """The blobs of one run, and the ids of those that are not right."""
        start, end = run[0].offset, run[-1].offset + run[-1].stored
        found: list[tuple[bytes, bytes]] = []
        try:
            data = memoryview(self._objects.get(run[0].pack, start, end - start))
        except (Corrupt, NotFound):
            return found, [place.id for place in run]
        bad: list[bytes] = []
        for offset, group in groupby(run, key=lambda place: place.offset):
            members = list(group)
            first = members[0]
            try:
                raw = unblock(data[offset - start : offset - start + first.stored], first.raw, first.pack)
            except Corrupt:
                bad += [place.id for place in members]
                continue
            for place in members:
                try:
                    found.append((place.id, _cut(raw, place)))
                except Corrupt:
                    bad.append(place.id)
        return found, bad


def _cut(raw: bytes | memoryview, place: Place) -> bytes:
    data = raw if len(raw) == place.length else memoryview(raw)[place.start : place.start + place.length]
    if sha256(data) != place.id:
        raise Corrupt(
            f"blob {place.id.hex()} in {place.pack} is damaged: its SHA-256 is another", "run verify", object=place.pack
        )
    return bytes(data)


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
