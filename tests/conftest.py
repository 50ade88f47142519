"""Fixtures that everybody shares: a home of one's own, in which nothing may be left running; a guest alone; a store's objects."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from guest_box import Box, guest
from sandkeep import Sandbox, Store
from sandkeep.errors import SandkeepError
from sandkeep.sandbox.checking import check
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc
from sandkeep.store.objects import Objects, open_objects
from sandkeep.store.repository import Repository
from trees import quick_folder

Make = Callable[..., Sandbox]
Open = Callable[..., Repository]

# The same examples in every run, however slow the machine is.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("steady")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A fresh home; whatever a test left in it is killed and collected, and nothing may remain. Its layers keep the rules."""
    path = tmp_path / "home"
    yield path
    found = Home(path)
    broken = check(found) if path.exists() else []
    for id in found.ids():
        with contextlib.suppress(SandkeepError):
            Sandbox.attach(id, home=path).kill()
    if path.exists():
        gc(found, cache=True)
        assert found.ids() == []
        assert found.layers.ids() == []
    assert broken == []


@pytest.fixture
def make(home: Path) -> Make:
    """Sandboxes in that home, on runc unless said otherwise."""

    def sandbox(**options: Any) -> Sandbox:
        return Sandbox(**{"home": home, "runtime": "runc", **options})

    return sandbox


@pytest.fixture
def sb(make: Make) -> Sandbox:
    return make()


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Box]:
    """The guest alone, as an ordinary process of this machine."""
    dir = tmp_path / "run"
    dir.mkdir()
    with guest(dir) as found:
        yield found


@pytest.fixture
def called(tmp_path: Path) -> Iterator[Box]:
    """The same, one that can't be given a listener."""
    dir = tmp_path / "run"
    dir.mkdir()
    with guest(dir, calls=True) as found:
        yield found


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder where many files and many syncs cost little."""
    with quick_folder() as folder:
        yield folder


@pytest.fixture
def store(root: Path) -> Iterator[Store]:
    with Store(root / "store", home=root / "home") as opened:
        yield opened


@pytest.fixture
def objects(tmp_path: Path) -> Objects:
    return open_objects(tmp_path / "store")


@pytest.fixture
def opened(objects: Objects, tmp_path: Path, request: pytest.FixtureRequest) -> Open:
    """Repositories over those objects, each cache another machine; closed at the end."""

    def make(cache: str = "cache", over: Objects = objects, **options: Any) -> Repository:
        repo = Repository.open(over, tmp_path / cache, **options)
        request.addfinalizer(repo.close)
        return repo

    return make
