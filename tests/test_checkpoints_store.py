"""The store as a person holds it: finding, naming, looking inside, comparing, forgetting, verifying, carrying."""

from __future__ import annotations

import io
import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.checkpoints import Base, Source, Store, capture, list_checkpoints, records, retention, unpack
from sandkeep.checkpoints.globs import Glob
from sandkeep.checkpoints.needs import needed
from sandkeep.checkpoints.retention import Keep, choose, parse_span, scaled
from sandkeep.errors import (
    BadArgument,
    CheckpointNotFound,
    Corrupt,
    FileError,
    FileMissing,
    StateConflict,
    StoreMissing,
)
from sandkeep.store.format import record_name
from swift import KEYS, Swift, swift  # noqa: F401
from trees import BASE, looks, quick_folder, save


@pytest.fixture
def root() -> Iterator[Path]:
    with quick_folder() as folder:
        yield folder


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store(root / "store", home=root / "home") as opened:
        yield opened


def put(root: Path, store: Store, files: dict[str, bytes], parent: str | None = None, **how: object) -> str:
    tree = root / f"tree-{records.new_id()}"
    tree.mkdir()
    for name, data in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(10**18, 10**18))
    for folder in [tree, *(path for path in tree.rglob("*") if path.is_dir())]:
        os.utime(folder, ns=(10**18, 10**18))
    return save(store.repo, tree, parent=parent, **how).id


# finding


def test_listing_is_newest_first_and_the_limit_comes_after_the_tag(root: Path, store: Store) -> None:
    ids = [put(root, store, {"f": b"%d" % n}, tag="even" if n % 2 == 0 else "odd") for n in range(6)]
    assert [info.id for info in store.checkpoints()] == ids[::-1]
    assert [info.id for info in store.checkpoints(limit=2, tag="even")] == [ids[4], ids[2]]
    assert [info.id for info in store.checkpoints(limit=2, before=ids[3])] == [ids[2], ids[1]]
    assert [info.id for info in list_checkpoints(root / "store", limit=1, tag="odd", home=root / "home")] == [ids[5]]
    assert store.latest().id == store.get("latest").id == ids[5]
    for limit in (0, -1, 501, True, 2.0):
        with pytest.raises(BadArgument):
            store.checkpoints(limit=limit)  # type: ignore[arg-type]


def test_what_a_checkpoint_tells_of_itself(root: Path, store: Store) -> None:
    one = put(
        root,
        store,
        {"f": b"x" * 100},
        comment="first",
        tag="t",
        metadata={"k": [1]},
        session={"cwd": "/work"},
        volatile={"n": 1},
    )
    info = store.get(put(root, store, {"g": b"y" * 50}, parent=one))
    assert (info.parent_id, info.size_bytes, info.base, info.scope, info.excluded, info.memory) == (
        one,
        150,
        "test",
        "all",
        [],
        False,
    )
    first = store.get(one)
    assert (first.comment, first.tag, first.metadata, first.parent_id) == ("first", "t", {"k": [1]}, None)
    assert first.timestamp.endswith("Z")
    assert len(first.hash) == 64
    assert store.session(one) == {"cwd": "/work", "n": 1}


def test_ids_prefixes_and_names_resolve(root: Path, store: Store) -> None:
    with pytest.raises(CheckpointNotFound, match="no checkpoints"):
        store.latest()
    one, two = put(root, store, {"f": b"1"}), put(root, store, {"f": b"2"})
    store.name("stable", one)
    store.name("team/next", two)
    assert store.get("stable").id == one
    assert store.get(one[:-4]).id == one
    store.name("stable", "latest")
    assert store.names() == {"stable": two, "team/next": two}
    store.unname("stable")
    assert store.names() == {"team/next": two}
    for missing in ("stable", "ck_", records.new_id(), "ck_zzz"):
        with pytest.raises(CheckpointNotFound):
            store.get(missing)
    for bad in ("latest", "ck_x", "", "a b", "../x"):
        with pytest.raises(BadArgument):
            store.name(bad, one)
    with pytest.raises(CheckpointNotFound):
        store.unname("stable")


