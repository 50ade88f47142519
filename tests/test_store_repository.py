"""The repository: round trips, deduplication, records, damage found and refused, caches that are deleted, stale or wrong."""

from __future__ import annotations

import hashlib
import os
import random
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from faulty import Faulty
from sandkeep.errors import (
    BadArgument,
    Corrupt,
    NotFound,
    StoreError,
    StoreMissing,
    StoreUnreachable,
    Unsupported,
)
from sandkeep.store import format as fmt
from sandkeep.store.lease import put_sealed
from sandkeep.store.objects import Objects, open_objects
from sandkeep.store.repository import Repository
from swift import Swift, swift  # noqa: F401

Open = Callable[..., Repository]


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return open_objects(tmp_path / "store")


@pytest.fixture
def opened(objects: Objects, tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    def make(cache: str = "cache", over: Objects = objects, **options: object) -> Repository:
        repo = Repository.open(over, tmp_path / cache, **options)  # type: ignore[arg-type]
        request.addfinalizer(repo.close)
        return repo

    return make


def blobs_of(seed: int, count: int = 40, large: int = 2) -> list[bytes]:
    dice = random.Random(seed)
    made = [dice.randbytes(dice.randrange(0, 3000)) * dice.randrange(1, 4) for _ in range(count)]
    return made + [dice.randbytes(150_000) for _ in range(large)] + [bytes([seed % 256]) * 200_000]


def save(repo: Repository, name: str, blobs: list[bytes], kind: str = "t") -> list[bytes]:
    with repo.writer() as writer:
        ids = [writer.add(blob) for blob in blobs]
        writer.publish(kind, name, b"".join(ids))
    return ids


def check(repo: Repository, ids: list[bytes], blobs: list[bytes]) -> None:
    expected = dict(zip(ids, blobs, strict=True))
    found = list(repo.read_many(ids))
    assert len(found) == len(expected)
    assert dict(found) == expected


def test_round_trip_here_and_on_another_machine(opened: Open) -> None:
    blobs = [*blobs_of(1), b"", b"x"]
    repo = opened()
    ids = save(repo, "one", blobs)
    assert ids == [hashlib.sha256(blob).digest() for blob in blobs]
    for machine in (repo, opened("elsewhere")):
        check(machine, ids, blobs)
        for blob, data in zip(ids, blobs, strict=True):
            assert machine.read(blob) == data
            assert machine.size(blob) == len(data)
        assert machine.get_record("t", "one") == b"".join(ids)
    assert repo.verify() == []


def test_round_trip_on_s3(swift: Swift, opened: Open) -> None:  # noqa: F811
    over = open_objects(f"s3://{swift.bucket()}/deep/prefix", **swift.options())
    blobs = blobs_of(2, 200, 10)
    repo = opened(over=over)
    ids = save(repo, "one", blobs)
    far = opened("elsewhere", over=over, create=False)
    check(far, ids, blobs)
    assert far.read(ids[5]) == blobs[5]
    assert list(far.list_records("t")) == ["one"]
    assert far.verify() == []
    save(far, "two", blobs_of(3))
    repo.delete_record("t", "one")
    assert repo.gc(lambda: live(repo)).removed_objects > 0
    check(opened("third", over=over), *kept(far, "two", blobs_of(3)))
    with pytest.raises(NotFound):
        far.get_record("t", "one")


def live(repo: Repository) -> list[bytes]:
    found = []
    for name in repo.list_records("t", full=True):
        data = repo.get_record("t", name)
        found += [data[at : at + 32] for at in range(0, len(data), 32)]
    return found


def kept(repo: Repository, name: str, blobs: list[bytes]) -> tuple[list[bytes], list[bytes]]:
    data = repo.get_record("t", name)
    return [data[at : at + 32] for at in range(0, len(data), 32)], blobs


@given(
    st.lists(st.lists(st.binary(max_size=600).map(lambda b: b * 1), max_size=12), min_size=1, max_size=4),
    st.integers(64, 3000),
)
@settings(max_examples=25)
def test_any_blobs_in_any_blocks(
    tmp_path_factory: pytest.TempPathFactory, saves: list[list[bytes]], group: int
) -> None:
    folder = tmp_path_factory.mktemp("any")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sandkeep.store.writer.GROUP", group)
        patch.setattr("sandkeep.store.writer.BIG", group // 2)
        patch.setattr("sandkeep.store.writer.PACK_SIZE", 1000)
        with Repository.open(open_objects(folder / "s"), folder / "c") as repo:
            every: dict[bytes, bytes] = {}
            for number, blobs in enumerate(saves):
                ids = save(repo, f"n{number}", blobs)
                every.update(zip(ids, blobs, strict=True))
            assert dict(repo.read_many(every)) == every
            assert repo.verify() == []
    shutil.rmtree(folder)


def test_what_is_there_is_not_sent_again(opened: Open, objects: Objects) -> None:
    blobs = blobs_of(4)
    repo = opened()
    with repo.writer() as writer:
        for blob in blobs + blobs:
            writer.add(blob)
        writer.flush()
        assert writer.new_blobs == len(set(blobs))
        stored = sum(size for name, size, _ in objects.list("") if name.startswith(("packs/", "index/")))
        assert writer.new_bytes == stored
    before = [name for name, _, _ in objects.list("")]
    for machine in (repo, opened("elsewhere")):
        with machine.writer() as writer:
            assert all(writer.has(hashlib.sha256(blob).digest()) for blob in blobs)
            for blob in blobs:
                writer.add(blob)
            writer.flush()
            assert (writer.new_blobs, writer.new_bytes) == (0, 0)
    assert [name for name, _, _ in objects.list("")] == before


def test_nothing_is_left_by_a_writer_that_gives_up(opened: Open, objects: Objects) -> None:
    repo = opened()
    with pytest.raises(RuntimeError), repo.writer() as writer:
        for blob in blobs_of(5):
            writer.add(blob)
        raise RuntimeError
    assert [name for name, _, _ in objects.list("")] == ["config"]


def test_a_buffer_may_be_reused_after_add(opened: Open) -> None:
    repo = opened()
    buffer = bytearray(200_000)
    with repo.writer() as writer:
        ids = []
        for n in range(6):
            size = 200_000 if n % 2 else 500
            buffer[:size] = bytes([n]) * size
            ids.append(writer.add(memoryview(buffer)[:size]))
        writer.flush()
    assert [repo.read(blob)[:1] for blob in ids] == [bytes([n]) for n in range(6)]


def test_too_large_a_blob_is_refused(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandkeep.store.writer.MAX_BLOB", 1000)
    with opened().writer() as writer, pytest.raises(BadArgument):
        writer.add(bytes(1001))


def test_opening_what_is_not_there_makes_nothing(opened: Open, objects: Objects, tmp_path: Path) -> None:
    with pytest.raises(StoreMissing):
        opened(create=False)
    assert not (tmp_path / "store").exists()
    assert not (tmp_path / "cache").exists()


def test_lost_or_foreign_config_is_refused(opened: Open, objects: Objects) -> None:
    first = opened()
    save(first, "one", [b"x"])
    put_sealed(objects, "config", {"version": 99, "id": first.id})
    with pytest.raises(Unsupported):
        opened()
    objects.delete(["config"])
    with pytest.raises(Corrupt):
        opened()


# damage


def test_any_changed_byte_of_any_object_is_found_and_refused(opened: Open, objects: Objects, tmp_path: Path) -> None:
    blobs = [b"hello" * 30, os.urandom(60), b"", bytes(2000)]
    repo = opened()
    ids = save(repo, "one", blobs)
    assert repo.verify() == []
    put_sealed(objects, "gc/epoch-1", {})
    repo.close()
    for name, _, _ in list(objects.list("")):
        path = tmp_path / "store" / name
        whole = path.read_bytes()
        for at in range(len(whole)):
            damaged = bytearray(whole)
            damaged[at] ^= 1 << (at % 8)
            path.write_bytes(damaged)
            if name == "config":
                with pytest.raises(Corrupt):
                    opened("fresh")
                continue
            other = opened("fresh")
            problems = [problem.object for problem in other.verify()]
            assert problems == [name], (name, at)
            if name.startswith("packs/") and at % 7 == 0:
                _refuses_or_gives_exactly(other, ids, blobs)
            if name.startswith("records/"):
                with pytest.raises(Corrupt):
                    other.get_record("t", "one")
            other.close()
        for cut in (0, 1, len(whole) // 2, len(whole) - 1):
            path.write_bytes(whole[:cut])
            if name != "config":
                other = opened("fresh")
                assert [problem.object for problem in other.verify()] == [name], (name, cut)
                other.close()
        path.write_bytes(whole)
        shutil.rmtree(tmp_path / "fresh", ignore_errors=True)
    check(opened("fresh"), ids, blobs)


def _refuses_or_gives_exactly(repo: Repository, ids: list[bytes], blobs: list[bytes]) -> None:
    for blob, data in zip(ids, blobs, strict=True):
        try:
            assert repo.read(blob) == data
        except Corrupt:
            pass
    try:
        assert dict(repo.read_many(ids)) == dict(zip(ids, blobs, strict=True))
    except Corrupt:
        pass


def test_a_missing_pack_is_named_with_its_blobs(opened: Open, objects: Objects) -> None:
    repo = opened()
    ids = save(repo, "one", blobs_of(6, 5, 0))
    (pack,) = [name for name, _, _ in objects.list("packs/")]
    objects.delete([pack])
    for read_data in (True, False):
        (problem,) = repo.verify(read_data)
        assert problem.object == pack
        assert set(problem.blobs) == set(ids)
    with pytest.raises(Corrupt):
        repo.read(ids[0])
    with pytest.raises(Corrupt):
        list(repo.read_many(ids))


def test_a_second_copy_is_read_when_the_first_is_damaged(opened: Open, objects: Objects, tmp_path: Path) -> None:
    """Two writers at once may both store a blob: either copy will do."""
    repo, blobs = opened(), blobs_of(7, 10)
    with repo.writer() as one, opened("other").writer() as two:
        for writer in (one, two):
            ids = [writer.add(blob) for blob in blobs]
        one.flush()
        two.flush()
    for name, size, _ in list(objects.list("packs/")):
        whole = objects.get(name)
        (tmp_path / "store" / name).write_bytes(bytes(size))
        check(opened("third"), ids, blobs)
        assert opened("third").read(ids[0]) == blobs[0]
        (tmp_path / "store" / name).write_bytes(whole)


def test_a_damaged_index_object_is_mended_by_gc(opened: Open, objects: Objects, tmp_path: Path) -> None:
    repo, blobs = opened(), blobs_of(8)
    ids = save(repo, "one", blobs)
    (name,) = [name for name, _, _ in objects.list("index/")]
    (tmp_path / "store" / name).write_bytes(b"nonsense")
    other = opened("other")
    with pytest.raises(Corrupt, match="index"):
        other.read(ids[0])
    assert other.gc(lambda: live(other)).missing_blobs == 0
    check(other, ids, blobs)
    assert other.verify() == []


def test_hostile_sizes_are_refused_before_memory_is_taken(opened: Open, objects: Objects) -> None:
    repo = opened()
    bomb = fmt.compress(bytes(200 << 20), 1)
    name = "index/zz"
    block = fmt.Block(8, len(bomb), 1000, 0, 1)
    objects.put("packs/0b", fmt.PACK + bomb)
    objects.put(name, fmt.index_object(name, [fmt.PackIndex("packs/0b", [block], bytes(32), fmt.array("I", [1000]))]))
    repo.refresh()
    for blob in (bytes(32),):
        with pytest.raises((Corrupt, NotFound)):
            repo.read(blob)
    lying = fmt.Block(8, 10, 5 << 30 & 0xFFFFFFFF, 0, 1)
    for index in (
        fmt.PackIndex("packs/0b", [lying], bytes(32), fmt.array("I", [lying.raw])),
        fmt.PackIndex("packs/../../x", [], b"", fmt.array("I")),
    ):
        objects.put(name, fmt.index_object(name, [index]))
        assert name in opened("fresh").index.bad() or opened("fresh2").verify()


# the cache


def test_the_cache_may_be_deleted_or_damaged_at_any_time(opened: Open, tmp_path: Path) -> None:
    blobs = blobs_of(9, 300)
    first = opened()
    ids = save(first, "one", blobs)
    first.close()
    folder = tmp_path / "cache" / first.id
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
    blobs = blobs_of(15, 300)
    repo = opened()
    ids = save(repo, "n0", blobs)
    path = tmp_path / "cache" / repo.id / "index.db"
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
    shutil.copy(tmp_path / "cache" / one.id / "index.db", tmp_path / "other" / two.id / "index.db")
    assert not opened("other", over=open_objects(tmp_path / "store2")).has(hashlib.sha256(b"only in one").digest())


def test_a_stale_cache_follows_a_gc_elsewhere(opened: Open) -> None:
    one, two = opened("one"), opened("two")
    gone, stays = blobs_of(10), blobs_of(11)
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


def test_threads_share_a_repository(opened: Open) -> None:
    repo, blobs = opened(), blobs_of(12, 300)
    ids = save(repo, "one", blobs)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for k in random.Random(seed).sample(range(len(ids)), 60):
                assert repo.read(ids[k]) == blobs[k]
            save(repo, f"thread{seed}", blobs_of(100 + seed, 20, 0))
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert repo.verify() == []


# faults


def test_every_operation_may_fail_once(opened: Open, objects: Objects) -> None:
    blobs = blobs_of(13, 20)
    opened("first").close()
    clean = Faulty(objects)
    save(opened("count", over=clean), "count", blobs)
    for kind in ("fail", "lost"):
        for step in range(len(clean.log)):
            faulty = Faulty(objects, lambda n, verb, name, step=step, kind=kind: kind if n == step else None)  # type: ignore[misc]
            name = f"{kind}{step}"
            try:
                save(opened(f"c-{name}", over=faulty), name, [*blobs, name.encode()])
            except StoreUnreachable:
                pass
    repo = opened("after")
    assert repo.verify() == []
    for name in repo.list_records("t"):
        check(repo, *kept(repo, name, [*blobs, name.encode()] if name != "count" else blobs))


def test_a_short_answer_is_asked_for_again_or_refused(opened: Open, objects: Objects) -> None:
    blobs = blobs_of(14)
    ids = save(opened(), "one", blobs)
    once = Faulty(
        objects,
        lambda n, verb, name: (
            "short"
            if name.startswith("packs/") and not any(seen.startswith("packs/") for _, seen in once.log)
            else None
        ),
    )
    check(opened("a", over=once), ids, blobs)
    always = Faulty(objects, lambda n, verb, name: "short" if name.startswith("packs/") else None)
    with pytest.raises(Corrupt):
        list(opened("b", over=always).read_many(ids))


_MEMORY = """
import random, resource, sys
from pathlib import Path
from sandkeep.store.objects import open_objects
from sandkeep.store.repository import Repository
folder = Path(sys.argv[1])
repo = Repository.open(open_objects(folder / "s"), folder / "c")
dice = random.Random(1)
base = dice.randbytes(1 << 20)
start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
ids = []
with repo.writer() as writer:
    for n in range(1000):
        ids.append(writer.add(n.to_bytes(4, "big") + base[: 300_000]))
    writer.flush()
for _, data in repo.read_many(ids):
    pass
repo.close()
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - start) >> 10)
"""


def test_memory_is_bounded(tmp_path: Path) -> None:
    """300 MB through a writer and a reader."""
    done = subprocess.run(
        [sys.executable, "-c", _MEMORY, tmp_path], capture_output=True, text=True, timeout=170, check=False
    )
    shutil.rmtree(tmp_path / "s", ignore_errors=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 220
