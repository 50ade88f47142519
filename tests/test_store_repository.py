"""The repository: round trips, deduplication, opening, threads, faults, bounded memory."""

from __future__ import annotations

import hashlib
import random
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import Open
from faulty import Faulty
from sandkeep.errors import (
    BadArgument,
    Corrupt,
    NotFound,
    StoreMissing,
    StoreUnreachable,
    Unsupported,
)
from sandkeep.store.lease import put_sealed
from sandkeep.store.objects import Objects, open_objects
from sandkeep.store.repository import Repository
from store_work import check, kept, live, mixed, save
from swift import Swift, swift  # noqa: F401


def test_round_trip_here_and_on_another_machine(opened: Open) -> None:
    blobs = [*mixed(1), b"", b"x"]
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
    blobs = mixed(2, 200, 10)
    repo = opened(over=over)
    ids = save(repo, "one", blobs)
    far = opened("elsewhere", over=over, create=False)
    check(far, ids, blobs)
    assert far.read(ids[5]) == blobs[5]
    assert list(far.list_records("t")) == ["one"]
    assert far.verify() == []
    save(far, "two", mixed(3))
    repo.delete_record("t", "one")
    assert repo.gc(lambda: live(repo)).removed_objects > 0
    check(opened("third", over=over), *kept(far, "two", mixed(3)))
    with pytest.raises(NotFound):
        far.get_record("t", "one")


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
    blobs = mixed(4)
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
        for blob in mixed(5):
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


def test_threads_share_a_repository(opened: Open) -> None:
    repo, blobs = opened(), mixed(12, 300)
    ids = save(repo, "one", blobs)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for k in random.Random(seed).sample(range(len(ids)), 60):
                assert repo.read(ids[k]) == blobs[k]
            save(repo, f"thread{seed}", mixed(100 + seed, 20, 0))
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
    blobs = mixed(13, 20)
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
    blobs = mixed(14)
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
