"""The bucket is gone while sandboxes are to sleep, and comes back: tried again, visible, and nobody is harmed meanwhile."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from serving import made, ran, serving
from swift import KEYS, Swift, swift  # noqa: F401
from waiting import until


class Cable:
    """Leads to a server, until it is cut."""

    def __init__(self, target: tuple[str, int]) -> None:
        self._target = target
        self._whole = threading.Event()
        self._whole.set()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._take, daemon=True).start()

    def cut(self) -> None:
        self._whole.clear()

    def mend(self) -> None:
        self._whole.set()

    def close(self) -> None:
        self.cut()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _take(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._listener.accept()[0]
                if self._whole.is_set():
                    threading.Thread(target=self._carry, args=(near,), daemon=True).start()
                else:
                    near.close()

    def _carry(self, near: socket.socket) -> None:
        with contextlib.suppress(OSError), near, socket.create_connection(self._target) as far:
            while self._whole.is_set():
                for ready in select.select([near, far], [], [], 0.1)[0]:
                    data = ready.recv(1 << 16)
                    if not data:
                        return
                    (far if ready is near else near).sendall(data)


@pytest.fixture
def cable(swift: Swift) -> Iterator[Cable]:  # noqa: F811
    parts = urlsplit(swift.endpoint)
    assert parts.hostname is not None
    assert parts.port is not None
    cable = Cable((parts.hostname, parts.port))
    yield cable
    cable.close()


def test_a_bucket_gone_and_back_costs_nothing_but_time(
    swift: Swift,  # noqa: F811
    cable: Cable,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEYS["access_key"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", KEYS["secret_key"])
    store = ("--store", f"s3://{swift.bucket()}/kept", "--store-option", f"endpoint=http://127.0.0.1:{cable.port}")
    options = ("--runtime", "runc", *store, "--store-option", "region=us-east-1", "--sweep-interval", "0.3")
    with serving(tmp_path / "home", *options) as server:
        api = server.api()
        id = made(api, auto_pause_timeout=0)
        ran(api, id, "echo kept > f; export WORD=kept")
        assert api.post(f"/sandboxes/{id}/checkpoints", json={}).status_code == 201
        ran(api, id, "echo more >> f")
        cable.cut()
        api.patch(f"/sandboxes/{id}", json={"auto_pause_timeout": 0.5}).raise_for_status()

        def failed() -> bool:
            time.sleep(0.3)
            events = api.get(f"/sandboxes/{id}/events").json()["events"]
            return "pause_failed" in [one["kind"] for one in events]

        until(failed, "the failure is an event")
        assert api.get(f"/sandboxes/{id}").json()["last_error"]["code"] == "STORE_UNREACHABLE"
        assert ran(api, id, "cat f; echo $WORD")["stdout"] == "kept\nmore\nkept\n"
        cable.mend()
        until(lambda: api.get(f"/sandboxes/{id}").json()["state"] == "PAUSED", "it sleeps")
        assert api.get(f"/sandboxes/{id}").json()["last_error"] is None
        assert ran(api, id, "cat f; echo $WORD")["stdout"] == "kept\nmore\nkept\n"
