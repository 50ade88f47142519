"""Letting go of checkpoints: what is forgotten, what that frees, what stays readable; and what is damaged is named."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from faulty import Crash, Faulty
from sandkeep.checkpoints import records, retention, undoing
from sandkeep.checkpoints.browse import Tree
from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.needs import needed
from sandkeep.checkpoints.retention import Keep, choose, parse_span, scaled
from sandkeep.checkpoints.unpack import unpack
from sandkeep.errors import BadArgument, CheckpointNotFound, Corrupt, NotFound, StateConflict
from sandkeep.store.format import record_name
from sandkeep.store.repository import Repository
from trees import put


def held(root: Path) -> int:
    """Bytes of packs and index, where checkpoints' contents are."""
    return sum(
        path.stat().st_size
        for part in ("packs", "index")
        for path in (root / "store" / part).rglob("*")
        if path.is_file()
    )


def words(dice: random.Random, count: int) -> bytes:
    return " ".join(dice.choice(["alpha", "beta", "gamma", str(dice.randrange(9999))]) for _ in range(count)).encode()


def many_versions(root: Path, store: Store, dice: random.Random) -> None:
    files = {f"d{n % 7}/f{n}": words(dice, 300) for n in range(120)}
    parent = None
    for _ in range(8):
        for name in dice.sample(sorted(files), 20):
            files[name] = words(dice, 300)
        parent = put(root, store, files, parent_id=parent)


def large_files_partly_changed(root: Path, store: Store, dice: random.Random) -> None:
    chunks = [dice.randbytes(256 << 10) for _ in range(40)]
    parent = None
    for _ in range(5):
        for number in dice.sample(range(40), 12):
            chunks[number] = dice.randbytes(256 << 10)
        parent = put(root, store, {"big": b"".join(chunks), "note": words(dice, 50)}, parent_id=parent)


def many_small(root: Path, store: Store, dice: random.Random) -> None:
    parent = None
    for number in range(20):
        parent = put(root, store, {f"d/f{number}": words(dice, 100)}, parent=parent)


def images_beside(root: Path, store: Store, dice: random.Random) -> None:
    image = root / "image"
    image.mkdir()
    same = dice.randbytes(400_000)
    parent = None
    for number in range(4):
        (image / "pages").write_bytes(dice.randbytes(500_000) + same)
        parent = put(root, store, {"f": b"%d" % number}, attachments={"memory": image}, parent_id=parent)


@pytest.mark.parametrize("history", [many_versions, large_files_partly_changed, many_small, images_beside])
def test_what_forgetting_frees_is_told_to_the_byte(
    root: Path, store: Store, history: Callable[[Path, Store, random.Random], None]
) -> None:
    history(root, store, random.Random(3))
    store.name("kept", store.checkpoints()[-1].id)
    garbage = store.gc(dry_run=True)
    plan = store.forget(keep_last=2, dry_run=True)
    assert [gone.bytes for gone in plan.forgotten] == [gone.bytes for gone in store.forget(keep_last=2).forgotten]
    assert sum(gone.bytes for gone in plan.forgotten) == plan.bytes > 0
    before, forecast = held(root), store.gc(dry_run=True)
    report = store.gc()
    assert report.freed_bytes == forecast.freed_bytes == garbage.freed_bytes + plan.bytes == before - held(root)
    assert report.removed_objects == forecast.removed_objects
    assert store.gc(dry_run=True).freed_bytes == store.gc().freed_bytes == 0
    assert store.verify() == []
    for number, info in enumerate(store.checkpoints()):
        unpack(store.repo, info.id, root / f"out{number}")


def test_looking_inside_after_gc_reads_what_describes_and_nothing_else(root: Path, store: Store) -> None:
    files = {f"d{n}/f{m}": os.urandom(2000) for n in range(40) for m in range(10)}
    one = put(root, store, files)
    two = put(root, store, dict(list(files.items())[::2]))
    store.forget([one])
    assert store.gc().repacked_packs
    watched = Faulty(store.repo.objects)
    got: list[int] = []
    inner = watched.inner.get
    watched.inner.get = lambda *args: got.append(len(data := inner(*args))) or data  # type: ignore[method-assign,func-returns-value]
    with Repository.open(watched, root / "fresh") as repo:
        got.clear()
        assert len(list(Tree(repo, load_record(repo, two).root).find("**/f2"))) == 40
    assert sum(got) < 60_000


