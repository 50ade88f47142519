"""The orders that docs/design.md, section 7, rests on, each where another order would lose something."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import Open
from faulty import Faulty
from sandkeep.errors import Corrupt, StateConflict
from sandkeep.store import lease as leases
from sandkeep.store.lease import Lease
from sandkeep.store.objects import Objects
from sandkeep.store.writer import Writer
from store_work import blobs_of, check_all, collect, save


def once(objects: Objects, verb: str, prefix: str, first: Callable[[], object]) -> Faulty:
    """These objects; before such an operation, the first time, something else happens."""
    done: list[object] = []

    def fault(_: int, what: str, name: str) -> None:
        if what == verb and name.startswith(prefix) and not done:
            done.append(True)
            first()

    return Faulty(objects, fault)


def add_one_by_one(writer: Writer, blobs: list[bytes]) -> list[bytes]:
    return [writer.add(blob) for blob in blobs]


def add_later(writer: Writer, blobs: list[bytes]) -> list[bytes]:
    return [writer.later(lambda add, blob=blob: add(blob)).result() for blob in blobs]  # type: ignore[misc]


def add_as_pieces(writer: Writer, blobs: list[bytes]) -> list[bytes]:
    ends = [sum(map(len, blobs[: at + 1])) for at in range(len(blobs))]
    return writer.add_pieces(memoryview(b"".join(blobs)), ends).result()


WAYS = pytest.mark.parametrize("add", [add_one_by_one, add_later, add_as_pieces])


@WAYS
def test_a_collector_that_ends_before_a_writers_lease_is_seen(
    opened: Open, objects: Objects, add: Callable[[Writer, list[bytes]], list[bytes]]
) -> None:
    one = opened("one")
    save(one, "old", blobs_of(3))

    def gone() -> None:
        one.delete_record("t", "old")
        assert collect(one).removed_objects

    two = opened("two", over=once(objects, "put", "writers/", gone))
    two.refresh()
    with two.writer() as writer:
        writer.publish("t", "new", b"".join(add(writer, blobs_of(3))))
    assert check_all(opened("far")) == 1


@WAYS
def test_nothing_condemned_is_counted_on(opened: Open, add: Callable[[Writer, list[bytes]], list[bytes]]) -> None:
    """It is removed between flush and record: this writer has said that it knows."""
    one, two, late = opened("one"), opened("two"), opened("late")
    save(one, "old", blobs_of(4))
    late.refresh()
    with two.writer():
        one.delete_record("t", "old")
        assert collect(one).waiting_packs == 1
        writer = late.writer().__enter__()
    try:
        ids = add(writer, blobs_of(4))
        writer.flush()
        assert collect(one).removed_objects
        writer.publish("t", "new", b"".join(ids))
    finally:
        writer.__exit__(None, None, None)
    assert check_all(opened("far")) == 1


def test_an_older_listing_never_overwrites_a_newer_one(opened: Open, objects: Objects) -> None:
    """Two processes share a cache; one of them stalls between what it has read and its commit."""
    one = opened("one")
    save(one, "old", blobs_of(5))
    stalled, go_on = threading.Event(), threading.Event()
    slow = Faulty(objects)

    def get(name: str, offset: int = 0, length: int | None = None) -> bytes:
        data = objects.get(name, offset, length)
        if name.startswith("index/"):
            stalled.set()
            assert go_on.wait(60)
        return data

    old = opened("shared", over=slow)
    new = opened("shared")
    slow.get = get  # type: ignore[method-assign]
    inside, older_done = threading.Event(), threading.Event()

    def write() -> None:
        with new.writer() as writer:
            inside.set()
            assert older_done.wait(60)
            writer.publish("t", "new", b"".join(add_one_by_one(writer, blobs_of(5))))

    with ThreadPoolExecutor(2) as pool:
        older = pool.submit(old.refresh)
        assert stalled.wait(60)
        one.delete_record("t", "old")
        assert collect(one).removed_objects
        newer = pool.submit(write)
        inside.wait(1)  # it comes only after the other's commit
        go_on.set()
        older.result()
        older_done.set()
        newer.result()
    assert check_all(opened("far")) == 1


def test_a_lease_counts_from_before_its_renewal(objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend may have taken its time when the put began."""
    clock = [1000.0]
    monkeypatch.setattr(leases, "now", lambda: clock[0])

    def hang(_: int, verb: str, name: str) -> None:
        clock[0] += 500 if verb == "put" else 0

    lease = Lease(Faulty(objects, hang), "writer", 900)
    lease.begin()
    try:
        clock[0] += 90
        lease.check()
        clock[0] += 20
        with pytest.raises(StateConflict):
            lease.check()
    finally:
        lease.end()


def test_the_steps_of_a_removal_come_in_order(opened: Open, objects: Objects) -> None:
    watched = Faulty(objects)
    repo = opened(over=watched)
    shared = blobs_of(50, 3)
    save(repo, "wide", [*blobs_of(51, 60), *shared])
    save(repo, "narrow", shared)
    save(repo, "gone", blobs_of(52))
    collect(repo)
    for name in ("wide", "gone"):
        repo.delete_record("t", name)
    watched.log.clear()
    assert collect(repo).repacked_packs
    seen = [(verb, "/".join(name.split("/")[:1]) if name.startswith(("packs", "index")) else name.split("-")[0])
            for verb, name in watched.log if verb in ("put", "delete")]  # fmt: skip

    def first(verb: str, what: str) -> int:
        return seen.index((verb, what))

    def last(verb: str, what: str) -> int:
        return len(seen) - 1 - seen[::-1].index((verb, what))

    (lease,) = {what for verb, what in seen if verb == "put" and what.startswith("writers/")}
    order = [
        first("put", lease),
        first("put", "packs"),
        first("put", "index"),
        first("put", "gc/condemned"),
        first("delete", "index"),
        last("delete", "index"),
        first("put", "gc/epoch"),
        first("delete", "packs"),
        last("delete", "packs"),
        first("delete", "gc/condemned"),
        last("delete", lease),
    ]
    assert order == sorted(order), seen


