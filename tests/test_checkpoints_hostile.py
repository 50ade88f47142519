"""A store that lies or breaks: nothing is written outside the target, nothing half-written stays, nothing is lost."""

from __future__ import annotations

import io
import os
import random
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from hashlib import sha256
from pathlib import Path

import msgpack
import pytest
import zstandard

from faulty import Crash, Faulty
from sandkeep.checkpoints import names, nodes, plan, records, transfer
from sandkeep.checkpoints.capture import load_record
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.needs import needed
from sandkeep.checkpoints.nodes import DIR, FIFO, FILE, SYMLINK, WHITEOUT, Entry
from sandkeep.checkpoints.unpack import unpack
from sandkeep.errors import Corrupt, HostRefused, SandkeepError
from sandkeep.store.objects import open_objects
from sandkeep.store.repository import Repository
from trees import looks, open_repo, put, save

# manifests made by an enemy

Add = Callable[[bytes], bytes]


def plant(repo: Repository, entries: Callable[[Add], list[Entry]], links: object = None, **root_is: int) -> str:
    """Publish a checkpoint of these entries, well hashed whatever they are."""
    with repo.writer() as writer:
        node = nodes.store(entries(writer.add), writer.add)
        empty = writer.add(b"{}")
        found = Entry(b"", DIR, 0o755, 0, 0, None, node.size, node.digest, False, node.below, 0, node.id)._replace(
            **root_is
        )
        record = records.Record(
            id=records.new_id(), parent_id=None, tag=None, comment=None, metadata={}, base={"name": "b", "fingerprint": "f"}, scope="all",
            exclude=None, excluded=[], excluded_count=0, left_out=None, root=found, links=writer.add(msgpack.packb(links)) if links else None,
            session=empty, volatile=empty,
        )  # fmt: skip
        writer.publish(records.KIND, record.id, record.pack())
    return record.id


def plain(name: bytes, data: bytes = b"owned") -> Entry:
    return Entry(name, FILE, 0o644, size=len(data), data=data)


def folder_of(add: Add, name: bytes, *entries: Entry) -> Entry:
    node = nodes.store(list(entries), add)
    return Entry(name, DIR, 0o755, 0, 0, None, node.size, node.digest, False, node.below, 0, node.id)


LIES: dict[str, Callable[[Add], list[Entry]]] = {
    "parent": lambda add: [plain(b"..")],
    "dot": lambda add: [plain(b".")],
    "no name": lambda add: [plain(b"")],
    "slash": lambda add: [plain(b"../../outside")],
    "absolute": lambda add: [plain(b"/tmp/sk-owned")],
    "nul": lambda add: [plain(b"a\0b")],
    "long name": lambda add: [plain(b"n" * 256)],
    "text name": lambda add: [plain("text")],  # type: ignore[arg-type]
    "twice": lambda add: [plain(b"a"), plain(b"a")],
    "unsorted": lambda add: [plain(b"b"), plain(b"a")],
    "symlink and folder": lambda add: [Entry(b"a", SYMLINK, data=b"/etc"), folder_of(add, b"a", plain(b"owned"))],
    "in a subfolder": lambda add: [folder_of(add, b"sub", plain(b".."))],
    "inline too short": lambda add: [Entry(b"a", FILE, size=10, data=b"x")],
    "chunk too short": lambda add: [Entry(b"a", FILE, size=300, data=add(b"x" * 299))],
    "chunk too long": lambda add: [Entry(b"a", FILE, size=300, data=add(b"x" * 301))],
    "chunk of a large file": lambda add: [Entry(b"a", FILE, size=nodes.CHUNK * 2, data=add(b"x") * 2)],
    "chunk list": lambda add: [Entry(b"a", FILE, size=nodes.CHUNK * 65, data=add(b"x" * 32))],
    "missing chunk": lambda add: [Entry(b"a", FILE, size=300, data=b"m" * 32)],
    "endless": lambda add: [Entry(b"a", FILE, size=1 << 61, data=b"")],
    "negative": lambda add: [Entry(b"a", FILE, size=-1)],
    "true": lambda add: [Entry(b"a", FILE, mode=True)],
    "float": lambda add: [Entry(b"a", FILE, uid=1.5)],  # type: ignore[arg-type]
    "mode": lambda add: [Entry(b"a", FILE, mode=0o100644)],
    "kind": lambda add: [Entry(b"a", 9)],
    "empty target": lambda add: [Entry(b"a", SYMLINK)],
    "long target": lambda add: [Entry(b"a", SYMLINK, data=b"x" * 4097)],
    "fifo with data": lambda add: [Entry(b"a", FIFO, data=b"x")],
    "whiteout with size": lambda add: [Entry(b"a", WHITEOUT, size=5)],
    "bad attributes": lambda add: [Entry(b"a", FILE, xattrs=((b"user.a", 5),))],  # type: ignore[arg-type]
    "wrong digest": lambda add: [folder_of(add, b"d", plain(b"x"))._replace(data=b"d" * 32)],
    "wrong sums": lambda add: [folder_of(add, b"d", plain(b"x"))._replace(below=7)],
    "missing node": lambda add: [folder_of(add, b"d", plain(b"x"))._replace(node=b"n" * 32)],
    "not a node": lambda add: [folder_of(add, b"d", plain(b"x"))._replace(node=add(b"garbage"))],
    "list of a node": lambda add: [
        folder_of(add, b"d", plain(b"x"))._replace(node=add(msgpack.packb([2, [[b"x", b"y"]]])))
    ],
}


