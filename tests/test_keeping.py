"""Checkpoints of sandboxes: here, in a bucket, elsewhere; only what changed is read."""

from __future__ import annotations

import io
import secrets
import sqlite3
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from conftest import Make
from sandkeep import AsyncSandbox, Sandbox, Store, list_checkpoints
from sandkeep.errors import BadArgument, CheckpointNotFound, Corrupt, FloorNotReached, HostRefused, SandkeepError
from sandkeep.model import WORKSPACE
from sandkeep.sandbox import keeping, pausing
from waiting import until


def test_lineage_latest_names_and_branches(make: Make, home: Path) -> None:
    sb = make()
    sb.commands.run("echo v1 > report.txt")
    one = sb.checkpoint("initial draft", tag="s", metadata={"by": "me"})
    sb.commands.run("echo reviewed >> report.txt")
    two = sb.checkpoint("reviewed", tag="s")
    assert (one.parent_id, two.parent_id) == (None, one.id)
    assert two.new_bytes < 50_000
    branch = make(from_checkpoint=one.id)
    assert branch.commands.run("cat report.txt").stdout == "v1\n"
    branch.commands.run("echo branch >> report.txt")
    three = branch.checkpoint("branch")
    assert three.parent_id == one.id
    store = Store(home=home)
    assert [c.id for c in store.checkpoints(limit=10)] == [three.id, two.id, one.id]
    assert [c.id for c in store.checkpoints(tag="s")] == [two.id, one.id]
    assert store.latest().id == three.id
    store.name("stable", two.id)
    assert make(from_checkpoint="stable").commands.run("cat report.txt").stdout == "v1\nreviewed\n"
    assert make(from_checkpoint="latest").commands.run("cat report.txt").stdout == "v1\nbranch\n"
    assert [c.id for c in list_checkpoints(home / "store", limit=1, home=home)] == [three.id]
    assert {change.path.rsplit("/", 1)[1] for change in store.diff(one.id, two.id, times=False)} == {"report.txt"}
    assert store.read(one.id, f"{WORKSPACE}/report.txt") == b"v1\n"
    assert store.get(one.id).metadata == {"by": "me"}
    sb.restore(one.id)
    assert sb.checkpoint().parent_id == one.id


def test_checkpoints_at_once_are_one_line(make: Make, home: Path) -> None:
    sb = make()
    others = [Sandbox.attach(sb.id, home=home) for _ in range(3)]
    with ThreadPoolExecutor(4) as pool:
        made = [job.result() for job in [pool.submit(one.checkpoint) for one in (sb, *others) for _ in range(2)]]
    with Store(home=home) as store:
        line = [one.id for one in store.lineage("latest")]
    assert sorted(line) == sorted(info.id for info in made)


def test_nothing_changed_uploads_nothing_and_has_the_same_hash(make: Make) -> None:
    sb = make()
    sb.commands.run("echo x > f")
    one = sb.checkpoint()
    two = sb.checkpoint()
    assert two.hash == one.hash
    assert two.new_bytes == 0


def test_only_new_layers_are_read(make: Make, home: Path) -> None:
    sb = make()
    sb.commands.run("mkdir many; for i in $(seq 300); do echo $i > many/$i; done; head -c 3000000 /dev/urandom > big")
    sb.checkpoint()
    seen: list[int] = []
    sb.commands.run("echo changed > many/7")
    sb.checkpoint(progress=lambda phase, entries, size: seen.append(size))
    assert max(seen, default=0) < 100_000


def test_on_another_machine(make: Make, home: Path, tmp_path: Path) -> None:
    sb = make(store=tmp_path / "store", env={"K": "v"})
    sb.commands.run("cd /tmp; echo kept > kept; f() { echo fun; }; apt() { :; }")
    sb.commands.run("rm /etc/hosts", user="root")
    kept = sb.checkpoint()
    sb.kill()
    elsewhere = tmp_path / "elsewhere"
    told: list[tuple[str, int, int]] = []
    with Sandbox(
        home=elsewhere,
        runtime="runc",
        store=tmp_path / "store",
        from_checkpoint=kept.id,
        progress=lambda *facts: told.append(facts),
    ) as again:
        assert told[-1][0] == "unpack"
        assert (
            again.commands.run("pwd; cat kept; f; echo $K; ls /etc/hosts 2>&1 | tail -c 10").stdout
            == "/tmp\nkept\nfun\nv\ndirectory\n"
        )
        assert again.checkpoint().parent_id == kept.id