def test_forgetting_frees_what_it_says_and_lineage_stays_readable(root: Path, store: Store) -> None:
    ids: list[str] = []
    for number in range(4):
        files = {f"own{number}": os.urandom(2_000_000), "shared": b"s" * 100_000}
        ids.append(put(root, store, files, parent=None, parent_id=ids[-1] if ids else None, comment=f"n{number}"))
    store.name("first", ids[0])
    plan = store.forget(keep_last=1, dry_run=True)
    assert [gone.id for gone in plan.forgotten] == ids[1:3]
    assert plan.dry_run
    assert plan.kept == 2
    assert plan.bytes == sum(gone.bytes for gone in plan.forgotten)
    assert 4_000_000 < plan.bytes < 4_100_000
    assert len(store.checkpoints()) == 4
    done = store.forget(keep_last=1)
    assert (done.bytes, [gone.id for gone in done.forgotten]) == (plan.bytes, ids[1:3])
    before = held(root)
    assert store.gc().freed_bytes == plan.bytes == before - held(root)
    assert [info.id for info in store.checkpoints()] == [ids[3], ids[0]]
    line = store.lineage(ids[3])
    assert [(one.id, one.state, one.comment) for one in line] == [
        (ids[3], "kept", "n3"), (ids[2], "forgotten", "n2"), (ids[1], "forgotten", "n1"), (ids[0], "kept", "n0"),
    ]  # fmt: skip
    assert [(one.id, one.parent_id) for one in store.tree()] == list(zip(ids, [None, *ids], strict=False))
    unpack(store.repo, ids[3], root / "out")
    assert store.verify() == []
    with pytest.raises(CheckpointNotFound):
        store.get(ids[1])


def test_a_checkpoint_that_goes_while_a_collector_looks_hides_nothing_of_the_others(root: Path, store: Store) -> None:
    shared = {f"shared/{n}/f": b"%d" % n * 100 for n in range(8)}
    one = put(root, store, {**shared, **{f"own/{n}/f": os.urandom(3000) for n in range(40)}})
    two = put(root, store, shared)
    looking = retention.live(store.repo)()
    found = set()
    while store.record(one).root.node not in found:
        found.add(next(looking))
    with Store(root / "store", home=root / "elsewhere") as other:
        other.forget([one])
        assert other.gc().removed_objects
    found.update(looking)
    assert set(needed(store.repo, store.record(two), set())) <= found


def test_which_to_forget(root: Path, store: Store) -> None:
    one = put(root, store, {"f": b"1"})
    two = put(root, store, {"f": b"2"}, tag="keep", parent_id=one)
    store.name("mine", one)
    with pytest.raises(StateConflict, match="has a name"):
        store.forget([one])
    for how in (
        {},
        {"ids": [one], "keep_last": 1},
        {"keep_last": -1},
        {"keep_within": "soon"},
        {"max_bytes": "x"},
        {"keep_tags": "keep"},
        {"ids": one},
    ):
        with pytest.raises(BadArgument):
            store.forget(**how)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound):
        store.forget([records.new_id()])
    store.unname("mine")
    assert [gone.id for gone in store.forget(keep_tags=["keep"]).forgotten] == [one]
    assert [gone.id for gone in store.forget([two]).forgotten] == [two]
    assert store.checkpoints() == []


def test_forgetting_until_the_store_fits(root: Path, store: Store) -> None:
    ids: list[str] = []
    for _ in range(5):
        ids.append(put(root, store, {"own": os.urandom(1_000_000)}, parent_id=ids[-1] if ids else None))
    done = store.forget(max_bytes=2_600_000)
    assert [gone.id for gone in done.forgotten] == ids[:3]
    assert done.notes == []
    store.gc()
    assert held(root) <= 2_600_000
    none = store.forget(max_bytes=1)
    assert none.forgotten[0].id == ids[3]
    assert "remain" in none.notes[0]
    assert [info.id for info in store.checkpoints()] == [ids[4]]


def test_what_shares_packs_with_others_is_not_forgotten_in_vain(root: Path, store: Store) -> None:
    files = {f"f{n}": os.urandom(1_000_000) for n in range(10)}
    one = put(root, store, files)
    files |= {f"f{n}": os.urandom(1_000_000) for n in range(4)}
    put(root, store, files, parent_id=one)
    assert [gone.id for gone in store.forget(max_bytes=12_000_000).forgotten] == [one]
    store.gc()
    assert held(root) < 10_100_000


