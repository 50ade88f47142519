"""Collecting: what a visible record needs is never removed, whoever writes, collects, stalls or dies meanwhile."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

import store_work
from conftest import Open
from faulty import Crash, Faulty
from sandkeep.errors import Busy, NotFound, SandkeepError, StateConflict
from sandkeep.store import holder
from sandkeep.store.lease import Lease, put_sealed
from sandkeep.store.objects import Objects, open_objects
from sandkeep.store.repository import Repository
from store_work import blobs_of, check_all, collect, save
from waiting import until


def age(tmp_path: Path, folder: str = "writers", seconds: float = 4000) -> None:
    """As if the backend's clock had gone on."""
    for path in (tmp_path / "store" / folder).iterdir():
        old = path.stat().st_mtime - seconds
        os.utime(path, (old, old))


def packs(objects: Objects) -> list[str]:
    return [name for name, _, _ in objects.list("packs/")]


def held(objects: Objects) -> int:
    return sum(size for part in ("packs/", "index/") for _, size, _ in objects.list(part))


def test_nothing_to_collect_changes_nothing(opened: Open, objects: Objects) -> None:
    repo = opened()
    save(repo, "one", blobs_of(1))
    before = [name for name, _, _ in objects.list("")]
    report = collect(repo)
    assert (report.removed_objects, report.freed_bytes, report.waiting_packs, report.missing_blobs) == (0, 0, 0, 0)
    assert [name for name, _, _ in objects.list("")] == before


def test_what_nobody_needs_goes_and_the_rest_stays(opened: Open, objects: Objects) -> None:
    repo = opened()
    for n in range(5):
        save(repo, f"n{n}", blobs_of(n))
    for n in range(3):
        repo.delete_record("t", f"n{n}")
    size = held(objects)
    forecast = collect(repo, dry_run=True)
    assert len(packs(objects)) == 5
    report = collect(repo)
    assert report.removed_objects == forecast.removed_objects >= 3
    assert report.freed_bytes == forecast.freed_bytes == size - held(objects)
    assert len(packs(objects)) == 2
    assert [name for name, _, _ in objects.list("gc/") if "condemned" in name] == []
    assert check_all(repo) == check_all(opened("far")) == 2
    assert repo.verify() == []
    save(repo, "again", blobs_of(0))
    assert check_all(opened("farther")) == 3


def test_everything_goes_when_no_record_is_left(opened: Open, objects: Objects) -> None:
    repo = opened()
    save(repo, "one", blobs_of(1))
    repo.delete_record("t", "one")
    collect(repo)
    assert [name for name, _, _ in objects.list("") if not name.startswith("gc/epoch")] == ["config"]


def test_sparse_and_many_small_packs_are_repacked(opened: Open, objects: Objects) -> None:
    repo = opened()
    shared = blobs_of(50, 3)
    save(repo, "wide", [*blobs_of(51, 60), *shared])
    save(repo, "narrow", shared)
    repo.delete_record("t", "wide")
    assert collect(repo).repacked_packs == 1
    assert len(packs(objects)) == 1
    for n in range(20):
        save(repo, f"n{n}", blobs_of(n, 2))
    size, forecast = held(objects), collect(repo, dry_run=True)
    report = collect(repo)
    assert report.repacked_packs == 21
    assert report.freed_bytes == forecast.freed_bytes == size - held(objects)
    assert len(packs(objects)) == 1
    assert len(list(objects.list("index/"))) == 1
    assert check_all(repo) == check_all(opened("far")) == 21
    assert repo.verify() == []
    assert collect(repo).removed_objects == 0


def test_a_damaged_block_stays_where_it_is(opened: Open, objects: Objects, tmp_path: Path) -> None:
    repo = opened()
    large = [random.Random(n).randbytes(200_000) for n in range(6)]
    save(repo, "wide", large)
    save(repo, "narrow", large[:2])
    repo.delete_record("t", "wide")
    (name,) = packs(objects)
    whole = objects.get(name)
    (tmp_path / "store" / name).write_bytes(whole[:1000] + bytes([whole[1000] ^ 1]) + whole[1001:])
    assert collect(repo).repacked_packs == 0
    assert packs(objects) == [name]
    objects.put(name, whole)
    assert collect(repo).repacked_packs == 1
    assert check_all(opened("far")) == 1


