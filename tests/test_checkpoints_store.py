"""The store as a person holds it: finding, naming, looking inside, comparing, carrying."""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import zstandard

from faulty import Crash, Faulty
from sandkeep.checkpoints import names, records
from sandkeep.checkpoints.base import Base
from sandkeep.checkpoints.capture import Source, capture
from sandkeep.checkpoints.catalog import Store, list_checkpoints
from sandkeep.checkpoints.globs import Glob
from sandkeep.checkpoints.needs import needed
from sandkeep.checkpoints.unpack import unpack
from sandkeep.errors import (
    BadArgument,
    CheckpointNotFound,
    Corrupt,
    FileError,
    FileMissing,
    HostRefused,
    SandkeepError,
    StoreFull,
    StoreMissing,
)
from sandkeep.store.repository import Repository
from swift import KEYS, Swift, swift  # noqa: F401
from trees import BASE, looks, put, save

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
    assert store.read(info, "g", 0, 1) == b"y"
    assert store.lineage(info)[1].id == one
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


def test_nonsense_is_refused_in_our_words(root: Path, store: Store) -> None:
    one = put(root, store, {"f": b"x"})
    for wrong in (5, None, "", "a\0b"):
        with pytest.raises(BadArgument):
            store.export(one, wrong)  # type: ignore[arg-type]
        with pytest.raises(BadArgument):
            store.extract(one, wrong)  # type: ignore[arg-type]
    for wrong in (5, "a\0b"):
        with pytest.raises(BadArgument):
            store.import_(wrong)  # type: ignore[arg-type]
    for place in (root / "nothing", root):
        with pytest.raises(HostRefused):
            store.import_(place)
    with pytest.raises(BadArgument):
        Store("a\0b", home=root / "home")
    (root / "file").write_text("mine")
    for place in (root / "file", root / "file/below"):
        with pytest.raises(StoreMissing):
            Store(place, home=root / "home")
        with pytest.raises(SandkeepError):
            store.extract(one, place)
    assert (root / "file").read_text() == "mine"


def test_what_is_no_file_is_written_to_and_not_replaced(root: Path, store: Store) -> None:
    one = put(root, store, {"f": os.urandom(100_000)})
    full = root / "full"
    os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
    with pytest.raises(StoreFull):
        store.export(one, full)
    assert full.is_char_device()
    pipe = root / "pipe"
    os.mkfifo(pipe)
    got: list[bytes] = []
    reader = threading.Thread(target=lambda: got.append(pipe.read_bytes()))
    reader.start()
    store.export(one, pipe)
    reader.join()
    assert pipe.is_fifo()
    with Store(root / "other", home=root / "elsewhere") as other:
        assert other.import_(io.BytesIO(got[0])) == one


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


def test_looking_into_a_bucket_fetches_what_is_needed(root: Path, swift: Swift) -> None:  # noqa: F811
    """Of 12 MB: a directory's nodes, the chunk that is read, the block of small files that is extracted from."""
    url = f"s3://{swift.bucket()}/checkpoints"
    files = {f"src/d{n}/f{m}": os.urandom(3000) for n in range(40) for m in range(10)}
    how = {"endpoint": swift.endpoint, "region": "us-east-1", **KEYS}
    with Store(url, home=root / "home", **how) as store:
        one = put(root, store, {**files, "db": os.urandom(10 << 20)})
        two = put(root, store, {"src/d3/f4": b"changed" * 50}, parent=one)
    got: list[int] = []
    for number, (look, most) in enumerate(
        [
            (lambda store: store.ls(two, "/src/d5"), 100_000),
            (lambda store: store.find(two, "**/f7"), 100_000),
            (lambda store: store.diff(one, two), 100_000),
            (lambda store: store.read(two, "/db", 5 << 20, 100), 400_000),
            (lambda store: store.extract(two, root / "out", "/src/d7/f1"), 700_000),
        ]
    ):
        with Store(url, home=root / f"fresh{number}", **how) as store:
            store.repo.refresh()
            get = store.repo.objects.get
            store.repo.objects.get = lambda *args, get=get: got.append(len(data := get(*args))) or data  # type: ignore[method-assign,func-returns-value,misc]
            look(store)
        assert sum(got) < most, number
        got.clear()


@pytest.mark.parametrize("kind", ["crash", "crash after"])
def test_a_name_that_is_moved_always_means_something(root: Path, store: Store, kind: str) -> None:
    one, two = put(root, store, {"f": b"1"}), put(root, store, {"f": b"2"})
    store.name("mine", one)
    for step in range(50):
        faulty = Faulty(store.repo.objects, lambda n, verb, name, step=step: kind if n == step else None)  # type: ignore[misc]
        with suppress(Crash), Repository.open(faulty, root / f"dying{step}") as dying:
            names.move(dying, "mine", two)
        assert store.names()["mine"] in (one, two)
        if not faulty.dead:
            break
        store.name("mine", one)
    assert 2 < step < 49
    assert store.names() == {"mine": two}


def test_an_exported_file_must_hold_what_it_names_though_the_store_has_it(root: Path, store: Store) -> None:
    """Who can name a blob need not be allowed to read it."""
    secret = put(root, store, {"f": os.urandom(5000)})
    record = store.record(secret)
    (blob,) = [blob for blob in needed(store.repo, record, set()) if store.repo.size(blob) == 5000]
    store.export(secret, root / "file")
    whole = zstandard.ZstdDecompressor().stream_reader((root / "file").read_bytes().partition(b"\n")[2]).read()
    frame = struct.pack(">cI", b"b", 5000) + store.repo.read(blob)
    assert frame in whole
    frames = whole.replace(frame, b"")[:-37]
    made = frames + struct.pack(">cI", b"e", 32) + hashlib.sha256(frames).digest()
    with Store(root / "other", home=root / "elsewhere") as other:
        put(root, other, {"f": store.repo.read(blob)})
        with pytest.raises(Corrupt, match="lacks"):
            other.import_(io.BytesIO(b"SANDKEEP EXPORT 1\n" + zstandard.compress(made)))
        assert secret not in [info.id for info in other.checkpoints()]


def test_a_child_is_newer_than_its_parent_whatever_clocks_say(root: Path, store: Store) -> None:
    future = "ck_3" + "0" * 25
    child = put(root, store, {"f": b"1"}, parent_id=future)
    assert future < child < put(root, store, {"f": b"2"}, parent=child)
