"""All of E2B's SDKs on both kinds of runtime, long sleeps and restarts: `pytest tests/e2b_all.py`, which `make test` does not collect."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from e2b_kit import run
from serving import Served, fixed_port, serving

SDKS = [
    ("old", "surface.py"), ("new", "surface.py"), ("old", "surface_async.py"), ("new", "surface_async.py"),
    ("old", "more.py"), ("new", "more.py"), ("js-old", "surface.mjs"), ("js-new", "surface.mjs"),
]  # fmt: skip


@pytest.fixture(scope="module", params=["runc", "runsc"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("e2b") / "home", "--runtime", request.param) as found:
        yield found


@pytest.fixture(scope="module")
def with_memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("e2b") / "home", "--runtime", "runsc") as found:
        yield found


@pytest.mark.parametrize(("sdk", "program"), SDKS)
def test_sdk(server: Served, sdk: str, program: str) -> None:
    run(server, sdk, program)


@pytest.mark.parametrize("part", ["cycles=20", "by_timeout", "forks", "saved_under_way", "files_only"])
def test_memory(with_memory: Served, part: str) -> None:
    run(with_memory, "new", "memory.py", part)


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_server_restarted_while_one_runs_and_one_sleeps(tmp_path_factory: pytest.TempPathFactory, way: str) -> None:
    home = tmp_path_factory.mktemp("e2b") / "home"
    with serving(home, "--runtime", "runsc", port=fixed_port()) as served:
        key = served.key()
        left = run(served, "new", "memory.py", "leave", key=key)
        getattr(served, way)()
        served.start()
        run(served, "new", "memory.py", "come_back", key=key, LEFT=left)
