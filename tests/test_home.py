"""The home: private whoever makes it, named or refused, removable by its user."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from sandkeep import Sandbox, Store
from sandkeep.errors import BadArgument, HostRefused, RuntimeFailed, StoreMissing
from sandkeep.runtime import doctor
from sandkeep.runtime.base import resolve
from sandkeep.runtime.pick import pick
from sandkeep.sessions import Database


def test_a_home_is_private_whoever_makes_it_first(tmp_path: Path) -> None:
    makers: list[Callable[[Path], object]] = [
        lambda home: doctor.host(home),
        lambda home: doctor.probe("runc", home),
        lambda home: resolve("host", home),
        lambda home: pick("auto", home),
        lambda home: Store(home=home).close(),
        lambda home: Store(tmp_path / "elsewhere", home=home).close(),
        lambda home: Database(f"sqlite:///{home}/sessions.db").open().close(),
    ]
    for number, make in enumerate(makers):
        home = tmp_path / f"home{number}"
        make(home)
        assert home.stat().st_mode & 0o777 == 0o700, number
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o755)
    Store(home=shared).close()
    assert {(shared / name).stat().st_mode & 0o777 for name in ("store", "cache")} == {0o700}


WITHOUT = """
import sys
class Absent:
    def find_spec(self, name, *_):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
"""


def test_a_missing_library_is_named_with_the_line_that_installs_it() -> None:
    for absent, code, said in (
        ("httpx", "import sandkeep; sandkeep.connect('http://x', api_key='k')", "sandkeep[client]"),
        ("langchain_core", "import sandkeep.langgraph", "sandkeep[langgraph]"),
        ("fastapi", "from sandkeep.cli.main import main; main(['serve'])", "sandkeep[server]"),
    ):
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT + code, absent], capture_output=True, text=True, timeout=170
        )
        assert done.returncode == 1
        assert absent in done.stderr
        assert f"pip install '{said}'" in done.stderr


def test_a_base_without_python_is_refused_in_words(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "usr/bin").mkdir(parents=True)
    for runtime in ("runc", "crun", "runsc"):
        with pytest.raises(BadArgument, match="has no /usr/bin/env and python3"):
            Sandbox(home=tmp_path / "home", base=str(base), runtime=runtime)
    (base / "usr/bin/env").symlink_to("/usr/local/env")  # an absolute link means what is inside
    (base / "usr/local").mkdir()
    (base / "usr/local/env").write_text("")
    with pytest.raises(BadArgument, match="has no python3"):
        Sandbox(home=tmp_path / "home", base=str(base), runtime="runc")
    assert Sandbox.list(home=tmp_path / "home") == []


def test_what_removed_its_python_says_so_when_it_is_to_start_again(home: Path) -> None:
    sb = Sandbox(home=home, runtime="runc")
    sb.commands.run("echo kept > f; rm /usr/bin/python3", user="root")
    saved = sb.checkpoint()
    with pytest.raises(RuntimeFailed, match=r"python3.*older state"):
        sb.fork()
    assert Store(home=home).read(saved.id, "/home/user/workspace/f") == b"kept\n"
    assert sb.commands.run("cat f").stdout == "kept\n"


def test_a_home_that_can_not_be_is_refused_in_our_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for nameless in ("", "a\0b", 5):
        with pytest.raises(BadArgument):
            Sandbox(home=nameless)  # type: ignore[arg-type]
    for wrong in ("/dev/null/x", "/proc/x"):
        with pytest.raises(HostRefused) as caught:
            Sandbox(home=wrong)
        assert caught.value.remedy
        assert wrong in str(caught.value)
        assert wrong not in caught.value.told()
        with pytest.raises(StoreMissing):
            Store(wrong, home=tmp_path / "home")
    assert os.listdir(tmp_path) == ["home"]