def test_a_database_under_load_reopens_clean(make: Make, tmp_path: Path) -> None:
    sb = make()
    code = (
        "import sqlite3\n"
        "db = sqlite3.connect('app.db', isolation_level=None)\n"
        "db.execute('pragma journal_mode=wal'); db.execute('create table t(a, b)')\n"
        "n = 0\n"
        "while True:\n"
        "    n += 1\n"
        "    db.execute('begin'); [db.execute('insert into t values(?, ?)', (n, 'x' * 500)) for _ in range(10)]; db.execute('commit')\n"
        "    if n == 50: open('under-way', 'w')\n"
    )
    sb.files.write(f"{WORKSPACE}/w.py", code)
    sb.commands.run("exec python3 w.py", background=True)
    until(lambda: sb.files.exists("under-way"), "the database to be under load")
    for number in range(3):
        kept = sb.checkpoint()
        to = tmp_path / f"out{number}"
        Store(home=sb._home.path).extract(kept.id, to, "**/app.db*")
        found = next(to.rglob("app.db"))
        with sqlite3.connect(found) as db:
            assert db.execute("pragma integrity_check").fetchone() == ("ok",)
            assert db.execute("select count(*) % 10 from t").fetchone() == (0,)


def test_scope_workspace_leaves_out_and_says_what(make: Make) -> None:
    sb = make()
    sb.commands.run(
        "mkdir -p node_modules/x venv src/venv .cache; echo 1 > node_modules/x/i.js; echo 2 > src/venv/code.py; echo 3 > keep; echo 4 > /opt/elsewhere",
        user="root",
    )
    sb.commands.run("touch venv/pyvenv.cfg venv/big; echo 5 > .cache/z", user="root")
    kept = sb.checkpoint(scope="workspace")
    names = {info.path for info in Store(home=sb._home.path).find(kept.id, "**/*")}
    assert any(name.endswith("src/venv/code.py") for name in names)
    assert any(name.endswith("/keep") for name in names)
    assert not any("node_modules" in name or "venv/big" in name or "elsewhere" in name for name in names)
    assert any("node_modules" in text for text in kept.excluded)


def test_a_scoped_checkpoint_after_going_back_holds_what_is_there(make: Make) -> None:
    sb = make()
    sb.commands.run("echo 1 > old")
    before = sb.snapshot()
    sb.commands.run("echo 2 > new")
    store = Store(home=sb._home.path)
    for scope in ("workspace", "all"):
        later = sb.checkpoint(scope=scope)  # type: ignore[arg-type]
        sb.restore(before)
        back = sb.checkpoint(scope="workspace")
        assert [info.name for info in store.ls(back, WORKSPACE)] == ["old"]
        sb.restore(later)
    assert [info.name for info in store.ls(sb.checkpoint(scope="workspace"), WORKSPACE)] == ["new", "old"]


