"""E2B's own SDKs, unmodified, against the real server: a part of what `e2b_all.py` runs in full."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2b_kit import run
from serving import Served, serving

pytest_plugins = ["serving"]


@pytest.fixture(scope="module")
def with_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("e2b") / "home", "--runtime", "runsc") as found:
        yield found


@pytest.mark.parametrize(
    ("sdk", "program"),
    [
        ("new", "surface.py"),
        ("new", "more.py"),
        ("new", "surface_async.py"),
        ("old", "surface.py"),
        ("js-new", "surface.mjs"),
    ],
)
def test_sdk(served: Served, sdk: str, program: str) -> None:
    run(served, sdk, program)


@pytest.mark.parametrize("part", ["cycles=2", "by_timeout", "saved_under_way"])
def test_memory(with_memory: Served, part: str) -> None:
    run(with_memory, "new", "memory.py", part)
