"""Two servers on one PostgreSQL and one store: what one puts to sleep the other wakes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from postgres import Postgres, postgres  # noqa: F401
from sandkeep.sandbox import Sandbox
from serving import Served, made, ran, serving, told, until


@pytest.fixture
def pair(postgres: Postgres, tmp_path: Path) -> Iterator[tuple[Served, Served]]:  # noqa: F811
    database = postgres.url(postgres.create())
    options = ("--runtime", "runc", "--store", str(tmp_path / "store"), "--sweep-interval", "0.5")
    with (
        serving(tmp_path / "a", *options, database=database) as first,
        serving(tmp_path / "b", *options, database=database) as second,
    ):
        yield first, second


def both(pair: tuple[Served, Served]) -> tuple[httpx.Client, httpx.Client]:
    key = pair[0].key()
    return pair[0].api(key), pair[1].api(key)


def test_a_sleeper_wakes_on_the_other_server_and_comes_back(pair: tuple[Served, Served]) -> None:
    here, there = both(pair)
    id = made(here, metadata={"n": 1}, auto_pause_timeout=900)
    ran(here, id, "echo 1 > f; export WORD=kept")
    told(there.post(f"/sandboxes/{id}/commands", json={"command": "id"}), 421, "SANDBOX_ELSEWHERE")
    assert there.get(f"/sandboxes/{id}").json()["state"] == "RUNNING"
    apis = [here, there]
    for turn in range(4):
        mine, other = apis[turn % 2], apis[(turn + 1) % 2]
        assert mine.post(f"/sandboxes/{id}/pause").json()["state"] == "PAUSED"
        assert ran(other, id, f"cat f; echo $WORD; echo {turn + 2} > f")["stdout"] == f"{turn + 1}\nkept\n"
    shown = here.get(f"/sandboxes/{id}").json()
    assert (shown["metadata"], shown["auto_pause_timeout"]) == ({"n": 1}, 900)
    assert here.delete(f"/sandboxes/{id}").status_code == 204
    until(lambda: not any(Sandbox.list(home=one.home) for one in pair), "nothing of it is left on either host")


def test_a_stopped_servers_sandboxes_go_on_elsewhere(pair: tuple[Served, Served]) -> None:
    here, there = both(pair)
    ids = [made(here) for _ in range(3)]
    for id in ids:
        ran(here, id, f"echo {id} > f")
    assert pair[0].stop() == 0
    for id in ids:
        assert ran(there, id, "cat f")["stdout"] == f"{id}\n"
        assert there.delete(f"/sandboxes/{id}").status_code == 204


def test_the_database_goes_away_and_comes_back(pair: tuple[Served, Served], postgres: Postgres) -> None:  # noqa: F811
    here, _ = both(pair)
    id = made(here)
    ran(here, id, "echo kept > f")
    postgres.stop()
    told(here.get(f"/sandboxes/{id}"), 503, "DATABASE_UNREACHABLE")
    assert httpx.get(f"{pair[0].url}/health", trust_env=False, timeout=120).status_code == 503
    postgres.start()
    assert ran(here, id, "cat f")["stdout"] == "kept\n"
    until(lambda: httpx.get(f"{pair[0].url}/health", trust_env=False, timeout=120).status_code == 200, "healthy again")