def test_the_steps_of_a_writer_come_in_order(opened: Open, objects: Objects, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sandkeep.store.writer.PACK_SIZE", 20_000)
    monkeypatch.setattr("sandkeep.store.writer.GROUP", 5_000)
    objects.put("gc/condemned-0", leases.seal_value("gc/condemned-0", {"packs": ["packs/0"]}))
    watched = Faulty(objects)
    repo = opened(over=watched)
    watched.log.clear()
    with repo.writer() as writer:
        ids = add_later(writer, blobs_of(1, 200))
        writer.publish("t", "one", b"".join(ids))
    steps = [f"{verb} {name.split('/')[0]}" for verb, name in watched.log]
    begun = steps.index("put packs")
    assert steps[:3] == ["put writers", "list gc", "get gc"]
    assert steps.index("put writers", 1) < begun  # it says what it has seen
    assert steps.count("put packs") > 2
    puts = [step for step in steps[begun:] if step.startswith(("put", "delete"))]
    assert puts == [*["put packs"] * steps.count("put packs"), "put index", "put records", "delete writers"]
    assert steps.index("put records") < len(steps) - 1 - steps[::-1].index("size expired")


def test_a_record_put_as_a_lease_is_given_up_is_withdrawn(opened: Open, objects: Objects) -> None:
    repo = opened("one", over=once(objects, "put", "records/", lambda: mark()))

    def mark() -> None:
        ((name, _, _),) = objects.list("writers/")
        leases.put_sealed(objects, f"expired/{name.removeprefix('writers/')}", {})

    with repo.writer() as writer:
        ids = add_one_by_one(writer, blobs_of(2))
        with pytest.raises(StateConflict):
            writer.publish("t", "one", b"".join(ids))
    assert list(objects.list("records/")) == []


def test_what_is_published_while_a_collector_condemns_stays(opened: Open, objects: Objects) -> None:
    """Live blobs are read again after the last writer that may count on what goes has ended."""
    two = opened("two")
    save(two, "old", blobs_of(6))
    writer = two.writer().__enter__()
    ids = add_one_by_one(writer, blobs_of(6))
    writer.flush()
    assert writer.new_blobs == 0

    def publish() -> None:
        writer.publish("t", "new", b"".join(ids))
        writer.__exit__(None, None, None)

    two.delete_record("t", "old")
    one = opened("one", over=once(objects, "put", "gc/condemned-", publish))
    collect(one)
    assert check_all(opened("far")) == 1
    collect(one)
    assert check_all(opened("farther")) == 1


def test_of_two_condemned_copies_one_stays(opened: Open, objects: Objects) -> None:
    one, two = opened("one"), opened("two")
    blobs = blobs_of(8)
    with one.writer() as first, two.writer() as second:
        for writer in (first, second):
            ids = add_one_by_one(writer, blobs)
        first.flush()
        second.flush()
    names = [name for name, _, _ in objects.list("packs/")]
    assert len(names) == 2
    for number, name in enumerate(names):
        mark = f"gc/condemned-{number}"
        leases.put_sealed(objects, mark, {"packs": [name]})
    one.put_record("t", "one", b"".join(ids))
    collect(opened("far"))
    assert check_all(opened("farther")) == 1
    assert len(list(objects.list("packs/"))) == 1


def test_a_blob_is_never_given_with_another_content(opened: Open, objects: Objects, tmp_path: Path) -> None:
    """Even where the block's own sum is right: what was stored is not what was named."""
    repo = opened()
    ids = save(repo, "one", [bytes([n]) * 200_000 for n in range(1, 3)])
    (name,) = [name for name, _, _ in objects.list("packs/")]
    places = sorted(repo.index.places(ids), key=lambda place: place.offset)
    data = bytearray(objects.get(name))
    first, second = (data[place.offset : place.offset + place.stored] for place in places)
    if len(first) != len(second):
        pytest.fail("blocks of one length are needed")
    data[places[0].offset : places[0].offset + places[0].stored] = second
    data[places[1].offset : places[1].offset + places[1].stored] = first
    objects.put(name, bytes(data))
    for reader in (repo, opened("far")):
        for blob in ids:
            with pytest.raises(Corrupt):
                reader.read(blob)
        with pytest.raises(Corrupt):
            list(reader.read_many(ids))
    assert any(problem.object == name for problem in repo.verify())


def test_what_a_crash_left_today_is_left_alone(opened: Open, objects: Objects) -> None:
    """It may be somebody's who is at work."""
    objects.put("tmp/half", b"x")
    collect(opened())
    assert objects.size("tmp/half") is not None


def test_an_index_object_goes_only_when_what_it_says_is_said_again(
    opened: Open, objects: Objects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sandkeep.store.gc.MANY", 4)
    monkeypatch.setattr("sandkeep.store.gc.SMALL", 0)  # the packs stay as they are
    watched = Faulty(objects)
    repo = opened(over=watched)
    for number in range(5):
        save(repo, f"n{number}", blobs_of(number))
    watched.log.clear()
    assert collect(repo).removed_objects
    steps = [verb for verb, name in watched.log if verb in ("put", "delete") and name.startswith("index/")]
    assert steps.index("delete") > len(steps) - 1 - steps[::-1].index("put")
    assert check_all(opened("far")) == 5