def test_names_moved_by_many_at_once_agree_in_the_end(root: Path, store: Store) -> None:
    ids = [put(root, store, {"f": b"%d" % n}) for n in range(4)]

    def move(number: int) -> None:
        with Store(root / "store", home=root / f"home{number}") as mine:
            for turn in range(5):
                mine.name("stable", ids[(number + turn) % 4])

    threads = [threading.Thread(target=move, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with Store(root / "store", home=root / "fresh") as other:
        assert other.names() == store.names()
        assert set(store.names()) == {"stable"}


def test_a_store_that_is_not_there_is_not_made_by_reading(root: Path) -> None:
    with pytest.raises(StoreMissing):
        list_checkpoints(root / "nowhere", home=root / "home")
    assert not (root / "nowhere").exists()


def test_thousands_of_checkpoints_list_as_quickly_as_ten(root: Path, store: Store) -> None:
    one = put(root, store, {"f": b"1"})
    record = store.record(one)
    made = []
    for number in range(3000):
        name = records.new_id()
        made.append(name)
        packed = replace(record, id=name, tag="rare" if number == 5 else None).pack()
        store.repo.put_record(records.KIND, name, packed)
    assert store.latest().id == made[-1]
    assert [info.id for info in store.checkpoints(limit=10)] == made[:-11:-1]
    assert [info.id for info in store.checkpoints(tag="rare")] == [made[5]]
    assert len(store.checkpoints(limit=500)) == 500


# looking inside


def test_looking_inside(root: Path, store: Store) -> None:
    big = os.urandom(700_000)
    files = {"a/b/c.py": b"code" * 100, "a/big": big, "top.txt": b"tiny", "a/b/d.txt": b""}
    one = put(root, store, files)
    assert [info.path for info in store.ls(one)] == ["/a", "/top.txt"]
    assert [(info.name, info.kind, info.size) for info in store.ls(one, "a/b/")] == [
        ("c.py", "file", 400),
        ("d.txt", "file", 0),
    ]
    assert store.read(one, "/a/big") == big
    assert store.read(one, "/a/big", 262_100, 100) == big[262_100:262_200]
    assert store.read(one, "/a/big", 699_999, 100) == big[-1:]
    assert store.read(one, "/a/big", 10**9) == b""
    assert store.read(one, "top.txt", 1, 2) == b"in"
    assert store.stat(one, "/").kind == "dir"
    assert [info.path for info in store.find(one, "*.py")] == ["/a/b/c.py"]
    assert [info.path for info in store.find(one, "/a/**/d*")] == ["/a/b/d.txt"]
    assert store.find(one, "/nowhere/*") == []
    for path in ("/nothing", "/top.txt/below", "a/b/c.py/x"):
        with pytest.raises(FileMissing):
            store.stat(one, path)
    with pytest.raises(FileError):
        store.read(one, "/a")
    with pytest.raises(FileError):
        store.ls(one, "/top.txt")
    for path in ("../etc/passwd", "a/../../x", "a\0b"):
        with pytest.raises(BadArgument):
            store.read(one, path)
    with pytest.raises(BadArgument):
        store.read(one, "/a/big", -1)


def test_extracting_plain_files(root: Path, store: Store) -> None:
    tree = root / "tree"
    (tree / "src/deep").mkdir(parents=True)
    (tree / "src/deep/a.py").write_bytes(b"a")
    (tree / "src/b.txt").write_bytes(b"b")
    os.link(tree / "src/b.txt", tree / "twin.txt")
    os.mknod(tree / "deleted", 0o020000, 0)
    (tree / "escape").symlink_to("/etc")
    os.setxattr(tree / "src", "user.overlay.opaque", b"y")
    (root / "base/src").mkdir(parents=True)
    (root / "base/src/hidden").touch()
    (root / "base/deleted").touch()
    one = save(store.repo, tree, below=Base({"/": str(root / "base")})).id
    store.extract(one, root / "all")
    assert sorted(str(p.relative_to(root / "all")) for p in (root / "all").rglob("*")) == [
        "escape", "src", "src/b.txt", "src/deep", "src/deep/a.py", "twin.txt",
    ]  # fmt: skip
    assert os.listxattr(root / "all/src") == []
    assert os.path.samefile(root / "all/twin.txt", root / "all/src/b.txt")
    store.extract(one, root / "some", "*.py")
    assert [str(p.relative_to(root / "some")) for p in sorted((root / "some").rglob("*"))] == [
        "src",
        "src/deep",
        "src/deep/a.py",
    ]
    store.extract(one, root / "folder", "/src")
    assert len(list((root / "folder").rglob("*"))) == 4
    with pytest.raises(FileMissing):
        store.extract(one, root / "none", "*.rs")
    assert not (root / "none").exists()


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("*.py", ["a.py", "x/y/b.py"], ["a.pyc", "py"]),
        ("/a/*.py", ["a/x.py"], ["a/b/x.py", "x.py"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "ba/c"]),
        ("**/c", ["c", "a/b/c"], ["cc"]),
        ("a/**/c", ["a/c", "a/b/d/c"], ["b/c"]),
        ("[ab]?.[!c]", ["ax.h", "b1.o"], ["ax.c", "cx.h"]),
        ("we[ird", ["we[ird"], ["weird"]),
    ],
)
def test_globs(pattern: str, yes: list[str], no: list[str]) -> None:
    assert [path for path in yes + no if Glob(pattern).matches(path)] == yes


