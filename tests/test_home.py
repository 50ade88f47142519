"""The home: private whoever makes it, named or refused, removable by its user."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from sandkeep import Sandbox, Store
from sandkeep.errors import BadArgument, HostRefused, StoreMissing
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
