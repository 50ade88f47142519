"""Two servers on one PostgreSQL and one store: what one puts to sleep the other wakes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from postgres import Postgres, postgres  # noqa: F401
from sandkeep.sandbox import Sandbox
from serving import Served, made, ran, serving, told
from swift import KEYS, Swift, swift  # noqa: F401
from waiting import until

MANY = int(os.environ.get("SANDKEEP_FLEET", "20"))  # sandboxes of the server that is killed


@pytest.fixture
def pair(postgres: Postgres, tmp_path: Path) -> Iterator[tuple[Served, Served]]:  # noqa: F811
    database = postgres.url(postgres.create())
    options = ("--runtime", "runc", "--store", str(tmp_path / "store"), "--sweep-interval", "0.5")
    with (
        serving(tmp_path / "a", *options, database=database) as first,
        serving(tmp_path / "b", *options, database=database) as second,
    ):
        yield first, second


@pytest.fixture
def far_pair(
    postgres: Postgres,  # noqa: F811
    swift: Swift,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[Served, Served]]:
    """Two servers that share nothing but a PostgreSQL and a bucket."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_key"])
    database = postgres.url(postgres.create())
    store = ("--store", f"s3://{swift.bucket()}/kept", "--store-option", f"endpoint={swift.endpoint}")
    options = ("--runtime", "runc", *store, "--store-option", "region=us-east-1", "--sweep-interval", "0.5")
    with (
        serving(tmp_path / "a", *options, database=database) as first,
        serving(tmp_path / "b", *options, database=database) as second,
    ):
        yield first, second


def both(pair: tuple[Served, Served]) -> tuple[httpx.Client, httpx.Client]:
    key = pair[0].key()
    return pair[0].api(key), pair[1].api(key)


def put_to_sleep(api: httpx.Client, id: str) -> None:
    answer = api.post(f"/sandboxes/{id}/pause")
    assert answer.status_code == 200, answer.text
    assert answer.json()["state"] == "PAUSED"


@pytest.mark.parametrize("kind", ["pair", "far_pair"])
def test_a_sleeper_wakes_on_the_other_server_and_comes_back(kind: str, request: pytest.FixtureRequest) -> None:
    pair: tuple[Served, Served] = request.getfixturevalue(kind)
    here, there = both(pair)
    id = made(here, metadata={"n": 1}, auto_pause_timeout=900)
    ran(here, id, "echo 1 > f; export WORD=kept")
    assert ran(there, id, "cat f")["stdout"] == "1\n"
    assert there.get(f"/sandboxes/{id}").json()["host"] == here.get(f"/sandboxes/{id}").json()["host"]
    apis = [here, there]
    for turn in range(4):
        mine, other = apis[turn % 2], apis[(turn + 1) % 2]
        put_to_sleep(mine, id)
        assert ran(other, id, f"cat f; echo $WORD; echo {turn + 2} > f")["stdout"] == f"{turn + 1}\nkept\n"
    shown = here.get(f"/sandboxes/{id}").json()
    assert (shown["metadata"], shown["auto_pause_timeout"]) == ({"n": 1}, 900)
    assert here.delete(f"/sandboxes/{id}").status_code == 204
    until(lambda: not any(Sandbox.list(home=one.home) for one in pair), "nothing of it is left on either host")


def test_snapshots_that_stay_behind_are_named(pair: tuple[Served, Served]) -> None:
    here, there = both(pair)
    id = made(here)
    path = f"/sandboxes/{id}"
    kept, deleted = (here.post(f"{path}/snapshot", json={"comment": one}).json()["id"] for one in ("kept", "deleted"))
    assert here.delete(f"{path}/snapshots/{deleted}").status_code == 204
    put_to_sleep(here, id)
    assert here.post(f"{path}/resume").json()["restore_report"]["lost"] == []
    assert [one["id"] for one in there.get(f"{path}/snapshots").json()["snapshots"]] == [kept]
    put_to_sleep(here, id)
    assert there.post(f"{path}/resume").json()["restore_report"]["lost"] == [f"snapshot {kept} (kept)"]
    assert there.get(f"{path}/snapshots").json()["snapshots"] == []
    [lost] = [one for one in there.get(f"{path}/events").json()["events"] if one["kind"] == "snapshots_lost"]
    assert lost["detail"]["snapshots"] == [{"id": kept, "comment": "kept"}]
    put_to_sleep(there, id)
    assert here.post(f"{path}/resume").json()["restore_report"]["lost"] == []  # they were told of once


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
    here.post(
        f"/sandboxes/{id}/commands",
        json={"command": "while :; do date +%s%N > t; sleep 0.05; done", "background": True},
    )
    inside = Sandbox.attach(id, home=pair[0].home)
    until(lambda: inside.files.exists("t"), "it works")
    postgres.stop()
    told(here.get(f"/sandboxes/{id}"), 503, "DATABASE_UNREACHABLE")
    told(here.post(f"/sandboxes/{id}/commands", json={"command": "id"}), 503, "DATABASE_UNREACHABLE")
    told(here.post("/sandboxes", json={}), 503, "DATABASE_UNREACHABLE")
    before = inside.files.read("t")
    until(lambda: inside.files.read("t") not in (before, b""), "the sandbox works on")
    assert httpx.get(f"{pair[0].url}/health", trust_env=False, timeout=120).status_code == 503
    postgres.start()
    assert ran(here, id, "cat f")["stdout"] == "kept\n"
    until(lambda: httpx.get(f"{pair[0].url}/health", trust_env=False, timeout=120).status_code == 200, "healthy again")


