"""The repository: blobs, packs, index and records over one object storage. What the rest of Sandkeep uses of the store.

It knows nothing of sandboxes or file trees. docs/design.md, section 7, is the specification.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from sandkeep.errors import Corrupt, NotFound, StateConflict, StoreMissing, Unsupported
from sandkeep.store.format import VERSION, record_name, seal, sha256
from sandkeep.store.index import Index
from sandkeep.store.lease import LEASE, put_sealed, read_sealed
from sandkeep.store.objects import Objects, check_name
from sandkeep.store.reader import Reader
from sandkeep.store.records import Records
from sandkeep.store.stored import Stored
from sandkeep.store.writer import Writer

if TYPE_CHECKING:
    from sandkeep.store.gc import GcReport
    from sandkeep.store.verify import Problem


class Repository:
    """Open with `Repository.open`; close it, or use it as a context manager. May be used by several threads."""

    def __init__(self, objects: Objects, store_id: str, cache: Path, lease: float) -> None:
        self.objects, self.id, self.lease = objects, store_id, lease
        # Two copies of a store have one id and need not hold the same.
        where = sha256(objects.place.encode(errors="surrogateescape")).hex()[:16]
        self.index = Index(objects, cache / f"{store_id}-{where}", store_id)
        self._reader = Reader(objects, self.index)
        self._records = Records(objects, self.index)

    @staticmethod
    def open(objects: Objects, cache: Path, *, create: bool = True, lease: float = LEASE) -> Repository:
        """`cache` is a folder for the caches of any number of stores."""
        return Repository(objects, _config(objects, create), cache, lease)

    def close(self) -> None:
        self.index.close()

    def __enter__(self) -> Repository:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # blobs

    def writer(self) -> Writer:
        return Writer(self.objects, self.index, self.lease)

    def read(self, blob: bytes) -> bytes:
        """`Corrupt` if it is damaged or its pack is lost, `NotFound` if the store never had it."""
        return self._reader.read(blob)

    def read_many(self, blobs: Iterable[bytes]) -> Iterator[tuple[bytes, bytes]]:
        """(id, content) in any order, each id once within any 65,536 asked for."""
        return self._reader.read_many(blobs)

    def stored(self, blobs: Iterable[bytes]) -> Iterator[Stored]:
        """For who opens blobs elsewhere; those it does not come with are for `read_many`."""
        return self._reader.stored(blobs)

    def has(self, blob: bytes) -> bool:
        return self.size_of(blob) is not None

    def size(self, blob: bytes) -> int:
        found = self.size_of(blob)
        if found is None:
            raise NotFound(f"blob {blob.hex()} is not in the store")
        return found

    def size_of(self, blob: bytes) -> int | None:
        found = self.index.length(blob)
        if found is None:
            self.index.sync()
            found = self.index.length(blob)
        return found

    # records

    def put_record(self, kind: str, name: str, data: bytes) -> None:
        """A record that names no blobs. One that does is put by `Writer.publish`."""
        full = _record(kind, name)
        if self.objects.size(full) is not None:
            raise StateConflict(f"{kind} {name} exists already", "records never change: choose a new name")
        self.objects.put(full, seal(full, data))

    def get_record(self, kind: str, name: str, *, cached: bool = False) -> bytes:
        """From the store; with `cached`, from the local copy if there is one, though another machine may have deleted it."""
        return self._records.get(kind, _record(kind, name), cached)

    def list_records(
        self, kind: str, after: str = "", *, newest_first: bool = False, full: bool = False
    ) -> Iterator[str]:
        """Names in order, or the reverse. Names that sort by time make this cheap: only the newest are asked of the store unless
        `full`, so a name deleted elsewhere among the older ones may still show for an hour, and one may be missing that
        a machine with a slow clock put there."""
        return self._records.names(check_name(kind), after, newest_first, full)

    def delete_record(self, kind: str, name: str) -> None:
        self._records.delete(kind, _record(kind, name))

    # care

    def refresh(self) -> None:
        """Look at the whole index in the store again."""
        self.index.sync(full=True)

    def verify(self, read_data: bool = True, progress: Callable[[int, int], None] | None = None) -> list[Problem]:
        """Every damaged or missing object. `progress(done, all)` counts packs."""
        from sandkeep.store.verify import verify

        return verify(self, read_data, progress)

    def gc(
        self,
        live: Callable[[], Iterable[bytes]],
        dry_run: bool = False,
        describes: Callable[[bytes], bool] = lambda data: False,
    ) -> GcReport:
        """Remove what no record needs. `live` lists every blob that any record visible *when it is called* needs; it is
        called more than once, and must raise rather than leave something out. `describes` says of a blob's content whether
        it is grouped apart, as `Writer.add` with `meta` does."""
        from sandkeep.store.gc import collect

        return collect(self, live, describes, dry_run)


def _record(kind: str, name: str) -> str:
    return record_name(check_name(kind), check_name(name))


def _config(objects: Objects, create: bool) -> str:
    for _ in range(2):
        try:
            found = read_sealed(objects, "config")
            break
        except NotFound:
            if next(objects.list("packs/"), None) or next(objects.list("records/"), None):
                continue  # somebody else has just made it, or it is lost
            if not create:
                raise StoreMissing(
                    f"there is no store at {objects.url}", "check the URL, or make one with `sandkeep store init`"
                ) from None
            put_sealed(objects, "config", {"version": VERSION, "id": secrets.token_hex(16)})
    else:
        try:
            found = read_sealed(objects, "config")
        except NotFound:
            raise Corrupt(
                f"the store at {objects.url} has lost its config object", "put config back from a copy", object="config"
            ) from None
    if not isinstance(found, dict) or not isinstance(found.get("id"), str) or not isinstance(found.get("version"), int):
        raise Corrupt("the store's config object makes no sense", object="config")
    if found["version"] != VERSION:
        raise Unsupported(
            f"the store has format version {found['version']}, this Sandkeep knows {VERSION}",
            "use the Sandkeep that wrote it" if found["version"] < VERSION else "use a newer Sandkeep",
        )
    check_name(found["id"])
    return str(found["id"])
