"""Fixtures that everybody shares: a home of one's own, in which nothing may be left running; a guest alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from guest_box import Box, guest
from sandkeep import Sandbox
from sandkeep.errors import SandkeepError
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc

Make = Callable[..., Sandbox]

# The same examples in every run, however slow the machine is.
settings.register_profile(
    "steady", deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
settings.load_profile("steady")


@pytest.fixture
def home(tmp_path: Path) -> Iterator[Path]:
    """A fresh home; whatever a test left in it is killed and collected, and nothing may remain."""
    path = tmp_path / "home"
    yield path
    found = Home(path)
    for id in found.ids():
        with contextlib.suppress(SandkeepError):
            Sandbox.attach(id, home=path).kill()
    if path.exists():
        gc(found, cache=True)
        assert found.ids() == []
        assert found.layers.ids() == []


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
    run = tmp_path / "run"
    run.mkdir()
    with guest(run) as found:
        yield found