def test_differences_are_named(root: Path, store: Store) -> None:
    one = put(root, store, {"same/x": b"x", "mod": b"1" * 100, "gone/a": b"a", "kind": b"k", "touched": b"t"})
    tree = root / "next"
    (tree / "new").mkdir(parents=True)
    (tree / "new/file").write_bytes(b"n" * 10)
    (tree / "mod").write_bytes(b"2" * 100)
    os.chmod(tree / "mod", 0o600)
    (tree / "kind").mkdir()
    (tree / "touched").write_bytes(b"t")
    os.mknod(tree / "gone", 0o020000, 0)
    for path in ("mod", "new/file", "new", "kind", "."):
        os.utime(tree / path, ns=(10**18, 10**18))
    two = save(store.repo, tree, parent=one).id
    found = {(change.path, change.change): change.what for change in store.diff(one, two)}
    assert found == {
        ("/gone", "removed"): (), ("/gone/a", "removed"): (), ("/kind", "changed"): ("kind", "mode"), ("/mod", "changed"): ("content", "mode"),
        ("/new", "added"): (), ("/new/file", "added"): (), ("/touched", "changed"): ("time",),
    }  # fmt: skip
    assert ("/touched", "changed") not in {(c.path, c.change) for c in store.diff(one, two, times=False)}
    assert store.diff(one, one) == []
    back = {(change.path, change.change) for change in store.diff(two, one)}
    assert {("/gone", "added"), ("/new", "removed")} <= back


# letting go


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
    freed = store.gc()
    assert abs(freed.freed_bytes - plan.bytes) < 20_000
    assert [info.id for info in store.checkpoints()] == [ids[3], ids[0]]
    line = store.lineage(ids[3])
    assert [(one.id, one.state, one.comment) for one in line] == [
        (ids[3], "kept", "n3"), (ids[2], "forgotten", "n2"), (ids[1], "forgotten", "n1"), (ids[0], "kept", "n0"),
    ]  # fmt: skip
    drawn = store.tree()
    assert [branch.node.id for branch in drawn] == [ids[0]]
    assert drawn[0].children[0].children[0].children[0].node.id == ids[3]
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
    one, two = put(root, store, {"f": b"1"}), put(root, store, {"f": b"2"}, tag="keep")
    store.name("mine", one)
    with pytest.raises(StateConflict, match="has a name"):
        store.forget([one])
    for how in ({}, {"ids": [one], "keep_last": 1}, {"keep_last": -1}, {"keep_within": "soon"}, {"max_bytes": "x"}):
        with pytest.raises(BadArgument):
            store.forget(**how)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound):
        store.forget([records.new_id()])
    store.unname("mine")
    assert [gone.id for gone in store.forget(keep_tags=["keep"]).forgotten] == [one]
    assert [gone.id for gone in store.forget([two]).forgotten] == [two]
    assert store.checkpoints() == []


