"""Records: they never change, others' are seen at once, and the newest of many cost no more than of few."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from conftest import Open
from sandkeep.errors import BadArgument, NotFound, StateConflict
from sandkeep.store.format import record_name
from sandkeep.store.objects import Objects


def test_records_never_change(opened: Open) -> None:
    repo = opened()
    repo.put_record("names", "n1", b"data")
    with pytest.raises(StateConflict):
        repo.put_record("names", "n1", b"other")
    with repo.writer() as writer, pytest.raises(StateConflict):
        writer.publish("names", "n1", b"other")
    assert repo.get_record("names", "n1") == b"data"
    repo.delete_record("names", "n1")
    with pytest.raises(NotFound):
        repo.get_record("names", "n1")
    for bad in ("", "../x", "a/b/../c", ".x"):
        with pytest.raises(BadArgument):
            repo.put_record("names", bad, b"")


@pytest.mark.parametrize("backwards", [True, False])
def test_listing_records_follows_others(
    opened: Open, objects: Objects, monkeypatch: pytest.MonkeyPatch, backwards: bool
) -> None:
    monkeypatch.setattr("sandkeep.store.records.WINDOW", 10)
    if not backwards:
        objects.newest = lambda prefix: None  # type: ignore[method-assign]
    one, two = opened("one"), opened("two")
    names = [f"r{n:04}" for n in range(450)]
    for name in names:
        one.put_record("k", name, name.encode())
    assert list(two.list_records("k")) == names
    assert list(two.list_records("k", newest_first=True)) == names[::-1]
    assert list(two.list_records("k", after="r0440")) == names[441:]
    assert list(two.list_records("k", after="r0440", newest_first=True)) == names[:440:-1]
    one.put_record("k", "r0450", b"new")
    one.delete_record("k", "r0449")
    assert list(two.list_records("k", after="r0447")) == ["r0448", "r0450"]
    one.delete_record("k", "r0001")
    assert "r0001" not in two.list_records("k", full=True)
    assert two.get_record("k", "r0005", cached=True) == b"r0005"
    one.delete_record("k", "r0005")
    assert two.get_record("k", "r0005", cached=True) == b"r0005"
    with pytest.raises(NotFound):
        two.get_record("k", "r0005")


def test_the_newest_of_many_are_found_in_few_folders(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = opened("one"), opened("two")
    names = [f"ck_{n:09}{'x' * 17}" for n in range(0, 300_000, 100)]
    for name in names:
        path = tmp_path / "store" / record_name("k", name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert list(two.list_records("k")) == names
    one.put_record("k", newest := f"ck_{1:09}{'y' * 17}", b"x")
    assert newest in two.list_records("k", newest_first=True)
    one.put_record("k", newest := f"ck_{900_000:09}{'y' * 17}", b"x")
    looked: list[object] = []
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: looked.append(path) or scandir(path))
    found = two.list_records("k", newest_first=True)
    assert [next(found) for _ in range(10)] == [newest, *names[:-10:-1]]
    assert len(looked) < 20


def test_the_newest_records_take_few_requests_among_many(opened: Open, objects: Objects, tmp_path: Path) -> None:
    objects.newest = lambda prefix: None  # type: ignore[method-assign]
    repo = opened()
    folder = tmp_path / "store/records/k"
    folder.mkdir(parents=True)
    for n in range(3_000):
        (folder / f"r{n:05}").write_bytes(b"x")
    assert next(repo.list_records("k", newest_first=True)) == "r02999"
    listed: list[int] = []
    inner = objects.list

    def count(prefix: str, after: str = "") -> object:
        rows = list(inner(prefix, after))
        listed.append(len(rows))
        return iter(rows)

    objects.list = count  # type: ignore[method-assign,assignment]
    repo.put_record("k", "r99999", b"x")
    assert next(repo.list_records("k", newest_first=True)) == "r99999"
    assert sum(listed) <= 1001
