"""What clients without a bucket keep here: rows in the database say what there is, the bytes are objects in the server's store.

Stored: a row without a name, the bytes, the name. Removed: the name, the bytes, the row. So a server that dies in between leaves
bytes that a row still names, and `forever` removes them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import mmap
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import IO

from sandkeep.errors import Corrupt, NotFound, SandkeepError, TooLarge
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.problems import Damaged
from sandkeep.server.spaces import Spaces
from sandkeep.sessions import Database, Scope, Storage, Stored
from sandkeep.store.objects import Objects, check_name, check_prefix

LARGEST = 256 << 20
_PIECE = 1 << 20
_LAPSED = 3600.0  # far longer than an object of the largest size takes to be stored
_EVERY = 300.0
_log = logging.getLogger(__name__)


class Gateway:
    def __init__(self, database: Database, spaces: Spaces, quota: int) -> None:
        self._db = database
        self._spaces = spaces
        self._rows = Storage(database, quota)

    async def put(self, scope: Scope, name: str, body: AsyncIterator[bytes], sha256: str) -> None:
        check_name(name)
        with tempfile.TemporaryFile(dir=self._spaces.home, buffering=0) as file:
            size = await _received(body, file, name, sha256.lower())
            place = await self._db.call(self._rows.arrive, scope, name, size, sha256.lower())
            try:
                await blocking(_copy, file, size, await self._objects(scope), place)
                left = await self._db.call(self._rows.publish, scope, name, place)
            except SandkeepError:
                await self._remove(scope, [place])
                raise
        await self._remove(scope, left)

    async def get(self, scope: Scope, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """A whole object is checked against its SHA-256. A part can't be: who reads parts checks what is in them."""
        row = await self._row(scope, name)
        while True:
            end = row.size if length is None else offset + length
            if not offset <= end <= row.size:
                raise Corrupt(f"{name} ends at {row.size} bytes, {end} were expected", "run verify", object=name)
            try:
                data: bytes = await blocking((await self._objects(scope)).get, row.place, offset, end - offset)
                break
            except NotFound:
                again = await self._row(scope, name)
                if again.place == row.place:
                    raise Corrupt(f"the bytes of {name} are gone", "see the server's store", object=name) from None
                row = again
        if len(data) == row.size and (await blocking(hashlib.sha256, data)).hexdigest() != row.sha256:
            raise Corrupt(f"{name} is not what was stored", "see the server's store", object=name)
        return data

    async def size(self, scope: Scope, name: str) -> int:
        return (await self._row(scope, name)).size

    async def list(self, scope: Scope, prefix: str, after: str, limit: int) -> list[tuple[str, int, float]]:
        return await self._db.call(self._rows.list, scope, check_prefix(prefix), after, limit)

    async def delete(self, scope: Scope, names: Sequence[str]) -> None:
        wanted = [check_name(name) for name in names]
        await self._remove(scope, await self._db.call(self._rows.withdraw, scope, wanted))

    async def forever(self) -> None:
        while True:
            try:
                await self.sweep(_LAPSED)
            except SandkeepError as error:
                _log.warning("removing what was left under /storage failed, will be tried again: %s", error)
            await asyncio.sleep(_EVERY)

    async def sweep(self, seconds: float) -> None:
        """Remove what was left arriving or leaving that long ago."""
        left: dict[Scope, list[str]] = defaultdict(list)
        for row in await self._db.call(self._rows.lapsed, seconds):
            left[Scope(row.owner, row.project or None)].append(row.place)
        for scope, places in left.items():
            await self._remove(scope, places)

    async def _remove(self, scope: Scope, places: Sequence[str]) -> None:
        """Nobody sees them any more, so a failure is not the caller's: they are tried again later."""
        if not places:
            return
        try:
            await blocking((await self._objects(scope)).delete, places)
            await self._db.call(self._rows.gone, places)
        except SandkeepError as error:
            _log.warning("%d objects under /storage were not removed, will be tried again: %s", len(places), error)

    async def _row(self, scope: Scope, name: str) -> Stored:
        row = await self._db.call(self._rows.find, scope, check_name(name))
        if row is None:
            raise NotFound(f"{name} is not in the store")
        return row

    async def _objects(self, scope: Scope) -> Objects:
        return await blocking(self._spaces.objects, scope.user, scope.project)


async def _received(body: AsyncIterator[bytes], file: IO[bytes], name: str, sha256: str) -> int:
    """The whole body, on disk and not in memory: a slow client costs no more than a quick one."""
    digest, size, held = hashlib.sha256(), 0, bytearray()
    async for piece in body:
        digest.update(piece)
        held += piece
        size += len(piece)
        if size > LARGEST:
            raise TooLarge(f"an object may have at most {LARGEST} bytes", "send smaller ones")
        if len(held) >= _PIECE:
            await blocking(_write, file, held)
            held = bytearray()
    await blocking(_write, file, held)
    if digest.hexdigest() != sha256:
        raise Damaged(f"{name} did not arrive as it was sent", "send it again")
    return size


def _write(file: IO[bytes], data: bytearray) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


def _copy(file: IO[bytes], size: int, objects: Objects, place: str) -> None:
    if not size:
        objects.put(place, b"")
        return
    with mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
        objects.put(place, view)