def test_forgetting_until_the_store_fits(root: Path, store: Store) -> None:
    ids = [put(root, store, {"own": os.urandom(1_000_000)}) for _ in range(5)]
    done = store.forget(max_bytes=2_600_000)
    assert [gone.id for gone in done.forgotten] == ids[:3]
    assert store.forget(max_bytes=1).forgotten[0].id == ids[3]
    assert [info.id for info in store.checkpoints()] == [ids[4]]


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


# carrying


def test_export_and_import_carry_everything(root: Path, store: Store) -> None:
    tree = root / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d/f").write_bytes(os.urandom(600_000))
    os.link(tree / "d/f", tree / "twin")
    (tree / "small").write_bytes(b"s" * 1000)
    image = root / "image"
    image.mkdir()
    (image / "pages").write_bytes(b"p" * 5000)
    saved = capture(
        store.repo, Source([tree]), base=BASE, session={"cwd": "/x"}, attachments={"memory": image}, comment="c"
    )
    store.export(saved.id, root / "file")
    stream = io.BytesIO()
    store.export(saved.id, stream)
    with Store(root / "other", home=root / "elsewhere") as other:
        assert other.import_(root / "file") == saved.id
        assert other.import_(io.BytesIO(stream.getvalue())) == saved.id
        assert other.get(saved.id) == saved
        assert other.session(saved.id) == {"cwd": "/x"}
        unpack(other.repo, saved.id, root / "out")
        assert looks(root / "out") == looks(tree)
        assert other.verify() == []


@pytest.mark.parametrize("how", ["cut", "flip", "other", "empty"])
def test_a_damaged_export_shows_nothing(root: Path, store: Store, how: str) -> None:
    one = put(root, store, {"f": os.urandom(50_000), "g": b"text " * 1000})
    stream = io.BytesIO()
    store.export(one, stream)
    good = stream.getvalue()
    with Store(root / "other", home=root / "elsewhere") as other:
        for at in range(20, len(good), len(good) // 25):
            bad = bytearray(good)
            if how == "cut":
                bad = bad[:at]
            elif how == "flip":
                bad[at] ^= 0x10
            elif how == "other":
                bad[5] ^= 1
            else:
                bad = bytearray()
            with pytest.raises(Corrupt):
                other.import_(io.BytesIO(bytes(bad)))
        assert other.checkpoints() == []
        assert other.import_(io.BytesIO(good)) == one


# a bucket


def test_the_same_in_a_bucket(root: Path, swift: Swift) -> None:  # noqa: F811
    url = f"s3://{swift.bucket()}/checkpoints"
    with Store(url, home=root / "home", endpoint=swift.endpoint, region="us-east-1", **KEYS) as store:
        one = put(root, store, {f"d{n}/f": os.urandom(2000) for n in range(30)})
        two = put(root, store, {"d1/f": b"changed" * 20}, parent=one)
        assert [info.id for info in store.checkpoints()] == [two, one]
        unpack(store.repo, two, root / "out")
        assert (root / "out/d1/f").read_bytes() == b"changed" * 20
        assert {change.path for change in store.diff(one, two)} == {"/d1/f"}
        store.forget([one])
        store.gc()
        assert store.verify() == []
        assert store.read(two, "d1/f", 0, 7) == b"changed"
