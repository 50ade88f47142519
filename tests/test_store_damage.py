"""Damage: any changed byte is found and refused, a second copy is used, hostile sizes take no memory."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from conftest import Open
from faulty import Faulty
from sandkeep.errors import Corrupt, NotFound
from sandkeep.store import format as fmt
from sandkeep.store.lease import put_sealed
from sandkeep.store.objects import Objects, open_objects
from sandkeep.store.repository import Repository
from store_work import check, check_all, collect, ids_in, live, mixed, save


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
    ids = save(repo, "one", mixed(6, 5, 0))
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
    repo, blobs = opened(), mixed(7, 10)
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
    repo, blobs = opened(), mixed(8)
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
    name, pack = "index/zz", f"packs/{fmt.unique()}"
    block = fmt.Block(8, len(bomb), 1000, 0, 1)
    objects.put(pack, fmt.PACK + bomb)
    objects.put(name, fmt.index_object(name, [fmt.PackIndex(pack, [block], bytes(32), fmt.array("I", [1000]))]))
    repo.refresh()
    with pytest.raises((Corrupt, NotFound)):
        repo.read(bytes(32))
    lying = fmt.Block(8, 10, 5 << 30 & 0xFFFFFFFF, 0, 1)
    index = fmt.PackIndex(pack, [lying], bytes(32), fmt.array("I", [lying.raw]))
    good = fmt.unseal(name, objects.get(name))
    for number, payload in enumerate(
        [
            fmt.unseal(name, fmt.index_object(name, [index])),
            b"",
            b"\xff\xff\xff\xff" + good[4:],
            bytes(4) + good[4:],
            good[:19],
            good[:19] + fmt.compress(b"\xff" * 8, 1),
            good[:19] + fmt.compress(bytes(8) * 2, 1),
            good[:19] + bomb,
        ]
    ):
        objects.put(name, fmt.seal(name, payload))
        fresh = opened(f"fresh{number}")
        fresh.refresh()
        assert name in fresh.index.bad() or fresh.verify(), number


def test_a_pack_under_a_name_of_no_writer_is_left_over(opened: Open, objects: Objects) -> None:
    repo = opened()
    save(repo, "one", mixed(4))
    (name,) = [name for name, _, _ in objects.list("packs/")]
    objects.put("packs/0123", objects.get(name))
    objects.put("index/zz", b"damaged")
    repo.gc(lambda: live(repo))
    assert [name for name, _, _ in objects.list("packs/")] == [name]
    assert repo.verify() == []


def _story(repo: Repository) -> None:
    """Everything that reads: what was saved, the index, marks and leases of others, for writers, readers, collectors, verification."""
    assert check_all(repo) == 3
    for name in ("one", "two", "three"):
        ids = ids_in(repo.get_record("t", name, cached=True))
        assert [fmt.sha256(repo.read(blob)) for blob in ids] == ids
    save(repo, "four", mixed(4, 5, 0))
    repo.delete_record("t", "one")
    assert collect(repo, dry_run=True).removed_objects
    assert collect(repo).waiting_packs
    assert check_all(repo) == 3
    for read_data in (True, False):
        assert repo.verify(read_data) == []


def test_a_byte_changed_on_the_wire_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is read, once it comes with a changed byte: nothing fails, nothing is called damaged, nothing is removed for it."""
    monkeypatch.setattr("sandkeep.store.gc.MANY", 3)
    begin = root / "begin"
    with Repository.open(open_objects(begin / "store"), begin / "cache") as repo:
        for number, name in enumerate(("one", "two", "three")):
            save(repo, name, [*mixed(number, 3, 1), b"in all" * 100])

        put_sealed(repo.objects, "gc/condemned-0", {"packs": []})
        put_sealed(repo.objects, "writers/0", {"role": "writer", "seen": ["gc/condemned-0"]})

    step, over = 0, False
    while not over:
        folder = root / str(step)
        shutil.copytree(begin / "store", folder / "store")
        asked: list[str] = []

        def flip(n: int, verb: str, name: str, step: int = step, asked: list[str] = asked) -> str | None:
            if verb == "get":
                asked.append(name)
            return "flip" if verb == "get" and len(asked) == step + 1 else None

        faulty = Faulty(open_objects(folder / "store"), flip)
        with Repository.open(faulty, folder / "cache") as repo:
            _story(repo)
        over = len(asked) <= step
        shutil.rmtree(folder)
        step += 1
    assert step > 30