@pytest.mark.parametrize("lie", LIES)
def test_a_lying_manifest_is_refused_and_nothing_is_written(root: Path, lie: str) -> None:
    with open_repo(root) as repo:
        planted = plant(repo, LIES[lie])
        before = looks(root / "store")
        with pytest.raises(SandkeepError) as caught:
            unpack(repo, planted, root / "jail/out")
        assert caught.value.code in ("CORRUPT", "NOT_FOUND")
        assert not (root / "jail/out").exists()
        assert looks(root / "store") == before
    assert not Path("/tmp/sk-owned").exists()


@pytest.mark.parametrize(
    "links",
    [
        [[b"../../../etc/passwd", b"a"]], [[b"/etc/passwd", b"a"]], [[b"a", b"b"]], [[b"a", b"d"]], [[b"a"]], [[b"c", b"a"]],
        [[b"a", b"c"], [b"a", b"e"]], ["ab"], [5], 7,
    ],
)  # fmt: skip
def test_lying_links_are_refused(root: Path, links: object) -> None:
    with open_repo(root) as repo:
        planted = plant(
            repo, lambda add: [plain(b"a"), plain(b"b", b"other"), plain(b"c"), Entry(b"d", FIFO), plain(b"e")], links
        )
        with pytest.raises(Corrupt):
            unpack(repo, planted, root / "out")
        assert not (root / "out").exists()


def test_bombs_are_refused_before_anything_is_written(root: Path) -> None:
    def doubling(add: Add) -> list[Entry]:
        below = [plain(b"x")]
        for _ in range(40):
            below = [folder_of(add, b"a", *below), folder_of(add, b"b", *below)]
        return below

    def endless(add: Add) -> list[Entry]:
        chunk = add(os.urandom(nodes.CHUNK))
        segment = add(chunk * nodes.SEGMENT)
        return [
            Entry(b"%03d" % n, FILE, 0o644, size=nodes.CHUNK * nodes.SEGMENT * 4000, data=segment * 4000)
            for n in range(5)
        ]

    with open_repo(root) as repo:
        for bomb in (doubling, endless, lambda add: [entry._replace(flag=True) for entry in endless(add)]):
            with pytest.raises(SandkeepError) as caught:
                unpack(repo, plant(repo, bomb), root / "out", limit=1 << 60)
            assert caught.value.code in ("CORRUPT", "STORE_FULL")
            assert not (root / "out").exists()


