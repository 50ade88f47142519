"""Asleep and awake, twenty times, while the server is killed again and again: nothing that a caller was told is lost."""

from __future__ import annotations

import random
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from serving import Served, made, ran, serving
from waiting import until

CYCLES = 20
EVERY = 3  # cycles a kill
LONGEST = 1.3  # seconds from the beginning of a cycle to the kill
COUNT = "i=0; while true; do i=$((i+1)); echo $i > .n; mv .n n; sleep 0.05; done"


class Story:
    """One sandbox seen by its owner: what it was told, and what must therefore be there."""

    def __init__(self, server: Served) -> None:
        self._server = server
        self._key = server.key()
        self._api = server.api(self._key)
        self._sent: list[str] = []
        self._done: set[str] = set()
        self._counted = 0
        self.id = made(self._api, auto_pause_timeout=0.3, metadata={"n": 1})
        ran(self._api, self.id, "export WORD=kept; cd /tmp; head -c 1000000 /dev/urandom > f; sha256sum f > sum")
        started = self._api.post(f"/sandboxes/{self.id}/commands", json={"command": COUNT, "background": True})
        self._pid = started.json()["pid"]
        until(lambda: ran(self._api, self.id, "test -s n")["exit_code"] == 0, "it counts")

    def cycle(self) -> None:
        """Idle until it sleeps and holds no memory, then touched by a command."""
        until(lambda: self._shown()["state"] == "PAUSED", "it sleeps")
        until(lambda: not processes_of(self.id), "its processes are gone")
        self.touch()
        assert self._api.post(f"/sandboxes/{self.id}/activity").json()["state"] == "RUNNING"
        assert self._shown()["restore_report"]["level"] == "memory"

    def touch(self) -> None:
        word = f"turn-{len(self._sent)}"
        self._sent.append(word)
        said = ran(self._api, self.id, f"echo {word} >> log; echo $WORD $PWD $(cat n); sha256sum -c sum; cat log")
        self._done.add(word)
        first, second, *lines = said["stdout"].splitlines()
        kept, folder, counted = first.split()
        assert (kept, folder, second) == ("kept", "/tmp", "f: OK")
        assert set(lines) >= self._done
        assert lines == [one for one in self._sent if one in lines]
        assert int(counted) >= self._counted
        self._counted = int(counted)

    def again(self) -> None:
        """The server is dead: start the next."""
        self._server.kill()
        self._api = self._server.start().api(self._key)

    def end(self) -> None:
        assert self._api.get(f"/sandboxes/{self.id}/commands/{self._pid}").json()["running"]
        shown = self._shown()
        assert (shown["auto_pause_timeout"], shown["metadata"]) == (0.3, {"n": 1})
        assert self._api.delete(f"/sandboxes/{self.id}").status_code == 204
        until(lambda: not processes_of(self.id), "nothing of it is left")

    def _shown(self) -> dict[str, Any]:
        answer = self._api.get(f"/sandboxes/{self.id}")
        assert answer.status_code == 200, answer.text
        return dict(answer.json())


def processes_of(id: str) -> list[str]:
    """The processes on this machine that have a sandbox's id on their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            line = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if id.encode() in line:
            found.append(line.decode(errors="replace"))
    return found


@pytest.mark.timeout(900)
def test_twenty_cycles_with_the_server_killed_at_random_moments(tmp_path: Path) -> None:
    dice = random.Random(20)
    with serving(tmp_path / "home", "--runtime", "runsc", "--sweep-interval", "0.1") as server:
        story = Story(server)
        until(lambda: story.touch() or processes_of(story.id), "its processes are seen while it runs")
        cycles, kills = 0, 0
        while cycles < CYCLES:
            if kills * EVERY > cycles:
                story.cycle()
                cycles += 1
                continue
            assert server.process is not None
            killer = threading.Timer(LONGEST * dice.random(), server.process.send_signal, [signal.SIGKILL])
            killer.start()
            try:
                story.cycle()
                cycles += 1
            except httpx.TransportError:
                assert server.process.wait(60) == -signal.SIGKILL
            killer.join()
            kills += 1
            story.again()
            story.touch()
        story.end()
