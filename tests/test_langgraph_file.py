"""The LangGraph saver's file: damage, strangers, a full disk, other processes, kill -9, threads."""

from __future__ import annotations

import signal
import sqlite3
import stat
import subprocess
import threading
from pathlib import Path

import pytest

from apart import OWN_MOUNTS, begin, run
from langgraph_kit import at, put
from sandkeep.errors import Corrupt, StoreError, Unsupported
from sandkeep.langgraph import CheckpointSaver

pytest_plugins = ["langgraph_kit"]


# --- the file


def test_a_value_that_changed_on_disk_is_not_returned(saver: CheckpointSaver) -> None:
    old = put(saver, "t", {"x": "old"})
    put(saver, "t", {"x": "new"})
    with saver.database.transaction() as connection:
        connection.execute("UPDATE content SET data = CAST(replace(data, 'new', 'bad') AS BLOB)")
    with pytest.raises(Corrupt, match="'x'"):
        saver.get_tuple(at("t"))
    assert saver.get_tuple(old) is not None


def test_files_that_are_not_ours_are_refused_untouched(tmp_path: Path) -> None:
    text = tmp_path / "text.db"
    text.write_bytes(b"not a database, but long enough to look like one" * 100)
    with pytest.raises(Corrupt):
        CheckpointSaver(text)
    assert text.read_bytes().startswith(b"not a database")
    for name, statement, error in [
        ("other.db", "CREATE TABLE theirs (x)", Corrupt),
        ("newer.db", "PRAGMA user_version = 99", Unsupported),
    ]:
        theirs = sqlite3.connect(tmp_path / name)
        theirs.execute(statement)
        theirs.commit()
        theirs.close()
        with pytest.raises(error):
            CheckpointSaver(tmp_path / name)


def test_a_folder_that_can_not_be_made_is_an_error_and_one_that_is_made_is_private(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(StoreError):
        CheckpointSaver(tmp_path / "file" / "threads")
    folder = tmp_path / "a" / "b"
    CheckpointSaver(folder).close()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


FULL = """
import subprocess, sys
from langgraph.checkpoint.base import empty_checkpoint
from sandkeep.errors import SandkeepError
from sandkeep.langgraph import CheckpointSaver
folder = sys.argv[1]
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
saver = CheckpointSaver(folder)
config = {"configurable": {"thread_id": "t", "checkpoint_ns": ""}}
def put(text):
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"x": text}
    return saver.put(config, checkpoint, {}, {})
put("small")
try:
    put("x" * 3_000_000)
except SandkeepError as error:
    print(error.code)
print([each.checkpoint["channel_values"] for each in saver.list(config)])
put("goes on")
print(len(list(saver.list(config))))
saver.close()
"""


def test_a_full_disk_is_a_typed_error_and_what_was_saved_is_intact(tmp_path: Path) -> None:
    done = run(FULL, str(tmp_path), prefix=OWN_MOUNTS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["STORE_FULL", "[{'x': 'small'}]", "2"]


WRITER = """
import os, sys
from langgraph.checkpoint.base import empty_checkpoint
from sandkeep.langgraph import CheckpointSaver
folder, me = sys.argv[1:3]
saver = CheckpointSaver(folder)
step = 0
while me == "endless" or step < 15:
    checkpoint = empty_checkpoint()
    checkpoint["channel_values"] = {"step": step}
    config = saver.put({"configurable": {"thread_id": me, "checkpoint_ns": ""}}, checkpoint, {"step": step}, {"step": step})
    saver.put_writes(config, [("w", step)], "task")
    os.write(1, b"%d\\n" % step)
    step += 1
saver.close()
"""


def writer(folder: Path, me: str) -> subprocess.Popen[bytes]:
    return begin(WRITER, str(folder), me)


def test_processes_share_a_new_file(tmp_path: Path) -> None:
    crowd = [writer(tmp_path / "threads", f"t{number}") for number in range(3)]
    for each in crowd:
        each.communicate(timeout=150)
    assert [each.returncode for each in crowd] == [0, 0, 0]
    with CheckpointSaver(tmp_path / "threads") as saver:
        for number in range(3):
            assert [each.metadata["step"] for each in saver.list(at(f"t{number}"))] == list(range(14, -1, -1))


def test_kill_9_loses_nothing_that_was_reported(tmp_path: Path) -> None:
    child = writer(tmp_path / "threads", "endless")
    assert child.stdout is not None
    try:
        for _ in range(8):
            last = int(child.stdout.readline())
    finally:
        child.send_signal(signal.SIGKILL)
        rest = [int(line) for line in child.stdout.read().split(b"\n")[:-1]]
        child.stdout.close()
        child.wait(timeout=60)
    last = rest[-1] if rest else last
    with CheckpointSaver(tmp_path / "threads") as saver:
        found = list(saver.list(at("endless")))
        assert [each.checkpoint["channel_values"]["step"] for each in found] == list(range(len(found) - 1, -1, -1))
        assert len(found) in (last + 1, last + 2)
        assert found[-1 - last].pending_writes == [("task", "w", last)]


def test_threads_share_one_saver(saver: CheckpointSaver) -> None:
    errors: list[BaseException] = []

    def work(name: str) -> None:
        try:
            for step in range(10):
                put(saver, name, {"step": step}, step=step)
                assert next(saver.list(at(name))).metadata["step"] == step
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(f"t{number}",)) for number in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == []
    assert len(list(saver.list(None))) == 40
