"""The collector: condemns packs that no record needs, and removes them once nobody can still be counting on them.

docs/design.md, section 7, has the argument. The order of the steps is the argument: do not change it without that text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandkeep.errors import Busy, Corrupt, NotFound, StoreError
from sandkeep.store.format import PackIndex, index_object, new_index_name, read_index_object, unique
from sandkeep.store.index import DAMAGE, read_marks
from sandkeep.store.lease import Lease, Other, others, put_sealed, read_condemned, seal_value
from sandkeep.store.verify import read_pack_footer
from sandkeep.store.writer import PACK_SIZE, Writer

if TYPE_CHECKING:
    from sandkeep.store.repository import Repository

SPARSE = 0.5  # a pack with less than this share of live bytes is repacked
SMALL = PACK_SIZE // 4
MANY = 16  # so many small packs, or index objects, are made one
INDEX_BLOBS = 200_000  # in one merged index object
STALE = 86_400.0  # seconds after which leftovers of crashed processes go

Live = Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class GcReport:
    removed_objects: int = 0
    freed_bytes: int = 0
    repacked_packs: int = 0
    waiting_packs: int = 0  # condemned, but a writer at work may still count on them: the next gc removes them
    missing_blobs: int = 0  # needed by a record, and nowhere in the store
    dry_run: bool = False


def collect(repo: Repository, live: Live, dry_run: bool) -> GcReport:
    try:
        if dry_run:
            return _forecast(repo, live)
        lease = Lease(repo.objects, "gc", repo.lease)
        lease.begin()
        try:
            return _Collector(repo, live, lease).run()
        finally:
            lease.end()
    except DAMAGE as error:
        raise StoreError(
            f"the local cache was damaged or replaced while collecting: {error}", "run gc again"
        ) from error


def _forecast(repo: Repository, live: Live) -> GcReport:
    repo.index.sync(full=True)
    missing = _load_live(repo, live)
    sizes = {name: size for name, size, _ in repo.objects.list("packs/")}
    dead, sparse = _judge(repo, sizes, frozenset())
    freed = sum(sizes[name] for name in dead) + sum(int(sizes[name] * (1 - share)) for name, share in sparse.items())
    return GcReport(len(dead) + len(sparse), freed, len(sparse), 0, missing, True)


class _Collector:
    def __init__(self, repo: Repository, live: Live, lease: Lease) -> None:
        self.repo, self.live, self.lease = repo, live, lease
        self.objects, self.index = repo.objects, repo.index
        self.removed = self.freed = 0

    def run(self) -> GcReport:
        if any(other.role == "gc" for other in others(self.lease) if not self._expire(other)):
            raise Busy(
                "another gc is at work in this store",
                "wait for it; one that has crashed stands in the way for 15 minutes",
            )
        self.index.sync(full=True)
        missing = _load_live(self.repo, self.live)
        if missing or self.index.bad():
            self._mend()
            missing = _load_live(self.repo, self.live)
        repacked = self._condemn()
        waiting = self._remove()
        self._tidy()
        return GcReport(self.removed, self.freed, repacked, waiting, missing)

    def _mend(self) -> None:
        """Packs that no index object names are read again from their own footers; damaged index objects go."""
        known = {str(row[0]) for row in self.index.rows("SELECT name FROM pack")}
        found: list[PackIndex] = []
        for name, size, _ in self.objects.list("packs/"):
            if name not in known:
                try:
                    found.append(read_pack_footer(self.objects, name, size))
                except (Corrupt, NotFound):
                    continue
        bad = self.index.bad()
        if found:
            self._put_index(found)
        if bad:
            self._delete({name: self.objects.size(name) or 0 for name in bad})
        self.index.sync(full=True)

    def _condemn(self) -> int:
        """Announce the packs that are to go. What is still needed of them is copied first. The number of packs copied."""
        sizes = {name: size for name, size, _ in self.objects.list("packs/")}
        dead, sparse = _judge(self.repo, sizes, self.lease.condemned)
        copied = self._repack(list(sparse)) if sparse else []
        condemned = sorted([*dead, *copied])
        if condemned:
            name = f"gc/condemned-{unique()}"
            self.lease.put(name, seal_value(name, {"packs": condemned}))
        return len(copied)

    def _repack(self, packs: list[str]) -> list[str]:
        copied = []
        wanted: dict[str, list[bytes]] = {name: [] for name in packs}
        rows = self.index.rows(
            "SELECT pack.name, blob.id FROM blob JOIN temp.live ON live.id = blob.id "
            "JOIN pack ON pack.number = blob.pack WHERE pack.name IN (SELECT value FROM json_each(?))",
            (json.dumps(packs),),
        )
        for name, blob in rows:
            wanted[str(name)].append(blob)  # type: ignore[arg-type]
        with Writer(self.objects, self.index, self.lease.duration, lease=self.lease, dedup=False) as writer:
            for pack, ids in wanted.items():
                try:
                    for _, data in self.repo.read_many(ids):
                        writer.add(data)
                except (Corrupt, NotFound):
                    continue  # it stays as it is; verify names it
                copied.append(pack)
            writer.flush()
        return copied

    def _remove(self) -> int:
        """Remove condemned packs. The number of those that must wait."""
        marks = {name: read_condemned(self.objects, name) for name in read_marks(self.objects).condemned}
        if not marks:
            return 0
        alive = [other for other in others(self.lease) if not self._expire(other)]
        ready = [name for name in marks if all(name in other.seen for other in alive)]
        waiting = {pack for name in marks if name not in ready for pack in marks[name]}
        if not ready:
            return len(waiting)
        self.index.sync(full=True)
        _load_live(self.repo, self.live)
        needed = self._needed({pack for packs in marks.values() for pack in packs})
        going = {pack for name in ready for pack in marks[name]} - needed - waiting
        if going:
            self._forget_in_index(going)
            old = [name for name, _, _ in self.objects.list("gc/") if name.startswith("gc/epoch-")]
            put_sealed(self.objects, f"gc/epoch-{unique()}", {})
            self.lease.check_twice()
            self._delete({name: size for name, size, _ in self.objects.list("packs/") if name in going})
            self.objects.delete(old)
        self.objects.delete(ready)
        return len(waiting)

    def _expire(self, other: Other) -> bool:
        """Give a lapsed lease up: its holder finds the mark before it can take anything as published."""
        if not other.lapsed:
            return False
        put_sealed(self.objects, f"expired/{other.id}", {})
        self.objects.delete([f"writers/{other.id}"])
        return True

    def _needed(self, condemned: set[str]) -> set[str]:
        """For each live blob that lies in condemned packs only, the first of them."""
        needed: set[str] = set()
        with self.index.change() as db:
            db.execute("CREATE TEMP TABLE IF NOT EXISTS condemned(pack INTEGER PRIMARY KEY)")
            db.execute("DELETE FROM temp.condemned")
            db.executemany(
                "INSERT INTO temp.condemned SELECT number FROM pack WHERE name=?", ((name,) for name in condemned)
            )
            rows = db.execute(
                "SELECT min(pack.name), sum(condemned.pack IS NULL) FROM blob JOIN live ON live.id = blob.id "
                "JOIN pack ON pack.number = blob.pack LEFT JOIN temp.condemned ON condemned.pack = pack.number "
                "GROUP BY blob.id"
            )
            for name, elsewhere in rows:
                if not elsewhere:
                    needed.add(name)
        return needed

    def _forget_in_index(self, going: set[str]) -> None:
        """Write the index objects that name these packs again without them. The new ones are there before the old ones go."""
        names = self.index.rows("SELECT DISTINCT source, pack.name FROM names JOIN pack ON pack.number = names.pack")
        self._merge_index({str(source) for source, pack in names if pack in going}, going)

    def _merge_index(self, sources: set[str], without: set[str]) -> None:
        kept: dict[str, PackIndex] = {}
        for source in sorted(sources):
            for pack in read_index_object(source, self.objects.get(source)):
                if pack.name not in without:
                    kept[pack.name] = pack
            if sum(len(pack.lengths) for pack in kept.values()) > INDEX_BLOBS:
                self._put_index(list(kept.values()))
                kept = {}
        if kept:
            self._put_index(list(kept.values()))
        self.lease.check_twice()
        self._delete({source: self.objects.size(source) or 0 for source in sources})
        self.index.sync(full=True)

    def _put_index(self, packs: list[PackIndex]) -> None:
        name = new_index_name()
        self.lease.put(name, index_object(name, packs))

    def _tidy(self) -> None:
        """Make many small index objects one, and remove what crashed processes left."""
        listed = [(name, size) for name, size, _ in self.objects.list("index/") if size < 1 << 20]
        if len(listed) >= MANY:
            self._merge_index({name for name, _ in listed}, set())
        clock = max((at for name, _, at in self.objects.list("writers/") if name == self.lease.name), default=0.0)
        for prefix in ("tmp/", "expired/"):
            self._delete({name: size for name, size, at in self.objects.list(prefix) if clock - at > STALE})

    def _delete(self, sizes: dict[str, int]) -> None:
        self.objects.delete(sizes)
        self.removed += len(sizes)
        self.freed += sum(sizes.values())


def _load_live(repo: Repository, live: Live) -> int:
    """Fill the table of live blobs; the number of those that no pack holds."""
    with repo.index.change() as db:
        db.execute("CREATE TEMP TABLE IF NOT EXISTS live(id BLOB PRIMARY KEY) WITHOUT ROWID")
        db.execute("DELETE FROM temp.live")
    batch: list[tuple[bytes]] = []

    def store() -> None:
        with repo.index.change() as db:
            db.executemany("INSERT OR IGNORE INTO temp.live VALUES(?)", batch)
        batch.clear()

    for blob in live():
        batch.append((blob,))
        if len(batch) >= 10_000:
            store()
    store()
    return int(str(repo.index.rows("SELECT count(*) FROM temp.live WHERE id NOT IN (SELECT id FROM blob)")[0][0]))


def _judge(repo: Repository, sizes: dict[str, int], condemned: frozenset[str]) -> tuple[list[str], dict[str, float]]:
    """Packs to condemn as they are, and packs to copy from first, with their share of live bytes."""
    rows = repo.index.rows(
        "SELECT pack.name, pack.raw, sum(CASE WHEN live.id IS NULL THEN 0 ELSE length_of(blob.pack, blob.number) + 1 END) FROM blob "
        "JOIN pack ON pack.number = blob.pack LEFT JOIN temp.live ON live.id = blob.id GROUP BY pack.number"
    )
    dead, shares = [], {}
    indexed = set()
    for row in rows:
        name, total, alive = str(row[0]), int(str(row[1])), int(str(row[2]))
        indexed.add(name)
        if name in condemned or name not in sizes:
            continue
        if not alive:
            dead.append(name)
        else:
            shares[name] = min(1.0, alive / max(1, total))
    dead += [name for name in sizes if name not in indexed and name not in condemned]
    small = [name for name in shares if sizes[name] < SMALL]
    again = set(small) if len(small) >= MANY else set()
    return dead, {name: share for name, share in shares.items() if share < SPARSE or name in again}
