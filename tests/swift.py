"""A real S3 server for the tests: each test process starts its own Swift when the first test asks for it."""

from __future__ import annotations

import os
import secrets
import subprocess
import urllib.request
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

ROOT = Path(__file__).resolve().parent.parent
SCRIPT = ROOT / "tools" / "swift.sh"
KEYS = {"access_key": "test:tester", "secret_key": "testing"}


class Swift:
    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint

    def options(self, **more: Any) -> dict[str, Any]:
        return {"endpoint": self.endpoint, "timeout": 60.0, **KEYS, **more}

    def bucket(self) -> str:
        """A new bucket's name."""
        name = f"b{secrets.token_hex(6)}"
        store = S3Store(
            name,
            endpoint=self.endpoint,
            access_key_id="test:tester",
            secret_access_key="testing",
            region="us-east-1",
            client_options={"allow_http": True},
        )
        url = obstore.sign(store, "PUT", "", timedelta(minutes=5))
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(
            urllib.request.Request(url, method="PUT"), timeout=60
        ) as answer:
            assert answer.status == 200
        return name


@pytest.fixture(scope="session")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swift]:
    env = Path(os.environ.get("SANDKEEP_SWIFT") or ROOT / ".build" / "swift")
    if not (env / "bin" / "swift-proxy-server").exists():
        pytest.fail(f"the S3 tests need OpenStack Swift: run tools/swift.sh install {env}")
    folder = tmp_path_factory.mktemp("swift")
    with open(folder / "log", "wb") as log:
        server = subprocess.Popen(
            [SCRIPT, "run", env, folder / "data"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log
        )
    assert server.stdin is not None
    assert server.stdout is not None
    try:
        endpoint = server.stdout.readline().decode().strip()
        assert endpoint.startswith("http://"), (folder / "log").read_text()
        yield Swift(endpoint)
    finally:
        server.stdin.close()
        server.stdout.close()
        try:
            server.wait(60)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
