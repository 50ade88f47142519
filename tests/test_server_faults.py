"""The server dies or is stopped at bad moments; its sandboxes do not, and the next server has them all."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from sandkeep.sandbox import Sandbox
from serving import Served, made, ran, serving
from waiting import until


@pytest.fixture(params=["runc", "runsc"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "home", "--runtime", request.param, "--sweep-interval", "0.3") as found:
        yield found


def state(api: httpx.Client, id: str) -> str:
    return str(api.get(f"/sandboxes/{id}").json()["state"])


def test_killed_during_a_command_the_sandbox_and_its_work_go_on(server: Served) -> None:
    key = server.key()
    api = server.api(key)
    id = made(api, secrets={"TOKEN": "x"})
    ran(api, id, "echo kept > f; export WORD=kept")
    command = "touch begun; while test ! -e go; do sleep 0.05; done; echo done > result"
    calling = threading.Thread(target=_cut_off, args=(api, id, command))
    calling.start()
    until(lambda: Sandbox.attach(id, home=server.home).files.exists("begun"), "the command runs")
    server.kill()
    calling.join()
    api = server.start().api(key)
    assert state(api, id) == "RUNNING"
    assert ran(api, id, "cat f; echo $WORD; printenv TOKEN; touch go")["stdout"] == "kept\nkept\nx\n"
    until(lambda: ran(api, id, "cat result 2>&1")["stdout"] == "done\n", "the command of the dead server's caller ends")


def test_told_to_stop_it_ends_no_command_of_a_sandbox_that_goes_on(server: Served) -> None:
    key = server.key()
    api = server.api(key)
    id = made(api, auto_pause_timeout=0)
    command = {"command": "touch begun; while test ! -e go; do sleep 0.05; done; echo done > result"}
    calling = threading.Thread(target=api.post, args=(f"/sandboxes/{id}/commands",), kwargs={"json": command})
    calling.start()
    until(lambda: Sandbox.attach(id, home=server.home).files.exists("begun"), "the command runs")
    assert server.stop() == 0
    calling.join()
    api = server.start().api(key)
    ran(api, id, "touch go")
    until(lambda: ran(api, id, "cat result 2>&1")["stdout"] == "done\n", "the command of the last server's caller ends")


def _cut_off(api: httpx.Client, id: str, command: str) -> None:
    with pytest.raises(httpx.TransportError):
        ran(api, id, command)


def test_killed_while_it_pauses_the_sandbox_is_whole_either_way(server: Served) -> None:
    key = server.key()
    api = server.api(key)
    id = made(api)
    ran(api, id, "head -c 5000000 /dev/urandom > f; sha256sum f > sum; export WORD=kept")
    for delay in (0.0, 0.15, 0.4):
        pausing = threading.Thread(target=_pause, args=(api, id))
        pausing.start()
        _until_not(api, id, "RUNNING")
        threading.Event().wait(delay)
        server.kill()
        pausing.join()
        api = server.start().api(key)
        assert ran(api, id, "sha256sum -c sum && echo $WORD")["stdout"] == "f: OK\nkept\n"
        assert state(api, id) == "RUNNING"


def _until_not(api: httpx.Client, id: str, unwanted: str) -> None:
    until(lambda: state(api, id) != unwanted, f"it is no longer {unwanted}")


def _pause(api: httpx.Client, id: str) -> None:
    try:
        api.post(f"/sandboxes/{id}/pause")
    except httpx.TransportError:
        pass


def test_told_to_stop_it_puts_all_to_sleep_and_the_next_wakes_them(server: Served) -> None:
    key = server.key()
    api = server.api(key)
    ids = [made(api) for _ in range(3)]
    for number, id in enumerate(ids):
        ran(api, id, f"echo {number} > f; export N={number}")
    never = made(api, auto_pause_timeout=0)
    pid = api.post(f"/sandboxes/{never}/commands", json={"command": "sleep 100000", "background": True}).json()["pid"]
    assert server.stop() == 0
    states = {info.id: str(info.state) for info in Sandbox.list(home=server.home)}
    assert states == {**dict.fromkeys(ids, "paused"), never: "running"}
    api = server.start().api(key)
    assert [state(api, id) for id in ids] == ["PAUSED"] * 3
    for number, id in enumerate(ids):
        assert ran(api, id, "cat f; echo $N")["stdout"] == f"{number}\n{number}\n"
    assert api.get(f"/sandboxes/{never}/commands/{pid}").json()["running"]


def test_memory_and_processes_survive_idleness_on_runsc(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--runtime", "runsc", "--sweep-interval", "0.3") as server:
        api = server.api()
        id = made(api, auto_pause_timeout=1)
        count = "i=0; while true; do i=$((i+1)); echo $i > n; sleep 0.05; done"
        pid = api.post(f"/sandboxes/{id}/commands", json={"command": count, "background": True}).json()["pid"]
        until(lambda: ran(api, id, "test -s n")["exit_code"] == 0, "it counts")
        before = 0
        for _ in range(3):
            until(lambda: state(api, id) == "PAUSED", "it sleeps")
            number = int(until(lambda: ran(api, id, "cat n")["stdout"].strip(), "a number"))
            assert number >= before
            before = number
            shown = api.get(f"/sandboxes/{id}").json()
            assert shown["restore_report"]["level"] == "memory", shown["restore_report"]
        assert api.get(f"/sandboxes/{id}/commands/{pid}").json()["running"]


def test_one_whose_first_process_died_is_brought_back_on_its_files(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--runtime", "runc") as server:
        key = server.key()
        api = server.api(key)
        id = made(api)
        ran(api, id, "echo kept > f")
        server.kill()
        found = Sandbox.attach(id, home=server.home)._held
        found.driver(found.record()).stop(id, found.folder)  # as a reboot of the host does
        api = server.start().api(key)
        assert state(api, id) == "RUNNING"
        assert ran(api, id, "cat f")["stdout"] == "kept\n"
        events = api.get(f"/sandboxes/{id}/events").json()["events"]
        assert [one["kind"] for one in events] == ["revived"]


def test_two_starts_never_print_a_second_key(tmp_path: Path) -> None:
    from sandkeep.sessions import Database, Keys

    with serving(tmp_path / "home") as server:
        server.stop()
        server.start()
        database = Database(server.database)
        try:
            assert [key.user for key in Keys(database).all()] == ["default"]
        finally:
            database.close()
