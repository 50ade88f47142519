"""What sleeps keeps its memory where the machine can, without anybody asking; and where it can't, that is said."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from conftest import Make
from e2b_kit import Client
from sandkeep.model import Limits
from sandkeep.runtime import doctor, pick
from sandkeep.sandbox import Sandbox
from sandkeep.server.app import create_app
from sandkeep.server.settings import Settings
from serving import Served, made, ran, serving, until

COUNT = "i=28; while :; do i=$((i+1)); echo $i > /tmp/n.new; mv /tmp/n.new /tmp/n; sleep 0.05; done"


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server as it is when it is told nothing of runtimes."""
    with serving(tmp_path_factory.mktemp("usual") / "home") as found:
        yield found


def shown(api: httpx.Client, id: str) -> dict[str, Any]:
    return dict(api.get(f"/sandboxes/{id}").json())


def test_what_may_sleep_keeps_its_memory(usual: Served) -> None:
    api = usual.api()
    id = made(api)
    assert shown(api, id)["runtime"] == "runsc"
    assert shown(api, id)["notes"] == []
    ran(api, id, f"sh -c '{COUNT}' >/dev/null 2>&1 &")
    before = int(until(lambda: ran(api, id, "cat /tmp/n")["stdout"], "it to count"))
    assert api.post(f"/sandboxes/{id}/pause").json()["notes"] == []
    assert api.post(f"/sandboxes/{id}/resume").json()["restore_report"]["level"] == "memory"
    assert int(ran(api, id, "cat /tmp/n")["stdout"]) >= before


def test_e2bs_sandboxes_keep_their_memory(usual: Served) -> None:
    client = Client(usual)
    box = client.create(timeout=900)
    id = box["sandboxID"]
    assert shown(client.rest, id)["runtime"] == "runsc"
    ran(client.rest, id, f"sh -c '{COUNT}' >/dev/null 2>&1 &")
    before = int(until(lambda: ran(client.rest, id, "cat /tmp/n")["stdout"], "it to count"))
    assert client.control.post(f"/sandboxes/{id}/pause").status_code == 204
    assert client.control.post(f"/v2/sandboxes/{id}/connect", json={"timeout": 900}).status_code in (200, 201)
    assert int(ran(client.rest, id, "cat /tmp/n")["stdout"]) >= before >= 29


def test_memory_is_declined_by_never_sleeping_or_by_naming_a_runtime(usual: Served) -> None:
    api = usual.api()
    for told in ({"auto_pause_timeout": 0}, {"runtime": "runc"}):
        id = made(api, **told)
        assert shown(api, id)["runtime"] in ("crun", "runc")
        api.post(f"/sandboxes/{id}/commands", json={"command": "sleep 1000", "background": True})
        [note] = api.post(f"/sandboxes/{id}/pause").json()["notes"]
        assert "memory was not kept" in note
        assert "sleep 1000" in note
        kinds = [one["kind"] for one in api.get(f"/sandboxes/{id}/events").json()["events"]]
        assert "memory_not_kept" in kinds
        report = api.post(f"/sandboxes/{id}/resume").json()["restore_report"]
        assert (report["level"], report["relaunched"]) == ("relaunched", ["sleep 1000"])
        assert report["why"]


def test_where_memory_can_not_be_kept_a_sandbox_says_so(tmp_path: Path) -> None:
    """A machine whose runsc has been found not to save memory."""
    home = tmp_path / "home"
    found = doctor.Probe("runsc", healthy=True, works={"start": True, "ls": True, "memory": False},
                         problems=[doctor.Problem("runsc memory", "no luck today", "wait")])  # fmt: skip
    pick.remember(found, home)
    with serving(home) as served:
        api = served.api()
        id = made(api)
        told = shown(api, id)
        assert told["runtime"] in ("crun", "runc")
        assert told["notes"] == ["memory is not kept in sleep: runsc: no luck today"]


def test_a_pause_says_what_it_could_not_keep(make: Make) -> None:
    with make() as sb:
        assert sb.pause().notes == []
        sb.resume()
        sb.commands.run("sleep 1000", background=True)
        [note] = sb.pause().notes
        assert note == (
            "memory was not kept: runc can't save memory; ended, and started again on resume if they ran in the background: sleep 1000"
        )
        again = Sandbox.connect(sb.id, home=sb._home.path)
        assert again.restore_report is not None
        assert "the checkpoint holds no memory image" in again.restore_report.why
        assert sb.pause(memory=False).notes == []


def test_a_verdict_on_memory_is_looked_at_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def probe(name: str, _: Path) -> doctor.Probe:
        asked.append(name)
        well = len(asked) > 1
        problems = [] if well else [doctor.Problem("bad day", "no luck", "wait")]
        return doctor.Probe(name, healthy=well, works={"memory": well}, problems=problems)

    monkeypatch.setattr(pick, "probe", probe)
    for _ in range(2):
        assert pick.keeps_memory(tmp_path, Limits()) == "runsc: no luck"
    assert asked == ["runsc"], "not at once"
    later = time.time() + 601
    monkeypatch.setattr(pick.time, "time", lambda: later)
    for _ in range(3):
        assert pick.keeps_memory(tmp_path, Limits()) == ""
    assert asked == ["runsc", "runsc"]
    assert "disk" in pick.keeps_memory(tmp_path, Limits(disk="1g"))


def test_a_machine_without_a_runtime_is_not_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as bare:
        bare.setattr("sandkeep.runtime.driver.shutil.which", lambda *_, **__: None)
        with TestClient(create_app(Settings(home=tmp_path / "bare"))) as client:
            answer = client.get("/health")
            assert answer.status_code == 503
            why = answer.json()["troubles"]["runtime"]
            assert why == "crun is not installed; runc is not installed; runsc is not installed"
    with TestClient(create_app(Settings(home=tmp_path / "one", runtime="runc"))) as client:
        until(lambda: client.get("/health").status_code == 200, "runc to be found well")
        monkeypatch.setattr("sandkeep.server.readiness.ready", lambda *_: pytest.fail("looked twice"))
        assert [client.get("/health").json()["status"] for _ in range(3)] == ["ok"] * 3


def test_a_runtime_that_does_not_work_is_named_and_looked_at_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verdict = [False]
    monkeypatch.setattr(pick, "probe", lambda name, _: doctor.Probe(name, healthy=verdict[0]))
    assert pick.ready("runc", tmp_path) == "runc does not work, `sandkeep doctor` says why"
    assert pick.ready("auto", tmp_path).count("does not work") == 3
    verdict[0] = True
    assert pick.ready("auto", tmp_path) == pick.ready("runsc", tmp_path) == ""


def test_all_who_ask_at_once_wait_for_one_look(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = []

    def probe(name: str, _: Path) -> doctor.Probe:
        looks.append(name)
        time.sleep(0.2)
        return doctor.Probe(name, healthy=True, works={"memory": True})

    monkeypatch.setattr(pick, "probe", probe)
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(lambda _: pick.keeps_memory(tmp_path, Limits()), range(8))) == {""}
    assert looks == ["runsc"]


def test_verdicts_kept_at_once_do_not_take_each_others_file(tmp_path: Path) -> None:
    together = threading.Barrier(8, timeout=20)

    def keep(_: int) -> None:
        for _ in range(50):
            together.wait()
            pick.remember(doctor.Probe("runsc", healthy=True), tmp_path)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(keep, range(8)))
    assert pick.ready("runsc", tmp_path) == ""
