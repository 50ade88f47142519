"""The index of what clients keep under `/storage`, on both databases, and the order in which rows and bytes come and go."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sandkeep.errors import Corrupt, NotFound, StoreFull, StoreUnreachable
from sandkeep.server.gateway import Gateway
from sandkeep.server.settings import Settings
from sandkeep.server.spaces import Spaces
from sandkeep.sessions import Database, Scope, Storage
from sessions_kit import ANN, run

pytest_plugins = ["postgres", "sessions_kit"]

OTHERS = [Scope("ann", "garden"), Scope("bob"), Scope("ann garden")]


def kept(rows: Storage, scope: Scope, name: str, size: int = 1) -> list[str]:
    return rows.publish(scope, name, rows.arrive(scope, name, size, "0" * 64))


def names(rows: Storage, scope: Scope = ANN, prefix: str = "", after: str = "", limit: int = 100) -> list[str]:
    return [name for name, _, _ in rows.list(scope, prefix, after, limit)]


def test_names_are_each_scopes_own_and_sorted_by_their_bytes(db: Database) -> None:
    rows = Storage(db)
    wanted = sorted(["b/a", "b-a", "b_a", "B/a", "b/B", "b.a", "b/a/c", "ba", "a", "b/_", "b/z"])
    for name in reversed(wanted):
        assert kept(rows, ANN, name) == []
    assert names(rows) == wanted
    assert names(rows, prefix="b/") == [name for name in wanted if name.startswith("b/")]
    assert names(rows, after="b.a", limit=2) == ["b/B", "b/_"]
    for other in OTHERS:
        assert names(rows, other) == []
        assert rows.withdraw(other, wanted) == []
        assert rows.find(other, "a") is None
    assert len(rows.withdraw(ANN, ["a", "ba", "absent"])) == 2
    assert names(rows) == [name for name in wanted if name not in ("a", "ba")]


def test_what_arrives_is_not_seen_until_it_is_published(db: Database) -> None:
    rows = Storage(db)
    place = rows.arrive(ANN, "a", 1, "0" * 64)
    assert names(rows) == []
    assert rows.publish(ANN, "a", place) == []
    assert rows.publish(ANN, "a", rows.arrive(ANN, "a", 2, "1" * 64)) == [place]
    assert [size for _, size, _ in rows.list(ANN, "", "", 10)] == [2]
    with pytest.raises(StoreUnreachable):
        rows.publish(ANN, "b", "was swept")
    assert [one.place for one in rows.lapsed(0)] == [place]
    assert rows.lapsed(3600) == []
    rows.gone([place])
    assert rows.lapsed(0) == []


def test_a_quota_holds_for_all_servers_and_counts_what_arrives(db: Database) -> None:
    rows, elsewhere = Storage(db, 10), Storage(db, 10)
    kept(rows, ANN, "a", 6)
    arriving = elsewhere.arrive(ANN, "b", 4, "0" * 64)
    with pytest.raises(StoreFull):
        rows.arrive(ANN, "c", 1, "0" * 64)
    kept(rows, OTHERS[0], "c", 10)
    left = kept(elsewhere, ANN, "a", 5)
    elsewhere.publish(ANN, "b", arriving)
    rows.gone(left)
    kept(rows, ANN, "c", 1)

    def race(n: int) -> bool:
        try:
            rows.arrive(OTHERS[1], f"x{n}", 3, "0" * 64)
        except StoreFull:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(race, range(8))) == 3


def test_many_at_once_give_one_name_to_one_object(db: Database) -> None:
    rows = Storage(db)
    with ThreadPoolExecutor(8) as pool:
        left = [place for some in pool.map(lambda n: kept(rows, ANN, "a", n), range(40)) for place in some]
    assert names(rows) == ["a"]
    assert len(set(left)) == 39
    found = rows.find(ANN, "a")
    assert found is not None
    assert {one.place for one in rows.lapsed(0)} == set(left)
    assert found.place not in left


async def body(data: bytes) -> AsyncIterator[bytes]:
    yield data


def bytes_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_what_a_dead_server_left_goes_and_what_is_damaged_is_never_served(db: Database, tmp_path: Path) -> None:
    spaces = Spaces(Settings(home=tmp_path, store=str(tmp_path / "store")))
    gateway, rows = Gateway(db, spaces, 0), Storage(db)

    async def put(name: str, data: bytes) -> None:
        await gateway.put(ANN, name, body(data), hashlib.sha256(data).hexdigest())

    async def go() -> None:
        await put("a", b"one")
        (first,) = bytes_in(tmp_path / "store")
        await put("a", b"two")
        assert not first.exists()
        assert await gateway.get(ANN, "a") == b"two"
        assert await gateway.get(ANN, "a", 1, 1) == b"w"
        objects = spaces.objects(ANN.user, ANN.project)
        objects.put(rows.arrive(ANN, "b", 4, "0" * 64), b"died")  # before it was published
        await put("c", b"leaving")
        rows.withdraw(ANN, ["c"])  # and died before the bytes went
        assert len(bytes_in(tmp_path / "store")) == 3
        await gateway.sweep(3600)
        assert len(bytes_in(tmp_path / "store")) == 3
        await gateway.sweep(0)
        (path,) = bytes_in(tmp_path / "store")
        assert rows.lapsed(0) == []
        path.write_bytes(b"bad")
        with pytest.raises(Corrupt):
            await gateway.get(ANN, "a")
        path.unlink()
        with pytest.raises(Corrupt):
            await gateway.get(ANN, "a")
        with pytest.raises(NotFound):
            await gateway.get(ANN, "b")

    run(go())
