"""The local cache: deleted, damaged, stale or another store's, it is never believed, and only what is new is fetched."""

from __future__ import annotations

import hashlib
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import Open
from faulty import Faulty
from sandkeep.errors import BadArgument, StoreError
from sandkeep.store import format as fmt
from sandkeep.store.objects import Objects, open_objects
from store_work import check, kept, live, mixed, save


def test_the_cache_may_be_deleted_or_damaged_at_any_time(opened: Open, tmp_path: Path) -> None:
    blobs = mixed(9, 300)
    first = opened()
    ids = save(first, "one", blobs)
    first.close()
    folder = first.index.folder
    dice = random.Random(9)
    for attempt in range(6):
        size = (folder / "index.db").stat().st_size
        with open(folder / "index.db", "r+b") as file:
            for _ in range(1 + attempt * 40):
                file.seek(dice.randrange(100 if attempt == 0 else 0, size))
                file.write(dice.randbytes(16))
        repo = opened()
        check(repo, ids, blobs)
        save(repo, f"again{attempt}", [*blobs, bytes([attempt])])
        repo.close()
        far = opened(f"far{attempt}")
        check(far, *kept(far, f"again{attempt}", [*blobs, bytes([attempt])]))
        far.close()
    repo = opened()
    shutil.rmtree(tmp_path / "cache")
    check(repo, ids, blobs)
    check(opened(), ids, blobs)


def test_a_cache_damaged_while_it_is_open(opened: Open, tmp_path: Path) -> None:
    blobs = mixed(15, 300)
    repo = opened()
    ids = save(repo, "n0", blobs)
    path = repo.index.folder / "index.db"
    said: list[str] = []
    for turn in range(1, 6):
        repo.index.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        path.write_bytes(random.Random(turn).randbytes(path.stat().st_size))
        for action in (
            lambda: check(repo, ids, blobs),
            lambda turn=turn: save(repo, f"n{turn}", [*blobs, bytes([turn])]),
            lambda: list(repo.list_records("t", full=True)),
            lambda: repo.gc(lambda: live(repo)),
            repo.verify,
        ):
            try:
                action()
            except StoreError as error:
                said.append(error.message)
    assert all("cache" in message for message in said)
    far = opened("far")
    for name in far.list_records("t"):
        check(far, *kept(far, name, blobs if name == "n0" else [*blobs, bytes([int(name[1:])])]))
    assert far.verify() == []


def test_a_closed_repository_says_so(opened: Open, tmp_path: Path) -> None:
    repo = opened()
    repo.close()
    with pytest.raises(BadArgument):
        repo.has(bytes(32))
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(StoreError, match="cache"):
        opened("file")


def test_a_cache_of_another_store_is_not_believed(opened: Open, tmp_path: Path) -> None:
    one = opened()
    save(one, "one", [b"only in one"])
    one.close()
    two = opened("other", over=open_objects(tmp_path / "store2"))
    two.close()
    shutil.copy(one.index.folder / "index.db", two.index.folder / "index.db")
    assert not opened("other", over=open_objects(tmp_path / "store2")).has(hashlib.sha256(b"only in one").digest())


def test_two_copies_of_a_store_share_no_cache(opened: Open, tmp_path: Path) -> None:
    one = opened()
    shutil.copytree(tmp_path / "store", tmp_path / "copy")
    two = opened(over=open_objects(tmp_path / "copy"))
    assert one.id == two.id
    with two.writer() as writer:
        save(one, "n", [b"the same"])
        writer.publish("t", "n", writer.add(b"the same"))
    check(opened("fresh", over=open_objects(tmp_path / "copy")), *kept(two, "n", [b"the same"]))


def test_a_stale_cache_follows_a_gc_elsewhere(opened: Open) -> None:
    one, two = opened("one"), opened("two")
    gone, stays = mixed(10), mixed(11)
    save(one, "gone", gone)
    ids = save(one, "stays", stays + gone[:5])
    two.refresh()
    one.delete_record("t", "gone")
    assert one.gc(lambda: live(one)).removed_objects
    check(two, ids, stays + gone[:5])
    again = save(two, "again", gone)
    check(opened("three"), again, gone)


def test_only_new_index_objects_are_fetched(opened: Open, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandkeep.store.index.WINDOW", 5)
    one = opened("one")
    for n in range(30):
        save(one, f"n{n:02}", [b"%d" % n])
    watched = Faulty(objects)
    two = opened("two", over=watched)
    two.refresh()
    watched.log.clear()
    save(one, "more", [b"more"])
    assert two.has(hashlib.sha256(b"more").digest())
    assert [verb for verb, _ in watched.log] == ["list", "newest", "get"]


def test_a_cold_cache_is_filled_while_a_collector_merges(opened: Open, objects: Objects) -> None:
    """At every look at the index one of its objects is merged away before it can be read."""
    one = opened("one")
    for n in range(40):
        save(one, f"n{n:02}", [b"%d" % n])
    inner, looked = objects.list, [0]

    def merging(prefix: str, after: str = "") -> Iterator[tuple[str, int, float]]:
        rows = list(inner(prefix, after))
        if prefix == "index/" and looked[0] < 20:
            looked[0] += 1
            name, merged = rows[-1][0], fmt.new_index_name()
            packs = fmt.read_index_object(name, objects.get(name))
            objects.put(merged, fmt.index_object(merged, packs))
            objects.delete([name])
        return iter(rows)

    objects.list = merging  # type: ignore[method-assign]
    two = opened("two")
    two.refresh()
    assert looked == [20]
    check(two, [hashlib.sha256(b"%d" % n).digest() for n in range(40)], [b"%d" % n for n in range(40)])