def test_one_may_be_dropped_at_the_cost_of_one(root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = put(root, store, {"f": b"1"}), put(root, store, {"f": b"2"})
    store.name("mine", two)
    monkeypatch.setattr(retention, "live", None)
    store.drop(one)
    with pytest.raises(StateConflict):
        store.drop(two)
    with pytest.raises(CheckpointNotFound):
        store.drop(one)
    assert [info.id for info in store.checkpoints()] == [two]


HOUR = 3_600_000


def test_the_rules_of_keeping_are_a_pure_function() -> None:
    now = 1_800_000_000.0
    stamp = int(now * 1000)
    made = [(_id_at(stamp - age * HOUR), tag) for age, tag in [(1, None), (5, "a"), (30, None), (60, "b"), (90, None)]]
    ids = [one for one, _ in made]
    assert choose(made, Keep(last=2), now) == (ids[:1:-1], [ids[1]])
    assert choose(made, Keep(within="2d"), now)[0] == [ids[4], ids[3]]
    assert choose(made, Keep(last=1, tags=frozenset({"b"})), now)[0] == [ids[4], ids[2], ids[1]]
    assert choose(made, Keep(last=0, named=frozenset(ids[4:])), now)[0] == ids[3::-1]
    assert choose(made, Keep(), now) == ([], ids[:0:-1])
    assert parse_span("2w") == 14 * 86400


def _id_at(stamp: int) -> str:
    number = stamp << 80
    return "ck_" + "".join("0123456789abcdefghjkmnpqrstvwxyz"[(number >> shift) & 31] for shift in range(125, -1, -5))


@given(st.lists(st.integers(0, 10**9), max_size=20), st.integers(0, 10**12))
def test_shares_add_up(parts: list[int], total: int) -> None:
    got = scaled(parts, total)
    assert len(got) == len(parts)
    assert sum(got) == (total if sum(parts) else 0)


def test_a_damaged_checkpoint_is_named_left_out_and_can_be_forgotten(root: Path, store: Store) -> None:
    one = put(root, store, {"a": os.urandom(200_000)})
    (pack,) = (root / "store/packs").iterdir()
    two = put(root, store, {"b": os.urandom(200_000)})
    data = bytearray(pack.read_bytes())
    data[1000] ^= 1
    pack.write_bytes(data)
    record = root / "store" / record_name("checkpoints", two)
    record.write_bytes(record.read_bytes()[:-1])
    with Store(root / "store", home=root / "fresh") as other:
        found = {damage.object: damage.checkpoints for damage in other.verify()}
        assert found == {f"packs/{pack.name}": [one], record_name("checkpoints", two): [two]}
        assert [info.id for info in other.checkpoints()] == [one]
        for asked in (two, "latest"):
            with pytest.raises(Corrupt):
                other.get(asked)
        with pytest.raises(Corrupt):
            other.gc()
        assert other.forget([one, two]).forgotten[1].info is None
        other.gc()
        assert other.verify() == []


@pytest.mark.parametrize("read_data", [True, False])
def test_a_healthy_store_is_healthy_from_every_machine(root: Path, store: Store, read_data: bool) -> None:
    with Store(root / "store", home=root / "stale") as stale:
        first = put(root, store, {"d/a": os.urandom(200_000)}, session={"cwd": "/x"})
        assert stale.verify(read_data) == []
        put(root, store, {"d/b": os.urandom(200_000), "e/c": b"c" * 5000}, parent=first)
        with Store(root / "store", home=root / "fresh") as fresh:
            assert [stale.verify(read_data), fresh.verify(read_data)] == [[], []]


def test_a_lost_index_is_missed_by_those_whose_cache_still_has_it(root: Path, store: Store) -> None:
    lost = put(root, store, {"a": os.urandom(200_000)})
    (index,) = (path for path in (root / "store/index").rglob("*") if path.is_file())
    assert store.verify() == []
    index.unlink()
    with Store(root / "store", home=root / "fresh") as fresh:
        for one in (store, fresh):
            assert {id for damage in one.verify() for id in damage.checkpoints} == {lost}


def tagged(root: Path, store: Store, *tags: str | None) -> list[str]:
    """One line of checkpoints, oldest first."""
    ids: list[str] = []
    for tag in tags:
        ids.append(put(root, store, {"own": os.urandom(50_000)}, parent_id=ids[-1] if ids else None, tag=tag))
    return ids


@pytest.mark.parametrize("dry_run", [True, False])
def test_rules_that_look_like_a_slip_are_refused(root: Path, store: Store, dry_run: bool) -> None:
    assert store.forget(keep_last=0, keep_tags=["relase"], dry_run=dry_run).forgotten == []
    ids = tagged(root, store, "release", "release", "release")
    store.name("mine", ids[0])
    for rules, said in (
        ({"keep_tags": ["relase"]}, "no checkpoint has the tag 'relase'"),
        ({"keep_tags": ["relase", "release"]}, "no checkpoint has the tag 'relase'"),
        ({"keep_last": 2, "keep_tags": ["other"]}, "no checkpoint has the tag 'other'"),
        ({"keep_last": 0}, "keep none of 3"),
        ({"keep_within": "1h"}, "keep none of 3"),
    ):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(BadArgument, match=said) as caught:
            patch.setattr(retention.time, "time", lambda: 4e9)
            store.forget(**rules, dry_run=dry_run)  # type: ignore[arg-type]
        assert "--allow-empty" in str(caught.value)
    assert len(store.checkpoints()) == 3
    meant = store.forget(keep_tags=["relase"], allow_empty=True, dry_run=True)
    assert [gone.id for gone in meant.forgotten] == ids[1:]


def test_rules_keep_the_newest_of_each_line(root: Path, store: Store) -> None:
    one, other = tagged(root, store, None, None, None), tagged(root, store, None, None)
    branch = put(root, store, {"f": b"branch"}, parent_id=one[1])
    last = tagged(root, store, None)
    store.forget([one[1]])
    report = store.forget(keep_last=1)
    assert {gone.id for gone in report.forgotten} == {one[0], other[0]}
    assert {info.id for info in store.checkpoints()} == {one[2], other[1], branch, *last}
    assert "3 that no rule keeps stay" in report.notes[0]
    assert store.forget(max_bytes=1).forgotten == []
    store.forget([one[2]])
    assert {gone.id for gone in store.forget(keep_last=1, allow_empty=True).forgotten} == {other[1], branch}


def test_forgetting_can_be_undone_until_gc(root: Path, store: Store) -> None:
    ids = tagged(root, store, "a", "b", "c")
    before = store.get(ids[1])
    store.forget(ids[:2])
    assert [info.id for info in store.forgotten()] == [ids[1], ids[0]]
    with Store(root / "store", home=root / "elsewhere") as elsewhere:
        assert elsewhere.unforget(ids[1][:20]) == before
        assert elsewhere.unforget(ids[1]) == before
        for kind in ("forgotten", "aside"):
            with pytest.raises(NotFound):
                elsewhere.repo.get_record(kind, ids[1])
        assert [one.state for one in elsewhere.lineage(ids[2])] == ["kept", "kept", "forgotten"]
    assert [info.id for info in store.checkpoints()] == [ids[2], ids[1]]
    assert store.gc(dry_run=True).final == (ids[0],)
    assert store.gc().final == (ids[0],)
    assert store.gc().final == ()
    with pytest.raises(CheckpointNotFound, match="gc has run"):
        store.unforget(ids[0])
    with pytest.raises(CheckpointNotFound, match="was forgotten here"):
        store.unforget(records.new_id())
    with pytest.raises(CheckpointNotFound):
        store.unforget("ck_0")
    for bad in ("mine", "latest", "", None):
        with pytest.raises(BadArgument):
            store.unforget(bad)  # type: ignore[arg-type]
    assert store.forgotten() == []
    store.forget([ids[1]])
    assert [info.id for info in store.forgotten()] == [ids[1]]
    unpack(store.repo, store.unforget(ids[1]).id, root / "out")
    assert store.verify() == []


def test_a_time_of_grace_keeps_what_was_forgotten_within_it(root: Path, store: Store) -> None:
    old, young, last = tagged(root, store, None, None, None)
    store.forget([old, young])
    aside = root / "store" / record_name("aside", old)
    os.utime(aside, (aside.stat().st_mtime - 7200,) * 2)
    assert store.gc(grace="1h").final == (old,)
    for forgotten in (store.gc(grace="1h"), store.gc(grace="1h", dry_run=True)):
        assert (forgotten.final, forgotten.freed_bytes) == ((), 0)
    unpack(store.repo, store.unforget(young).id, root / "out")
    with pytest.raises(BadArgument):
        store.gc(grace="soon")
    assert [info.id for info in store.checkpoints()] == [last, young]


def test_grace_is_counted_by_the_stores_own_clock(root: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    young, _ = tagged(root, store, None, None)
    store.forget([young])
    wrong = time.time() + 7200
    monkeypatch.setattr(time, "time", lambda: wrong)
    assert store.gc(grace="1h").final == ()
    assert store.unforget(young).id == young


def test_what_is_taken_back_while_a_collector_is_at_it_is_whole(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it needs is condemned, and removed before its record is there again."""
    gone, last = tagged(root, store, None, None)
    inner = undoing._keep

    def keep(*given: Any) -> None:
        inner(*given)
        assert store.gc().removed_objects

    monkeypatch.setattr(undoing, "_keep", keep)
    with Store(root / "store", home=root / "elsewhere") as elsewhere:
        with elsewhere.repo.writer():
            store.forget([gone])
            aside = store.repo.get_record("aside", gone)
            assert store.gc().waiting_packs
        store.repo.put_record("aside", gone, aside)  # as if that gc had died before its end
        assert elsewhere.unforget(gone).id == gone
        store.gc()
        assert elsewhere.verify() == []
        unpack(elsewhere.repo, gone, root / "out")
    assert [info.id for info in store.checkpoints()] == [last, gone]


@pytest.mark.parametrize("kind", ["crash", "crash after"])
def test_death_anywhere_in_a_forget_or_its_undoing(root: Path, kind: str) -> None:
    """Forgetting again works and leaves a tombstone; what neither is there nor can be taken back is final."""
    for step in range(100):
        folder = root / f"{kind[-1]}{step}"
        with Store(folder / "store", home=folder / "home") as store:
            (one,) = tagged(folder, store, None)
            inner = store.repo.objects
            faulty = Faulty(inner, lambda n, verb, name, step=step: kind if n == step else None)  # type: ignore[misc]
            with suppress(Crash), Repository.open(faulty, folder / "dying") as dying:
                retention.bury(dying, one, load_record(dying, one))
                undoing.take_back(dying, one)
        with Store(folder / "store", home=folder / "far") as store:
            state = store.tree() or [info.id for info in store.forgotten()]
            assert state
            assert store.unforget(one).id == one
            for lease in (folder / "store/writers").glob("*"):
                lease.unlink()
            store.forget([one])
            assert store.repo.get_record("forgotten", one)
            assert store.gc().final == (one,)
            assert store.verify() == []
        if not faulty.dead:
            break
    assert 5 < step < 99


def test_what_was_deleted_by_hand_is_missed(root: Path, store: Store) -> None:
    """Where something still tells of it; a leaf without a name leaves no trace."""
    parent, child, named, leaf = (
        *tagged(root, store, None, None),
        *tagged(root, store, None),
        *tagged(root, store, None),
    )
    store.name("mine", named)
    assert store.verify() == []
    for one in (parent, named, leaf):
        (root / "store" / record_name("checkpoints", one)).unlink()
    with Store(root / "store", home=root / "fresh") as fresh:
        for here in (store, fresh):
            found = {damage.object: damage.checkpoints for damage in here.verify()}
            assert found == {record_name("checkpoints", one): [one] for one in (parent, named)}
    store.unname("mine")
    assert [gone.info for gone in store.forget([parent]).forgotten] == [None]
    assert store.verify() == []
    with pytest.raises(CheckpointNotFound):
        store.forget([leaf])
    assert [info.id for info in store.checkpoints()] == [child]


def test_a_parent_that_never_was_here_is_not_missed(root: Path, store: Store) -> None:
    parent, child = tagged(root, store, None, None)
    store.export(child, root / "file")
    with Store(root / "other", home=root / "elsewhere") as other:
        other.import_(root / "file")
        put(root, other, {"f": b"2"}, parent_id=child)
        assert other.verify() == []
        store.export(parent, root / "file2")
        other.import_(root / "file2")
        other.forget([parent, child])
        assert other.verify() == []
        other.unforget(parent)
        assert other.verify() == []


def test_a_parent_that_was_forgotten_elsewhere_is_refused_though_it_is_cached(root: Path, store: Store) -> None:
    """It may be collected at any moment: nothing may be saved on top of it."""
    (parent,) = tagged(root, store, None)
    assert [info.id for info in store.checkpoints()] == [parent]
    with Store(root / "store", home=root / "elsewhere") as elsewhere:
        elsewhere.forget([parent])
    with pytest.raises(CheckpointNotFound):
        put(root, store, {"new": b"1"}, parent=parent)
    assert store.checkpoints() == []
