"""The command line as a user or a script meets it."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sandkeep import Store
from sandkeep.checkpoints import records
from sandkeep.cli import output
from trees import put


def run(home: Path, *words: str, stdin: str | None = None, check: int | None = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-m", "sandkeep", *words], capture_output=True, text=True, timeout=170, input=stdin,
        env={**os.environ, "SANDKEEP_HOME": str(home)},
    )  # fmt: skip
    if check is not None:
        assert done.returncode == check, done.stdout + done.stderr
    return done


@pytest.mark.timeout(900)  # some forty programs, one after another
def test_a_day_on_the_command_line(home: Path, tmp_path: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc", "--env", "A=1", "--memory", "512m").stdout.strip()
    assert run(home, "sandbox", "exec", id, "echo $A; exit 4", check=4).stdout == "1\n"
    assert run(home, "sandbox", "exec", id, "--", "printf", "%s|", "$A", "a  b", "it's").stdout == "$A|a  b|it's|"
    assert run(home, "sandbox", "exec", id, "cat > f", stdin="from stdin").returncode == 0
    shown = run(home, "sandbox", "info", id).stdout
    assert "memory 512.0 MiB" in shown
    assert "A=1\n" in shown
    told = json.loads(run(home, "sandbox", "exec", "--json", id, "cat f").stdout)
    assert (told["stdout"], told["exit_code"]) == ("from stdin", 0)
    snapshot = run(home, "sandbox", "snapshot", id, "c").stdout.strip()
    run(home, "sandbox", "exec", id, "rm f")
    run(home, "sandbox", "restore", id, snapshot)
    assert json.loads(run(home, "sandbox", "snapshots", id, "--json").stdout)[0]["comment"] == "c"
    (fork,) = (one["id"] for one in json.loads(run(home, "sandbox", "fork", id, "--json").stdout))
    listed = json.loads(run(home, "sandbox", "list", "--json").stdout)
    assert {one["id"] for one in listed} == {id, fork}
    assert json.loads(run(home, "sandbox", "info", fork, "--json").stdout)["forked_from"] == id
    one = run(home, "checkpoint", "create", id, "--comment", "first", "--tag", "t").stdout.strip()
    run(home, "sandbox", "exec", id, "echo more >> f; echo g > g")
    two = json.loads(run(home, "checkpoint", "create", id, "--json").stdout)["id"]
    assert [c["id"] for c in json.loads(run(home, "checkpoint", "list", "--json").stdout)] == [two, one]
    assert "first" in run(home, "checkpoint", "list", "--tag", "t").stdout
    assert one in run(home, "checkpoint", "tree").stdout
    assert json.loads(run(home, "checkpoint", "show", two, "--json").stdout)["lineage"] == [two, one]
    assert run(home, "checkpoint", "show", two, "--left-out").stdout == ""
    assert run(home, "checkpoint", "diff", one, two).stdout.splitlines() == [
        "changed\t/home/user/workspace/f\tcontent time",
        "added\t/home/user/workspace/g\t",
    ]
    assert "changed\t/home/user/workspace\t" in run(home, "checkpoint", "diff", one, two, "--all").stdout
    assert run(home, "checkpoint", "cat", one, "/home/user/workspace/f").stdout == "from stdin"
    assert "workspace/g" in run(home, "checkpoint", "find", two, "**/g").stdout
    assert "f" in run(home, "checkpoint", "ls", two, "/home/user/workspace").stdout
    assert run(home, "checkpoint", "extract", two, str(tmp_path / "out"), "--glob", "**/g").stdout.startswith(
        "wrote 4 entries (2 B)"
    )
    assert [path.read_text() for path in (tmp_path / "out").rglob("g")] == ["g\n"]
    run(home, "checkpoint", "name", "stable", one)
    assert run(home, "checkpoint", "name", "stable").stdout.strip() == one
    again = json.loads(run(home, "checkpoint", "restore", "stable", "--runtime", "runc", "--json").stdout)
    assert run(home, "sandbox", "exec", again["id"], "cat f").stdout == "from stdin"
    run(home, "checkpoint", "export", two, str(tmp_path / "file"))
    assert (
        run(home, "checkpoint", "import", str(tmp_path / "file"), "--store", str(tmp_path / "other")).stdout.strip()
        == two
    )
    assert run(home, "checkpoint", "verify", "--store", str(tmp_path / "other")).stdout == "all is well\n"
    assert "checkpoint name NAME --remove" in run(home, "checkpoint", "forget", one, check=4).stderr
    assert run(home, "checkpoint", "forget", "--keep-last", "1", "--dry-run").stdout.startswith(
        "would forget 0 checkpoints, 2 kept"
    )
    assert "--allow-empty" in run(home, "checkpoint", "forget", "--keep-last", "0", check=2).stderr
    assert (
        "no checkpoint has the tag 'relase'"
        in run(home, "checkpoint", "forget", "--keep-tag", "relase", check=2).stderr
    )
    told = run(home, "checkpoint", "forget", "--keep-last", "0", "--allow-empty", "--dry-run").stdout.splitlines()
    assert [told[0].split("\t")[0], told[1].split(",")[0]] == [two, "would forget 1 checkpoint"]
    assert run(home, "store", "gc").stdout == "nothing to do\n"
    assert json.loads(run(home, "store", "info", "--json").stdout)["checkpoints"] == 2
    run(home, "sandbox", "pause", fork)
    assert json.loads(run(home, "sandbox", "resume", fork, "--json").stdout)["level"] == "files"
    run(home, "sandbox", "kill", id, fork, again["id"])
    assert json.loads(run(home, "sandbox", "list", "--json").stdout) == []
    assert run(home, "gc", "--cache").stdout.startswith("removed ")
    assert run(home, "gc", "--cache").stdout == "nothing to do\n"


def test_output_is_every_byte_and_a_folder_of_the_base_is_not_news(home: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc").stdout.strip()
    argv = [sys.executable, "-m", "sandkeep", "sandbox", "exec", id, r"printf 'a\377\000\r\nb'; printf '\377' >&2"]
    done = subprocess.run(argv, capture_output=True, timeout=170, env={**os.environ, "SANDKEEP_HOME": str(home)})
    assert (done.stdout, done.stderr) == (b"a\xff\x00\r\nb", b"\xff")
    one = run(home, "checkpoint", "create", id).stdout.strip()
    run(home, "sandbox", "exec", id, "--user", "root", "mkdir -p /usr/local/share/new/empty; touch /usr/local/bin/tool")
    two = run(home, "checkpoint", "create", id).stdout.strip()
    assert run(home, "checkpoint", "diff", one, two).stdout.splitlines() == [
        "added\t/usr/local/bin/tool\t",
        "added\t/usr/local/share/new/empty\t",
    ]


def test_a_line_of_a_thousand_is_drawn_with_its_branches(home: Path, root: Path) -> None:
    with Store(home=home) as store:
        last = first = put(root, store, {"f": b"1"}, comment="the \x1b[2J first", tag="t")
        record = store.record(first)
        for number in range(1200):
            id = records.new_id()
            store.repo.put_record(
                records.KIND, id, replace(record, id=id, parent_id=last, comment=None, tag=None).pack()
            )
            if number != 600:
                last = id
            else:
                aside = id
    lines = run(home, "checkpoint", "tree").stdout.splitlines()
    assert lines[0] == rf"{first} the \x1b[2J first [t]"
    assert len(lines) == 1201
    assert [line for line in lines if not line.startswith("ck_")] == [f"├── {aside}"]
    told = json.loads(run(home, "checkpoint", "tree", "--json").stdout)
    assert (told[0]["id"], told[-1]["id"], told[1]["parent_id"]) == (first, last, first)


def test_an_export_that_fails_leaves_what_was_there(home: Path, root: Path, tmp_path: Path) -> None:
    with Store(home=home) as store:
        kept = put(root, store, {"f": os.urandom(3_000_000)})
    (pack,) = (home / "store/packs").iterdir()
    file = tmp_path / "file"
    file.write_text("mine")
    run(home, "checkpoint", "export", kept, str(file))
    whole = file.read_bytes()
    piped = subprocess.run(
        [sys.executable, "-m", "sandkeep", "checkpoint", "export", kept, "-", "--home", str(home)], capture_output=True
    )
    assert piped.stdout == whole
    data = bytearray(pack.read_bytes())
    data[1_000_000] ^= 1
    pack.write_bytes(data)
    run(home, "checkpoint", "export", kept, str(file), check=5)
    assert file.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "home"]


def test_forget_and_gc_say_the_same_bytes(home: Path, root: Path) -> None:
    with Store(home=home) as store:
        one = put(root, store, {"f": os.urandom(500_000)})
        put(root, store, {"f": os.urandom(500_000)}, parent_id=one)
    told = run(home, "checkpoint", "forget", "--keep-last", "1", "--dry-run").stdout
    assert run(home, "checkpoint", "forget", one).stdout.splitlines()[0] == told.splitlines()[0]
    free = told.split("would then free ")[1].strip()
    assert free.endswith(" KiB)")
    assert run(home, "checkpoint", "list", "--forgotten").stdout.startswith(one)
    assert run(home, "checkpoint", "unforget", one[:20]).stdout == one + "\n"
    assert run(home, "checkpoint", "forget", one).stdout.splitlines()[0] == told.splitlines()[0]
    assert run(home, "store", "gc", "--grace", "1h").stdout == "nothing to do\n"
    would = run(home, "store", "gc", "--dry-run").stdout
    assert would.endswith(f"; would make 1 forgotten checkpoint final\nfinal: {one}\n")
    assert run(home, "store", "gc").stdout.startswith(f"freed {free}: removed ")
    assert "gc has run" in run(home, "checkpoint", "unforget", one, check=3).stderr


def test_a_sandbox_is_restored_from_its_own_store(home: Path) -> None:
    done = run(home, "checkpoint", "restore", "latest", "--sandbox", "sb-000000000000", "--store", "x", check=2)
    assert "its own store" in done.stderr


def test_progress_goes_to_the_terminal_and_not_into_the_answer(home: Path, root: Path, tmp_path: Path) -> None:
    with Store(home=home) as store:
        kept = put(root, store, {f"f{n}": os.urandom(200) for n in range(3000)})
    there, terminal = pty.openpty()
    seen: list[bytes] = []

    def watch() -> None:
        """All the while: a terminal that nobody reads is full some time."""
        with contextlib.suppress(OSError):
            while data := os.read(there, 1 << 16):
                seen.append(data)

    watcher = threading.Thread(target=watch)
    watcher.start()
    for words in (("extract", kept, str(tmp_path / "out")), ("verify",)):
        argv = [sys.executable, "-m", "sandkeep", "checkpoint", *words, "--home", str(home)]
        with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=terminal, text=True) as job:
            out, _ = job.communicate(timeout=170)
            assert "\x1b" not in out
            assert job.returncode == 0
    os.close(terminal)
    watcher.join(60)
    os.close(there)
    shown = b"".join(seen)
    assert b"extracting" in shown or b"unpack" in shown
    assert b"verifying" in shown or b"pack" in shown


def test_input_is_passed_on_as_it_comes(home: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc").stdout.strip()
    argv = [sys.executable, "-m", "sandkeep", "sandbox", "exec"]
    ways = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "env": {**os.environ, "SANDKEEP_HOME": str(home)}}
    with subprocess.Popen([*argv, id, "echo up; while read x; do echo got $x; done"], **ways) as talk:  # type: ignore[call-overload]
        assert talk.stdout.readline() == b"up\n"  # nothing was sent yet
        for word in (b"one", b"two"):
            talk.stdin.write(word + b"\n")
            talk.stdin.flush()
            assert talk.stdout.readline() == b"got " + word + b"\n"
        talk.stdin.close()
        assert talk.wait(100) == 0
    for words in ([id, "echo done; exit 3"], ["--json", id, "echo done; exit 3"]):
        with subprocess.Popen([*argv, *words], **ways) as ended:  # type: ignore[call-overload]
            assert ended.wait(100) == 3  # though its input is still open
            assert b"done" in ended.stdout.read()
    data = os.urandom(5_000_000)
    done = subprocess.run(
        [*argv, id, "tee >(wc -c >&2)"], input=data, capture_output=True, timeout=170, env=ways["env"]
    )
    assert (done.stdout, done.stderr.strip()) == (data, b"5000000")
    with open(os.devnull) as nothing:
        done = subprocess.run(
            [*argv, id, "cat; echo end"], stdin=nothing, capture_output=True, timeout=170, env=ways["env"]
        )
    assert done.stdout == b"end\n"
    huge = subprocess.run([*argv, id, "head -c 3"], input=data, capture_output=True, timeout=170, env=ways["env"])
    assert huge.stdout == data[:3]
    told = json.loads(run(home, "sandbox", "exec", "--json", id, "cat", stdin="words").stdout)
    assert (told["stdout"], told["exit_code"]) == ("words", 0)


def test_nonsense_is_refused_before_anything_is_made(home: Path, tmp_path: Path) -> None:
    here = tmp_path / "here"
    here.mkdir()
    for words in (
        ("sandbox", "create", "--home", ""),
        ("serve", "--port", "99999"),
        ("checkpoint", "name", "a", "b", "--remove"),
    ):
        done = subprocess.run(
            [sys.executable, "-m", "sandkeep", *words], capture_output=True, text=True, timeout=170, cwd=here,
            env={**os.environ, "SANDKEEP_HOME": str(home)},
        )  # fmt: skip
        assert done.returncode == 2
        assert "Traceback" not in done.stderr
        assert "sk_" not in done.stdout
    assert list(here.iterdir()) == []
    assert not home.exists()


def test_an_export_that_can_not_be_written_is_refused_in_words(home: Path, tmp_path: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc").stdout.strip()
    saved = run(home, "checkpoint", "create", id).stdout.strip()
    kept = tmp_path / "kept"
    kept.write_text("precious")
    assert "CHECKPOINT_NOT_FOUND" in run(home, "checkpoint", "export", "nope", str(kept), check=3).stderr
    assert kept.read_text() == "precious"
    assert "HOST_REFUSED" in run(home, "checkpoint", "export", saved, str(tmp_path), check=1).stderr
    assert "HOST_REFUSED" in run(home, "checkpoint", "export", saved, str(tmp_path / "no/such"), check=1).stderr
    run(home, "sandbox", "exec", id, "echo text > f")
    other = run(home, "checkpoint", "create", id).stdout.strip()
    for words in (("export", saved, "-"), ("cat", other, "/home/user/workspace/f")):
        with open("/dev/full", "wb") as full:
            done = subprocess.run(
                [sys.executable, "-m", "sandkeep", "checkpoint", *words], stdout=full, stderr=subprocess.PIPE, text=True,
                timeout=170, env={**os.environ, "SANDKEEP_HOME": str(home)},
            )  # fmt: skip
        assert "STORE_FULL" in done.stderr, words
        assert "Traceback" not in done.stderr
        assert done.returncode == 1
    run(home, "checkpoint", "export", saved, str(kept))
    assert run(home, "checkpoint", "import", str(kept), "--store", str(tmp_path / "other")).stdout.strip() == saved


def test_streams_that_the_caller_closed_are_no_reason_to_fail(home: Path) -> None:
    argv = f"{sys.executable} -m sandkeep sandbox list --home {home}"
    for closed in ("<&-", ">&-", "<&- >&- 2>&-"):
        assert subprocess.run(f"{argv} {closed}", shell=True, timeout=170).returncode == 0, closed


def test_a_table_on_a_narrow_terminal_keeps_ids_and_times_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(output, "screen", Console(file=terminal, width=80, color_system=None))
    id, time = "ck_" + "0" * 26, "2026-01-02 03:04:05Z"
    comment = "[red]a comment that goes on for ever, with \x1b[2J in it"
    columns = {
        "id": lambda _: id,
        "time": lambda _: time,
        "size": lambda _: "1023.9 MiB",
        "tag": lambda _: "",
        "comment": str,
    }
    output.table([comment, "short"], columns, False)
    heading, first, second = terminal.getvalue().splitlines()
    assert heading.split() == ["id", "time", "size", "comment"]
    assert first.startswith(f"{id}  {time}  1023.9 MiB  [red]a")
    assert first.endswith("…")
    assert second.split() == [id, *time.split(), "1023.9", "MiB", "short"]
    assert output.printable("a\x1b[2J\n\udcff") == r"a\x1b[2J\n\udcff"


def test_a_comment_or_a_place_is_given_once(home: Path, tmp_path: Path) -> None:
    run(home, "sandbox", "snapshot", "sb-000000000000", "a", "--comment", "b", check=2)
    run(home, "store", "init", str(tmp_path / "a"), "--store", str(tmp_path / "b"), check=2)
    assert list(tmp_path.iterdir()) == []
    assert json.loads(run(home, "store", "init", str(tmp_path / "a"), "--json").stdout)["url"] == str(tmp_path / "a")


@pytest.mark.parametrize(
    "words", [("sandbox", "create"), ("sandbox", "list"), ("gc", "--json"), ("checkpoint", "list")]
)
def test_a_home_that_is_a_file_is_refused_in_words(tmp_path: Path, words: tuple[str, ...]) -> None:
    wrong = tmp_path / "file"
    wrong.write_text("mine")
    done = run(wrong, *words, check=1)
    assert ("STORE_MISSING" if words[0] == "checkpoint" else "HOST_REFUSED") in done.stderr
    assert str(wrong) in done.stderr
    assert "Traceback" not in done.stderr
    assert (done.stdout, wrong.read_text()) == ("", "mine")


def test_a_home_that_cannot_be_made_is_refused_in_words() -> None:
    done = run(Path("/proc/none"), "sandbox", "create", check=1)
    assert done.stderr.startswith("error: No such file or directory: /proc/none [HOST_REFUSED]\n   try: ")


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sandbox", "info", "sb-000000000000"), 3),
        (("sandbox", "info", "nonsense"), 2),
        (("checkpoint", "show", "nothing"), 3),
        (("sandbox", "create", "--memory", "much"), 2),
        (("sandbox", "nonsense"), 2),
        (("checkpoint", "list", "--store", "s3://no-such-bucket-anywhere/x", "--endpoint", "http://127.0.0.1:9"), 1),
    ],
)
def test_errors_have_codes_and_words(home: Path, words: tuple[str, ...], code: int) -> None:
    done = run(home, *words, check=None)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr


def test_doctor_and_demo(home: Path) -> None:
    told = json.loads(run(home, "doctor", "--json").stdout)
    assert {one["name"]: one["healthy"] for one in told["runtimes"]}["runc"]
    shown = run(home, "demo", "--runtime", "runc").stdout
    assert "nothing was lost" in shown


def test_the_interactive_shell(home: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc").stdout.strip()
    child, terminal = pty.fork()
    if child == 0:
        os.execve(
            sys.executable,
            [sys.executable, "-m", "sandkeep", "sandbox", "shell", id],
            {**os.environ, "SANDKEEP_HOME": str(home)},
        )
    seen, sent, deadline = b"", False, time.monotonic() + 120
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 1)
        if ready:
            try:
                data = os.read(terminal, 4096)
            except OSError:
                break
            if not data:
                break
            seen += data
            if not sent:
                os.write(terminal, b"echo $((40+2)) && tty && exit 6\n")
                sent = True
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert b"42" in seen
    assert b"/dev/pts/" in seen
    assert os.waitstatus_to_exitcode(status) == 6


def test_what_is_typed_ahead_reaches_the_shell(home: Path) -> None:
    id = run(home, "sandbox", "create", "--runtime", "runc").stdout.strip()
    child, terminal = pty.fork()
    if child == 0:
        words = [sys.executable, "-m", "sandkeep", "sandbox", "shell", id]
        os.execve(sys.executable, words, {**os.environ, "SANDKEEP_HOME": str(home)})
    os.write(terminal, b"exit 7\n")  # before there is anybody to read it
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ready, _, _ = select.select([terminal], [], [], 1)
        try:
            if ready and not os.read(terminal, 4096):
                break
        except OSError:
            break
    os.close(terminal)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
