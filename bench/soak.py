"""Minutes of mixed work through REST, with the server killed now and then: nothing lost, nothing left, no growth.

Every worker keeps a counter inside its sandbox and its own count of what was answered; after each kill, pause, fork or restore
the two are compared.
"""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import httpx

from bench.crowd import Load
from bench.measure import Report
from bench.server import Serving

WORKERS = 6
KILL_EVERY = 20.0


class Worker(threading.Thread):
    def __init__(self, server: Serving, until: float, seed: int) -> None:
        super().__init__(name=f"worker {seed}")
        self.acts = self.interrupted = 0
        self.failure: Exception | None = None
        self._server, self._until, self._random = server, until, random.Random(seed)

    def run(self) -> None:
        try:
            while time.monotonic() < self._until:
                self._life()
        except Exception as error:
            self.failure = error

    def _life(self) -> None:
        id, count = self._ask("POST", "/sandboxes", json={})["id"], 0
        for _ in range(self._random.randint(3, 8)):
            count = self._step(id, count)
        self._ask("DELETE", f"/sandboxes/{id}", gone=True)

    def _step(self, id: str, count: int) -> int:
        act = self._random.choice(("run", "run", "run", "pause", "checkpoint", "fork"))
        if act == "run":
            before = self.interrupted
            self._run(id, "echo x >> count")
            found = int(self._run(id, "wc -l < count"))
            least = count + 1
            assert least <= found <= least + self.interrupted - before, f"{found} lines, {least} answered"
            return found
        if act == "fork":
            child = self._ask("POST", f"/sandboxes/{id}/fork", json={})["sandboxes"][0]["id"]
            assert int(self._run(child, "cat count 2>/dev/null | wc -l")) == count
            self._ask("DELETE", f"/sandboxes/{child}", gone=True)
        else:
            self._ask("POST", f"/sandboxes/{id}/{'pause' if act == 'pause' else 'checkpoints'}", json={})
        assert int(self._run(id, "cat count 2>/dev/null | wc -l")) == count
        return count

    def _run(self, id: str, command: str) -> str:
        return str(self._ask("POST", f"/sandboxes/{id}/commands", json={"command": command})["stdout"])

    def _ask(self, verb: str, path: str, gone: bool = False, **more: Any) -> Any:
        """Asked again while the server is down; an answer that never came may have been carried out."""
        while True:
            try:
                with httpx.Client(base_url=self._server.url, trust_env=False, timeout=120) as client:
                    answer = client.request(verb, path, headers={"Authorization": f"Bearer {self._server.key}"}, **more)
            except httpx.TransportError:
                self.interrupted += 1
                time.sleep(0.3)
                continue
            self.acts += 1
            if gone and answer.status_code == 404:
                return None
            assert answer.status_code < 400, f"{verb} {path}: {answer.status_code} {answer.text[:300]}"
            return answer.json() if answer.content else None


def run(report: Report, quick: bool = False) -> None:
    seconds = 20.0 if quick else 180.0
    with (
        tempfile.TemporaryDirectory(prefix="sandkeep-bench-") as folder,
        Serving(Path(folder) / "home", "runc") as server,
    ):
        until = time.monotonic() + seconds
        workers = [Worker(server, until, seed) for seed in range(WORKERS)]
        for worker in workers:
            worker.start()
        kills, loads = 0, [Load.of(server.pid)]
        while time.monotonic() < until:
            time.sleep(min(KILL_EVERY, seconds / 4))
            loads.append(Load.of(server.pid))
            if time.monotonic() < until:
                server.crash()
                kills += 1
        for worker in workers:
            worker.join()
        failures = [f"{worker.name}: {worker.failure}" for worker in workers if worker.failure is not None]
        left = sorted(os.listdir(Path(folder) / "home" / "sandboxes"))
        report.note(
            f"soak of {seconds:.0f} s, {WORKERS} clients, {sum(worker.acts for worker in workers)} calls, server killed {kills} times: "
            f"lost: {failures or 'nothing'}; server at most {max(load.megabytes for load in loads):.0f} MB; "
            f"sandboxes whose making was never answered: {len(left)}"
        )