def test_more_entries_than_memory_can_hold_are_refused(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def doubling(add: Add) -> list[Entry]:
        below = [plain(b"x")]
        for _ in range(10):
            below = [folder_of(add, b"a", *below), folder_of(add, b"b", *below)]
        return below

    with open_repo(root) as repo:
        bomb = plant(repo, doubling)
        monkeypatch.setattr(plan, "_MEMORY", 1 << 40)
        with pytest.raises(HostRefused, match="memory"):
            unpack(repo, bomb, root / "out")
        assert not (root / "out").exists()
        monkeypatch.undo()
        assert unpack(repo, bomb, root / "out").entries == 3070


def exported(record: records.Record, blobs: Iterable[bytes]) -> bytes:
    """A file as an enemy writes it, its sum right."""
    frames = io.BytesIO()
    for kind, payload in [(b"r", record.id.encode() + b"\n" + record.pack()), *((b"b", blob) for blob in blobs)]:
        frames.write(struct.pack(">cI", kind, len(payload)) + payload)
    total = struct.pack(">cI", b"e", 32) + sha256(frames.getvalue()).digest()
    return b"SANDKEEP EXPORT 1\n" + zstandard.compress(frames.getvalue() + total)


def test_an_exported_file_that_swells_is_refused_early(
    root: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "_SLACK", 1 << 20)
    record = store.record(put(root, store, {"f": b"1"}))
    need = [store.repo.read(blob) for blob in needed(store.repo, record, set())]
    bombs = (
        (record, (n.to_bytes(8) for n in range(100_000))),
        (record, (n.to_bytes(8) + bytes(1 << 20) for n in range(3))),
        (replace(record, root=record.root._replace(below=1 << 50)), need),
    )
    for claim, blobs in bombs:
        with Store(root / f"other{claim.id}", home=root / "elsewhere") as other:
            with pytest.raises(Corrupt, match=r"more than it can need|entries"):
                other.import_(io.BytesIO(exported(claim, blobs)))
            assert other.checkpoints() == []
            assert sum(size for _, size, _ in other.repo.objects.list("packs/")) < 100_000
    with Store(root / "other", home=root / "elsewhere") as other:
        assert other.import_(io.BytesIO(exported(record, need))) == record.id


def test_symlinks_of_a_checkpoint_are_never_followed(root: Path) -> None:
    (root / "victim").mkdir()
    with open_repo(root) as repo:
        planted = plant(
            repo,
            lambda add: [
                Entry(b"a", SYMLINK, data=os.fsencode(root / "victim")),
                folder_of(add, b"b", plain(b"f")),
                Entry(b"c", SYMLINK, data=b"b"),
            ],
        )
        unpack(repo, planted, root / "out")
        assert os.readlink(root / "out/a") == str(root / "victim")
        assert os.listdir(root / "victim") == []


def test_a_record_that_is_not_what_it_says(root: Path) -> None:
    tree = root / "tree"
    tree.mkdir()
    with open_repo(root) as repo:
        record = load_record(repo, save(repo, tree).id)
        good = msgpack.unpackb(record.pack())
        for number, change in enumerate(
            [
                {"hash": "0" * 64},
                {"tag": 5, "id": "ck_x"},
                {"root": [b"", 0]},
                {"base": {}},
                {"version": 2},
                {"more": 1},
                {"attachments": 5},
                {"parent_id": 5},
                {"parent_id": "../config"},
                {"comment": ["x"]},
                {"session": b"short"},
                {"metadata": "x"},
                {"new_bytes": -1},
                {"excluded": [5]},
                {"root": [*good["root"][:2], "mode", *good["root"][3:]]},
                {"root": [*good["root"][:10], 1 << 63, good["root"][11]]},
            ]
        ):
            name = records.new_id()
            fields = {**good, "id": name, **change}
            if number:
                fields["hash"] = replace(record, id=name).hash
            repo.put_record(records.KIND, name, msgpack.packb(fields))
            with pytest.raises(Corrupt):
                load_record(repo, name)
        for junk in (b"", b"\xc1", msgpack.packb([1]), msgpack.packb("x")):
            name = records.new_id()
            repo.put_record(records.KIND, name, junk)
            with pytest.raises(Corrupt):
                load_record(repo, name)


@pytest.mark.parametrize("move", [[["x"], None], ["n", 5], [5, None], ["n", "ck_x"], "ab", {"a": 1}, ["a", "b", "c"]])
def test_a_name_that_names_nothing_is_damage_with_a_way_out(store: Store, root: Path, move: object) -> None:
    kept = put(root, store, {"f": b"1"})
    store.name("mine", kept)
    store.repo.put_record(names.KIND, "0000000000000009-bad", msgpack.packb(move))
    for act in (store.names, lambda: store.get("mine"), lambda: store.forget(keep_last=0)):
        with pytest.raises(Corrupt) as caught:
            act()
    store.repo.objects.delete([caught.value.details["object"]])
    assert store.names() == {"mine": kept}


@pytest.mark.parametrize("tombstone", [5, {"parent_id": 5}, {"parent_id": "x"}, {"tag": [1]}])
def test_a_tombstone_that_says_nothing_is_damage_in_the_lineage(store: Store, root: Path, tombstone: object) -> None:
    one = records.new_id()
    two = put(root, store, {"f": b"2"}, parent_id=one)
    store.repo.put_record(records.FORGOTTEN, one, msgpack.packb(tombstone))
    assert [(found.id, found.state) for found in store.lineage(two)] == [(two, "kept"), (one, "damaged")]
    assert [found.id for found in store.tree()] == [one, two]


# broken bytes


def test_any_broken_byte_is_noticed_and_leaves_the_target_as_it_was(root: Path) -> None:
    tree = root / "tree"
    (tree / "d").mkdir(parents=True)
    (tree / "d/small").write_bytes(b"some text " * 50)
    (tree / "big").write_bytes(random.Random(1).randbytes(300_000))
    with open_repo(root) as repo:
        saved = save(repo, tree)
    expected = looks(tree)
    pick = random.Random(2)
    noticed = 0
    for path in sorted(path for path in (root / "store").rglob("*") if path.is_file()):
        good = path.read_bytes()
        for turn in range(12):
            bad = bytearray(good)
            at = pick.randrange(len(bad))
            bad[at] ^= 1 << pick.randrange(8)
            path.write_bytes(bad)
            name = f"{path.name}-{turn}"
            try:
                with Repository.open(open_objects(root / "store"), root / "caches" / name) as repo:
                    unpack(repo, saved.id, root / "out")
            except SandkeepError:
                noticed += 1
                assert not (root / "out").exists()
            else:
                assert looks(root / "out") == expected
                subprocess.run(["rm", "-rf", str(root / "out")], check=True)
            path.write_bytes(good)
    assert noticed > 20


# a save that dies


@pytest.mark.parametrize("how", ["fail", "lost", "crash", "crash after"])
def test_a_save_that_dies_at_any_step_harms_nothing(root: Path, how: str) -> None:
    first, second = root / "first", root / "second"
    for tree, data in ((first, b"1" * 5000), (second, b"2" * 5000)):
        (tree / "d").mkdir(parents=True)
        (tree / "d/f").write_bytes(data)
    with open_repo(root) as repo:
        before = save(repo, first)
    step, done = 0, False
    while not done:
        objects = Faulty(open_objects(root / "store"), lambda n, verb, name, step=step: how if n == step else None)
        try:
            with Repository.open(objects, root / f"cache-{step}", lease=0.4) as repo:
                save(repo, second, parent=before.id)
            done = step >= len(objects.log)
        except (SandkeepError, Crash):
            pass
        step += 1
        with open_repo(root) as repo:
            for checkpoint in list(repo.list_records(records.KIND, full=True)):
                unpack(repo, checkpoint, root / "out")
                subprocess.run(["rm", "-rf", str(root / "out")], check=True)
            assert load_record(repo, before.id).hash == before.hash
    assert step > 5
    with Store(root / "store", home=root / "home") as store:
        store.gc()
        assert store.verify() == []
        assert len(store.checkpoints()) >= 2


# many at once

WORKER = """
import os, random, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from trees import save
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import SandkeepError
root, number = Path(sys.argv[2]), int(sys.argv[3])
pick = random.Random(number)
with Store(root / "store", home=root / f"home{number}") as store:
    parent = None
    for turn in range(12):
        tree = root / f"tree-{number}-{turn}"
        (tree / "d").mkdir(parents=True)
        for name in range(6):
            (tree / f"d/{name}").write_bytes(pick.choice([b"shared %d" % (turn % 3), os.urandom(40)]) * 300)
        parent = save(store.repo, tree, parent=parent, tag=str(number)).id
        if turn % 4 == 3:
            store.forget([info.id for info in store.checkpoints(tag=str(number))[1:]])
print("done")
"""
COLLECTOR = """
import sys
from pathlib import Path
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import Busy
root = Path(sys.argv[2])
with Store(root / "store", home=root / "collector") as store:
    while not (root / "stop").exists():
        try:
            store.gc()
        except Busy:
            pass
print("done")
"""


def test_many_writers_and_a_collector_lose_nothing(root: Path) -> None:
    def start(code: str, number: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(Path(__file__).parent), str(root), str(number)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    Store(root / "store", home=root / "home").close()
    collector = start(COLLECTOR, 0)
    writers = [start(WORKER, number) for number in range(1, 4)]
    try:
        for writer in writers:
            said, _ = writer.communicate(timeout=150)
            assert said.strip() == "done"
        (root / "stop").touch()
        said, _ = collector.communicate(timeout=150)
        assert said.strip() == "done"
    finally:
        for process in (*writers, collector):
            with process:
                process.kill()
    with Store(root / "store", home=root / "fresh") as store:
        kept = store.checkpoints()
        assert {info.tag for info in kept} == {"1", "2", "3"}
        for number, info in enumerate(kept):
            unpack(store.repo, info.id, root / f"out-{number}")
        store.gc()
        assert store.verify() == []