@pytest.mark.timeout(600)
def test_a_killed_servers_sandboxes_go_on_from_the_bucket(far_pair: tuple[Served, Served]) -> None:
    """What sleeps wakes on the other at once. What ran there is not rolled back in silence: the other says that the host is
    gone, and goes on from the last checkpoint when told to. What never had one can't be had, and the error says so. If the
    server comes back after all, nothing of its own is lost either."""
    key = far_pair[0].key()
    here, there = far_pair[0].api(key), far_pair[1].api(key)
    ids = [made(here, auto_pause_timeout=0) for _ in range(MANY)]
    for id in ids:
        ran(here, id, f"echo {id} > f; export WORD=kept")
    asleep, saved, bare = ids[: MANY // 2], ids[MANY // 2 : -2], ids[-2:]
    for id in asleep:
        put_to_sleep(here, id)
    for id in saved:
        assert here.post(f"/sandboxes/{id}/checkpoints", json={}).status_code == 201
        ran(here, id, "echo later > later")
    far_pair[0].kill()
    for id in asleep:
        assert ran(there, id, "cat f; echo $WORD")["stdout"] == f"{id}\nkept\n"

    gone = f"/sandboxes/{saved[0]}/commands"
    until(
        lambda: there.post(gone, json={"command": "id"}).json()["code"] == "HOST_GONE", "the host is known to be gone"
    )
    for id in saved:
        answer = there.post(f"/sandboxes/{id}/resume")
        told(answer, 503, "HOST_GONE")
        assert "fail_over" in answer.json()["remedy"]
        answer = there.post(f"/sandboxes/{id}/resume", json={"fail_over": True})
        assert (answer.status_code, answer.json()["state"]) == (200, "RUNNING")
        said = ran(there, id, "cat f; echo $WORD; test -e later")
        assert (said["stdout"], said["exit_code"]) == (f"{id}\nkept\n", 1)
        kinds = [one["kind"] for one in there.get(f"/sandboxes/{id}/events").json()["events"]]
        assert "failed_over" in kinds
    for id in bare:
        answer = there.post(f"/sandboxes/{id}/resume", json={"fail_over": True})
        told(answer, 503, "HOST_GONE")
        assert "no checkpoint" in answer.json()["message"]

    far_pair[0].start()  # it was only the server that was gone: its copies still run, and know what came later
    here = far_pair[0].api(key)
    until(
        lambda: {one.id for one in Sandbox.list(home=far_pair[0].home)} == set(bare), "what went on elsewhere is gone"
    )
    for id in saved:
        [left] = [one for one in here.get(f"/sandboxes/{id}/events").json()["events"] if one["kind"] == "left_behind"]
        path = f"/checkpoints/{left['detail']['checkpoint']}/files"
        assert here.get(path, params={"path": "/home/user/workspace/later"}).text == "later\n"
        assert ran(there, id, "cat f")["stdout"] == f"{id}\n"
    for id in bare:
        assert ran(here, id, "cat f")["stdout"] == f"{id}\n"


def test_nobody_fails_over_from_a_host_that_lives(pair: tuple[Served, Served]) -> None:
    here, there = both(pair)
    id = made(here)
    assert here.post(f"/sandboxes/{id}/checkpoints", json={}).status_code == 201
    ran(here, id, "echo later > f")
    for api in (here, there):
        told(api.post(f"/sandboxes/{id}/resume", json={"fail_over": True}), 409, "STATE_CONFLICT")
    assert ran(here, id, "cat f")["stdout"] == "later\n"
