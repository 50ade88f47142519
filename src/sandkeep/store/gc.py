"""The collector: condemns packs that no record needs, and removes them once nobody can still be counting on them.

docs/design.md, section 7, has the argument. The order of the steps is the argument: do not change it without that text.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sandkeep.errors import Busy, Corrupt, NotFound, StoreError
from sandkeep.store.format import PackIndex, index_object, is_pack, new_index_name, unique
from sandkeep.store.index import DAMAGE, read_marks
from sandkeep.store.lease import Lease, Other, others, put_sealed, read_condemned, seal_value
from sandkeep.store.looking import read_index
from sandkeep.store.repack import Describes, Packer, pack_again
from sandkeep.store.verify import read_pack_footer
from sandkeep.store.writer import PACK_SIZE

if TYPE_CHECKING:
    from sandkeep.store.repository import Repository

SPARSE = 0.75  # a pack with less than this share of live bytes is repacked
SMALL = PACK_SIZE // 4
MANY = 16  # so many small packs, or index objects, are made one
INDEX_BLOBS = 200_000  # in one merged index object
LARGE_INDEX = 1 << 20  # an index object of so many bytes is not merged only because there are many
STALE = 86_400.0  # seconds after which leftovers of crashed processes go

Live = Callable[[], Iterable[bytes]]


@dataclass(frozen=True)
class GcReport:
    removed_objects: int = 0
    freed_bytes: int = 0  # by how much packs, index and leftovers became less: what was written instead is taken off
    repacked_packs: int = 0
    waiting_packs: int = 0  # condemned, but a writer at work may still count on them: the next gc removes them
    missing_blobs: int = 0  # needed by a record, and nowhere in the store
    dry_run: bool = False
    final: tuple[str, ...] = ()  # checkpoints forgotten before that can't be taken back from now on


def collect(repo: Repository, live: Live, describes: Describes, dry_run: bool) -> GcReport:
    try:
        if dry_run:
            return _patiently(lambda: _forecast(repo, live, describes))
        lease = Lease(repo.objects, "gc", repo.lease)
        lease.begin()
        try:
            return _Collector(repo, live, describes, lease).run()
        finally:
            lease.end()
    except DAMAGE as error:
        raise StoreError(
            f"the local cache was damaged or replaced while collecting: {error}", "run gc again"
        ) from error


def _patiently(look: Callable[[], GcReport]) -> GcReport:
    """A collector at work takes away what is looked at; then it is looked at again."""
    for _ in range(10):
        try:
            return look()
        except NotFound as error:
            met = error
    raise Busy(f"the store changes all the time: {met.message}", "try again when no gc is at work")


def _forecast(repo: Repository, live: Live, describes: Describes) -> GcReport:
    """What a collector would do now, to the byte, as long as nobody else writes. Of what it would pack again only small blobs
    are read."""
    repo.index.sync(full=True)
    missing = _load_live(repo, live)
    sizes = {name: size for name, size, _ in repo.objects.list("packs/")}
    dead, sparse = _judge(repo, sizes, frozenset())
    made: list[PackIndex] = []
    freed = 0

    def count(index: PackIndex, parts: Sequence[bytes]) -> None:
        nonlocal freed
        made.append(index)
        freed -= index.size + len(parts[-1])

    copied = _pack_again(repo, sparse, Packer(count, describes), read=False)
    going = {*dead, *copied}
    shelf = _Shelf(repo, {name: size for name, size, _ in repo.objects.list("index/")})
    if made:
        shelf.put(made)
    if going:
        shelf.merge(_naming(repo, going), going)
    if len(shelf.small()) >= MANY:
        shelf.merge(shelf.small(), set())
    freed += sum(sizes[name] for name in going) + shelf.freed
    return GcReport(len(going) + shelf.removed, freed, len(copied), 0, missing, True)


class _Shelf:
    """Index objects as they would become."""

    def __init__(self, repo: Repository, sizes: dict[str, int]) -> None:
        self._repo, self._sizes = repo, sizes
        self._made: dict[str, list[PackIndex]] = {}
        self.removed = self.freed = 0

    def put(self, packs: list[PackIndex]) -> None:
        name = new_index_name()
        self._made[name] = packs
        self._sizes[name] = len(index_object(name, packs))
        self.freed -= self._sizes[name]

    def merge(self, sources: set[str], without: set[str]) -> None:
        for packs in _regrouped(map(self._packs, sorted(sources)), without):
            self.put(packs)
        self.freed += sum(self._sizes.pop(name) for name in sources)
        self.removed += len(sources)

    def small(self) -> set[str]:
        return {name for name, size in self._sizes.items() if size < LARGE_INDEX}

    def _packs(self, name: str) -> list[PackIndex]:
        return self._made.get(name) or read_index(self._repo.objects, name)


class _Collector:
    def __init__(self, repo: Repository, live: Live, describes: Describes, lease: Lease) -> None:
        self.repo, self.live, self.describes, self.lease = repo, live, describes, lease
        self.objects, self.index = repo.objects, repo.index
        self.removed = self.freed = 0

    def run(self) -> GcReport:
        if any(other.role == "gc" for other in others(self.lease) if not self._expire(other)):
            raise Busy(
                "another gc is at work in this store",
                "wait for it; one that has crashed elsewhere stands in the way for 15 minutes",
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
            if name not in known and is_pack(name):
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
        copied = self._repack(sparse) if sparse else []
        condemned = sorted([*dead, *copied])
        if condemned:
            name = f"gc/condemned-{unique()}"
            self.lease.put(name, seal_value(name, {"packs": condemned}))
        return len(copied)

    def _repack(self, packs: list[str]) -> list[str]:
        made: list[PackIndex] = []

        def put(index: PackIndex, parts: Sequence[bytes]) -> None:
            self.lease.check()
            self.objects.put(index.name, *parts)
            self.freed -= sum(map(len, parts))
            made.append(index)

        copied = _pack_again(self.repo, packs, Packer(put, self.describes), read=True)
        if made:
            self._put_index(made)
            self.index.sync()
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
        self._merge_index(_naming(self.repo, going), going)

    def _merge_index(self, sources: set[str], without: set[str]) -> None:
        found = (read_index(self.objects, source) for source in sorted(sources))
        for packs in _regrouped(found, without):
            self._put_index(packs)
        self.lease.check_twice()
        self._delete({source: self.objects.size(source) or 0 for source in sources})
        self.index.sync(full=True)

    def _put_index(self, packs: list[PackIndex]) -> None:
        name = new_index_name()
        data = index_object(name, packs)
        self.lease.put(name, data)
        self.freed -= len(data)

    def _tidy(self) -> None:
        """Make many small index objects one, and remove what crashed processes left."""
        small = {name for name, size, _ in self.objects.list("index/") if size < LARGE_INDEX}
        if len(small) >= MANY:
            self._merge_index(small, set())
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


def _naming(repo: Repository, packs: set[str]) -> set[str]:
    """The index objects that name some of these packs."""
    rows = repo.index.rows("SELECT DISTINCT source, pack.name FROM names JOIN pack ON pack.number = names.pack")
    return {str(source) for source, pack in rows if pack in packs}


def _regrouped(found: Iterable[list[PackIndex]], without: set[str]) -> Iterator[list[PackIndex]]:
    """What the new index objects hold that replace these."""
    kept: dict[str, PackIndex] = {}
    for packs in found:
        kept |= {pack.name: pack for pack in packs if pack.name not in without}
        if sum(len(pack.lengths) for pack in kept.values()) > INDEX_BLOBS:
            yield list(kept.values())
            kept = {}
    if kept:
        yield list(kept.values())


def _pack_again(repo: Repository, packs: list[str], packer: Packer, read: bool) -> list[str]:
    """Put what is needed of these packs into new ones. The packs of which all was."""
    wanted: dict[str, list[bytes]] = {name: [] for name in sorted(packs)}
    rows = repo.index.rows(
        "SELECT pack.name, blob.id FROM blob JOIN temp.live ON live.id = blob.id "
        "JOIN pack ON pack.number = blob.pack WHERE pack.name IN (SELECT value FROM json_each(?))",
        (json.dumps(packs),),
    )
    for name, blob in rows:
        wanted[str(name)].append(blob)  # type: ignore[arg-type]
    copied = []
    for name, ids in wanted.items():
        try:
            pack_again(repo, ids, packer, read)
        except (Corrupt, NotFound):
            continue  # it stays as it is; verify names it
        copied.append(name)
    packer.end()
    return copied


def _judge(repo: Repository, sizes: dict[str, int], condemned: frozenset[str]) -> tuple[list[str], list[str]]:
    """Packs to condemn as they are, and packs to copy from first."""
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
    return dead, [name for name, share in shares.items() if share < SPARSE or name in again]