def test_packs_without_index_go_but_not_while_their_writer_works(
    opened: Open, objects: Objects, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandkeep.store.writer.PACK_SIZE", 500)
    monkeypatch.setattr("sandkeep.store.writer.GROUP", 300)
    writing, collecting = opened("w"), opened("c")
    with writing.writer() as writer:
        ids = [writer.add(blob) for blob in blobs_of(2, 30)]
        until(lambda: packs(objects), "a pack")
        assert collect(collecting).waiting_packs > 0
        writer.publish("t", "one", b"".join(ids))
    assert check_all(collecting) == 1
    collect(collecting)
    assert check_all(opened("far")) == 1
    objects.put("packs/0123", b"left by a crash")
    collect(collecting)
    assert "packs/0123" not in packs(objects)


def test_a_writer_that_counts_on_a_condemned_pack_keeps_it(opened: Open, objects: Objects) -> None:
    one, two = opened("one"), opened("two")
    save(one, "old", blobs_of(3))
    with two.writer() as writer:
        one.delete_record("t", "old")
        assert collect(one).waiting_packs == 1
        ids = [writer.add(blob) for blob in blobs_of(3)]
        writer.flush()
        assert writer.new_blobs == 0
        assert collect(one).waiting_packs == 1
        writer.publish("t", "new", b"".join(ids))
    assert collect(one).waiting_packs == 0
    assert check_all(opened("far")) == 1
    assert len(packs(objects)) == 1


def test_a_writer_that_comes_later_does_not_count_on_a_condemned_pack(opened: Open, objects: Objects) -> None:
    one, two, three = opened("one"), opened("two"), opened("three")
    save(one, "old", blobs_of(4))
    three.refresh()
    with two.writer():
        one.delete_record("t", "old")
        assert collect(one).waiting_packs == 1
        with three.writer() as late:
            ids = [late.add(blob) for blob in blobs_of(4)]
            late.flush()
            assert late.new_blobs == len(set(ids))
            late.publish("t", "new", b"".join(ids))
    assert collect(one).removed_objects >= 1
    assert len(packs(objects)) == 1
    assert check_all(opened("far")) == 1


def test_a_lapsed_writer_publishes_nothing(opened: Open, objects: Objects, tmp_path: Path) -> None:
    """The backend's clock says its lease has lapsed, its own says not: the collector's mark decides."""
    one, two = opened("one"), opened("two")
    save(one, "old", blobs_of(5))
    with two.writer() as writer:
        ids = [writer.add(blob) for blob in blobs_of(5)]
        one.delete_record("t", "old")
        age(tmp_path)
        assert collect(one).removed_objects >= 1
        with pytest.raises(StateConflict):
            writer.publish("t", "new", b"".join(ids))
    assert list(one.list_records("t", full=True)) == []
    assert packs(objects) == []


def test_a_writer_whose_own_clock_says_lapsed_publishes_nothing(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = opened()
    with repo.writer() as writer:
        blob = writer.add(b"x")
        writer.flush()
        later = time.clock_gettime(time.CLOCK_BOOTTIME) + 700
        monkeypatch.setattr("sandkeep.store.lease.now", lambda: later)
        with pytest.raises(StateConflict):
            writer.publish("t", "one", blob)
    assert list(repo.list_records("t")) == []


def test_a_lease_is_kept_fresh(objects: Objects) -> None:
    lease = Lease(objects, "writer", 2.0)
    lease.begin()
    try:
        first = next(iter(objects.list("writers/")))[2]
        until(lambda: next(iter(objects.list("writers/")))[2] > first, "the lease to be renewed")
    finally:
        lease.end()
    assert list(objects.list("writers/")) == []


def test_one_collector_at_a_time(opened: Open, objects: Objects, tmp_path: Path) -> None:
    repo = opened()
    save(repo, "one", blobs_of(6))
    other = Lease(objects, "gc")
    other.begin()
    try:
        with pytest.raises(Busy):
            collect(repo)
        age(tmp_path)
        collect(repo)
    finally:
        other.end()


def test_a_failing_live_removes_nothing(opened: Open, objects: Objects) -> None:
    repo = opened()
    save(repo, "one", blobs_of(7))
    before = packs(objects)
    for good in (0, 1):
        calls: list[int] = []

        def broken(good: int = good, calls: list[int] = calls) -> list[bytes]:
            calls.append(1)
            if len(calls) > good:
                raise NotFound("a record can't be read")
            return []

        with pytest.raises(NotFound):
            repo.gc(broken)
        assert packs(objects) == before
    collect(repo)
    assert check_all(repo) == 1


def test_a_damaged_mark_stops_writers_until_gc_has_removed_it(opened: Open, objects: Objects) -> None:
    repo = opened()
    save(repo, "one", blobs_of(8))
    objects.put("gc/condemned-x", b"nonsense")
    with pytest.raises(SandkeepError, match="gc"):
        save(repo, "two", blobs_of(9))
    collect(repo)
    save(repo, "two", blobs_of(9))
    assert check_all(repo) == 2


def test_leftovers_of_crashed_processes_go(opened: Open, objects: Objects, tmp_path: Path) -> None:
    repo = opened()
    save(repo, "one", blobs_of(10))
    for name in ("tmp/half", "expired/old", "writers/dead"):
        objects.put(name, b"x")
    collect(repo)
    assert objects.size("tmp/half") is not None
    for folder in ("tmp", "expired", "writers"):
        age(tmp_path, folder, 100_000)
    save(repo, "gone", blobs_of(11))
    repo.delete_record("t", "gone")
    collect(repo)
    assert [objects.size(name) for name in ("tmp/half", "expired/old", "writers/dead")] == [None] * 3


@pytest.mark.parametrize("kind", ["crash", "crash after"])
def test_death_at_every_step(tmp_path: Path, kind: str) -> None:
    """A writer or a collector dies before or after each of its operations. Everything earlier can be read at once; the next
    collector leaves the store clean."""
    with Repository.open(open_objects(tmp_path / "begin/store"), tmp_path / "begin/c") as repo:
        for n in range(4):
            save(repo, f"n{n}", [*blobs_of(n, 4), *blobs_of(99, 2)])
        for n in range(3):
            repo.delete_record("t", f"n{n}")
    step, over = 0, False
    while not over:
        folder = tmp_path / f"{kind[-1]}{step}"
        shutil.copytree(tmp_path / "begin", folder)
        objects = open_objects(folder / "store")
        faulty = Faulty(objects, lambda n, verb, name, step=step: kind if n == step else None)  # type: ignore[misc]
        try:
            with Repository.open(faulty, folder / "c") as dying:
                save(dying, "new", [*blobs_of(7, 4), *blobs_of(0, 2)])
                collect(dying)
                over = len(faulty.log) <= step
        except Crash:
            pass
        for path in (folder / "store/writers").iterdir():
            os.utime(path, (path.stat().st_mtime - 4000,) * 2)
        with Repository.open(objects, folder / "far") as repo:
            known = set(repo.list_records("t", full=True))
            assert known in ({"n3"}, {"n3", "new"})
            assert check_all(repo) == len(known)
            save(repo, "more", [*blobs_of(1, 4), *blobs_of(2, 4)])
            collect(repo)
            assert check_all(repo) == len(known) + 1
            assert repo.verify() == []
            indexed = {str(row[0]) for row in repo.index.rows("SELECT name FROM pack")}
            assert set(packs(objects)) == indexed
            assert not [name for name, _, _ in objects.list("") if name.startswith(("writers/", "gc/condemned"))]
        step += 1
    assert step > 30


def start(tmp_path: Path, verb: str, seed: int, seconds: float) -> subprocess.Popen[bytes]:
    command = [sys.executable, store_work.__file__, verb, tmp_path, str(seed), str(time.time() + seconds)]
    # Unbuffered: what `begun` reads ahead, `communicate` would never see.
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0)


def begun(job: subprocess.Popen[bytes]) -> None:
    """Returns when the process has done its first round."""
    assert job.stdout is not None
    assert job.stdout.readline() == b"begun\n", job.communicate(timeout=60)


def test_many_writers_and_collectors_lose_nothing(tmp_path: Path) -> None:
    Repository.open(open_objects(tmp_path / "store"), tmp_path / "first").close()
    jobs = [start(tmp_path, "write", n, 8) for n in range(5)] + [
        start(tmp_path, "collect", 100 + n, 8) for n in range(2)
    ]
    expected: set[str] = set()
    for job in jobs:
        begun(job)
    for job in jobs:
        out, err = job.communicate(timeout=150)
        assert job.returncode == 0, err
        expected.update(out.decode().split())
    with Repository.open(open_objects(tmp_path / "store"), tmp_path / "last") as repo:
        assert set(repo.list_records("t", full=True)) == expected
        assert check_all(repo) == len(expected)
        collect(repo)
        assert check_all(repo) == len(expected)
        assert repo.verify() == []


def test_killed_writers_and_collectors_lose_nothing(tmp_path: Path) -> None:
    """SIGKILL at random moments; what was acknowledged stays."""
    objects = open_objects(tmp_path / "store")
    with Repository.open(objects, tmp_path / "first") as repo:
        for n in range(6):
            save(repo, f"keep{n}", blobs_of(n))
    dice = random.Random(5)
    for turn in range(4):
        jobs = [start(tmp_path, "write", turn * 10 + n, 100) for n in range(2)] + [
            start(tmp_path, "collect", turn, 100)
        ]
        for job in jobs:
            begun(job)
        time.sleep(dice.random() / 2)
        for job in jobs:
            job.kill()
            job.communicate(timeout=60)
        age(tmp_path)
        with Repository.open(objects, tmp_path / f"after{turn}") as repo:
            assert check_all(repo) >= 6
            assert repo.verify() == []
    with Repository.open(objects, tmp_path / "last") as repo:
        collect(repo)
        assert {f"keep{n}" for n in range(6)} <= set(repo.list_records("t"))
        assert check_all(repo) >= 6
        assert repo.verify() == []


HOLDER = """
import sys, time
from pathlib import Path
from sandkeep.store import holder
from sandkeep.store.lease import Lease, put_sealed
from sandkeep.store.objects import open_objects
objects = open_objects(Path(sys.argv[1]))
lease = Lease(objects, sys.argv[2])
lease.begin()
objects.put("packs/0123", b"half a work")
print("held", flush=True)
time.sleep(1000)
"""


@pytest.mark.parametrize("role", ["gc", "writer"])
@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_process_of_this_host_stands_in_nobodys_way(
    opened: Open, objects: Objects, tmp_path: Path, role: str, reaped: bool
) -> None:
    repo = opened()
    save(repo, "one", blobs_of(6))
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, tmp_path / "store", role], stdout=subprocess.PIPE, text=True
    ) as job:
        try:
            assert job.stdout is not None
            assert job.stdout.readline() == "held\n"
            if role == "gc":
                with pytest.raises(Busy):
                    collect(repo)
            else:
                assert collect(repo).waiting_packs == 1
        finally:
            job.kill()
        if reaped:
            job.wait(60)
        else:
            os.waitid(os.P_PID, job.pid, os.WEXITED | os.WNOWAIT)
        assert collect(repo).waiting_packs == 0
    assert "packs/0123" not in packs(objects)
    assert list(objects.list("writers/")) == []
    assert check_all(repo) == 1


def test_who_may_live_is_not_taken_for_dead(opened: Open, objects: Objects, tmp_path: Path) -> None:
    repo = opened()
    save(repo, "one", blobs_of(6))
    me, gone = holder.here(), {**holder.here(), "pid": 2**22 + 1, "direct": True}
    alive = [me, {}, None, 5, "x", [], {"pid": 1}, {**me, "pid": 0}, {**me, "pid": -1}, {**me, "pid": 2**63}]
    alive += [{**gone, name: value} for name, value in (("boot", "x"), ("pids", 1))]
    for one in alive:
        put_sealed(objects, "writers/other", {"role": "gc", "seen": [], "holder": one})
        with pytest.raises(Busy):
            collect(repo)
    for one in (gone, {**me, "start": 1, "direct": True}):
        put_sealed(objects, "writers/other", {"role": "gc", "seen": [], "holder": one})
        collect(repo)
    asked_of_a_server = {**gone, "direct": False}
    put_sealed(objects, "writers/other", {"role": "gc", "seen": [], "holder": asked_of_a_server})
    with pytest.raises(Busy):
        collect(repo)
    age(tmp_path, seconds=400)
    collect(repo)