def test_what_is_here_is_not_fetched_again(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = make()
    sb.commands.run("echo 1 > f")
    kept = sb.checkpoint()
    sb.commands.run("echo 2 > f")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("it unpacks")

    monkeypatch.setattr(keeping, "unpack_here", refuse)
    sb.restore(kept)
    assert make(from_checkpoint=kept).commands.run("cat f").stdout == "1\n"


def test_a_store_given_by_a_relative_path_stays_where_it_was(
    make: Make, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    sb = make(store="mine")
    one = sb.checkpoint()
    monkeypatch.chdir(tmp_path / "elsewhere")
    two = Sandbox.connect(sb.id, home=home).checkpoint()
    assert [info.id for info in list_checkpoints(tmp_path / "mine", home=home)] == [two.id, one.id]


def test_exported_state_is_whole_and_replaces(make: Make, tmp_path: Path) -> None:
    sb = make(env={"E": "1"})
    sb.commands.run("echo one > f; ln f g; ln -s f l; v=shell; cd /tmp")
    blob = sb.export_state()
    assert blob is not None
    assert sb.export_state(to=tmp_path / "state") is None
    for nowhere in (tmp_path, tmp_path / "no" / "folder"):
        with pytest.raises(HostRefused):
            sb.export_state(to=nowhere)
    assert sb.checkpoint().parent_id is None
    other = make()
    other.commands.run("echo extra > extra; cd /")
    other.import_state(blob)
    assert (
        other.commands.run("pwd; cd ~/workspace; ls; stat -c %h f; echo $E $v").stdout == "/tmp\nf\ng\nl\n2\n1 shell\n"
    )
    with open(tmp_path / "state", "rb") as file:
        other.import_state(file)
    damaged = bytearray(blob)
    damaged[len(blob) // 2] ^= 1
    for bad in (bytes(damaged), blob[:-10], b"", b"nonsense", io.BytesIO(blob[:100])):
        with pytest.raises(SandkeepError):
            other.import_state(bad)
    with pytest.raises(BadArgument):
        other.import_state(3)  # type: ignore[arg-type]
    assert other.commands.run("ls ~/workspace").stdout == "f\ng\nl\n"


def deep(levels: int) -> dict[str, object]:
    return {"x": deep(levels - 1)} if levels else {}


def test_metadata_comes_back_as_json_has_it(make: Make, home: Path) -> None:
    sb = make(metadata={"pair": (1, 2)})
    assert sb.info().metadata == {"pair": [1, 2]}
    told = {"most": (1 << 64) - 1, "least": -(1 << 63), "text": "ü", "deep": deep(50), "list": [None, True, 1.5]}
    kept = sb.checkpoint(metadata=told)
    assert Store(home=home).get(kept.id).metadata == told


def test_floors_and_bad_words_change_nothing(make: Make) -> None:
    sb = make()
    sb.commands.run("echo x > f; sleep 1000 &")
    kept = sb.checkpoint()
    sb.commands.run("echo y > f")
    with pytest.raises(FloorNotReached):
        sb.restore(kept.id, require="memory")
    with pytest.raises(BadArgument):
        sb.restore(kept.id, require="everything")  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFound):
        sb.restore("ck_" + "0" * 26)
    with pytest.raises(BadArgument):
        sb.checkpoint(metadata={"x": object()})
    for unreadable in ({1: 2}, {"x": {None: 1}}, {"x": 1 << 64}, {"x": "\udcff"}, {"x": float("nan")}, 5, deep(200)):
        with pytest.raises(BadArgument):  # a record that can't be read again would take all later ones with it
            sb.checkpoint(metadata=unreadable)  # type: ignore[arg-type]
    with pytest.raises(BadArgument):
        sb.checkpoint(scope="nothing")  # type: ignore[arg-type]
    assert sb.commands.run("cat f").stdout == "y\n"


def test_a_damaged_store_restores_nothing(make: Make, home: Path, tmp_path: Path) -> None:
    sb = make(store=tmp_path / "store")
    sb.commands.run("head -c 200000 /dev/urandom > f")
    kept = sb.checkpoint()
    packs = [path for path in (tmp_path / "store").rglob("*") if path.is_file() and path.stat().st_size > 100_000]
    data = bytearray(packs[0].read_bytes())
    data[len(data) // 2] ^= 255
    packs[0].chmod(0o600)
    packs[0].write_bytes(data)
    elsewhere = tmp_path / "elsewhere"
    with pytest.raises(Corrupt):
        Sandbox(home=elsewhere, runtime="runc", store=tmp_path / "store", from_checkpoint=kept.id)
    assert Sandbox.list(home=elsewhere) == []
    damage = Store(tmp_path / "store", home=elsewhere).verify()
    assert any(kept.id in one.checkpoints for one in damage)


def test_paused_on_runc_comes_back_by_the_ladder(make: Make, home: Path) -> None:
    sb = make()
    sb.commands.run("cd /tmp; echo x > f; v=1")
    sleeper = f"sleep {secrets.randbelow(10**9) + 10**6}"
    sb.commands.run(f"exec {sleeper}", background=True)
    kept = sb.pause("nap")
    assert sb.info().state == "paused"
    assert subprocess.run(["pgrep", "-f", sleeper], capture_output=True).stdout == b""
    again = Sandbox.connect(sb.id, home=home)
    assert again.restore_report is not None
    assert again.restore_report.level == "relaunched"
    assert again.commands.run("pwd; cat f; echo $v").stdout == "/tmp\nx\n1\n"
    assert again.checkpoint().parent_id == kept.id
    assert [one.running for one in again.commands.list() if sleeper in " ".join(one.argv)] == [True]


def test_what_sleeps_wakes_right_after_the_host_lost_its_power(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    sb = make()
    sb.commands.run("echo one > f")
    first = sb.checkpoint()
    sb.commands.run("echo two > g")
    kept = sb.pause()
    for path in (sb._home.path / "layers").rglob("workspace/*"):
        path.write_bytes(b"")  # nothing of it had been written out
    for module in (keeping, pausing):
        monkeypatch.setattr(module, "boot", lambda: "another")
    Store(home=sb._home.path).forget([first])
    sb.resume()
    assert sb.commands.run("cat f g").stdout == "one\ntwo\n"
    assert sb.checkpoint().parent_id == kept.id


async def _story(home: Path) -> None:
    async with AsyncSandbox(home=home, runtime="runc") as sb:
        await sb.commands.run("echo x > f")
        kept = await sb.checkpoint("async")
        other = await AsyncSandbox.create(home=home, runtime="runc", from_checkpoint=kept.id)
        assert (await other.commands.run("cat f")).stdout == "x\n"
        await other.kill()


def test_async(home: Path) -> None:
    import asyncio

    asyncio.run(_story(home))
