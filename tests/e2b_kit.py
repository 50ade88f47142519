"""For the tests of E2B: programs in `e2b_programs/`, run by an SDK's interpreter against a real server; and its wire, by hand."""

from __future__ import annotations

import json
import os
import struct
import subprocess
from pathlib import Path
from typing import Any

import httpx

from serving import Served

ROOT = Path(__file__).parents[1]
SDKS = ROOT / ".build" / "e2b"
PROGRAMS = Path(__file__).parent / "e2b_programs"
PATIENCE = 170.0


def environment(served: Served, key: str, **more: str) -> dict[str, str]:
    """What an E2B program is told, and nothing of what this machine may say about another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    address = {"E2B_API_URL": served.url, "E2B_SANDBOX_URL": served.url, "E2B_API_KEY": key}
    return {**kept, **address, "E2B_VALIDATE_API_KEY": "false", "NO_PROXY": "*", "no_proxy": "*", **more}


def run(served: Served, sdk: str, program: str, *words: str, key: str | None = None, **more: str) -> str:
    """What the program printed; it must end well."""
    folder = SDKS / sdk
    assert (folder / "ready").exists(), "E2B's SDKs are missing: run tools/e2b.sh"
    argv = ["node"] if program.endswith(".mjs") else [str(folder / "bin" / "python")]
    done = subprocess.run(
        [*argv, str(PROGRAMS / program), *words], cwd=folder, env=environment(served, key or served.key(), **more),
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (
        f"{program} with {sdk} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}\nserver:\n{served.log()[-3000:]}"
    )
    return done.stdout


SDK = {"User-Agent": "e2b-python-sdk/0"}


class Client:
    """One user's view: `control` as an SDK's, `rest` as ours; `box` speaks to a sandbox."""

    def __init__(self, served: Served, key: str | None = None) -> None:
        self.served = served
        self.key = key or served.key()
        self.rest = served.api(self.key)
        self.control = served.api(self.key, follow_redirects=False)
        self.control.headers = httpx.Headers({"X-API-KEY": self.key, **SDK})

    def create(self, **fields: Any) -> dict[str, Any]:
        answer = self.control.post("/v2/sandboxes", json={"templateID": "base", **fields})
        assert answer.status_code == 201, answer.text
        return dict(answer.json())

    def info(self, made: dict[str, Any]) -> dict[str, Any]:
        return dict(self.control.get(f"/sandboxes/{made['sandboxID']}").json())

    def box(self, made: dict[str, Any], port: int = 49983, **headers: str) -> httpx.Client:
        client = self.served.api(self.key)
        routing = {"E2b-Sandbox-Id": made["sandboxID"], "E2b-Sandbox-Port": str(port)}
        client.headers = httpx.Headers({**routing, "X-Access-Token": made["envdAccessToken"], **headers})
        return client


def frame(message: dict[str, Any], flag: int = 0) -> bytes:
    body = json.dumps(message).encode()
    return struct.pack(">BI", flag, len(body)) + body


def frames(data: bytes) -> list[tuple[int, dict[str, Any]]]:
    found = []
    while data:
        flag, length = struct.unpack(">BI", data[:5])
        found.append((flag, json.loads(data[5 : 5 + length])))
        data = data[5 + length :]
    return found


def stream(box: httpx.Client, path: str, *messages: dict[str, Any], **headers: str) -> list[tuple[int, dict[str, Any]]]:
    body = b"".join(map(frame, messages))
    answer = box.post(path, content=body, headers={"Content-Type": "application/connect+json", **headers})
    assert answer.status_code == 200, answer.text
    return frames(answer.content)


def start(command: str, **more: Any) -> dict[str, Any]:
    return {"process": {"cmd": "/bin/bash", "args": ["-c", command]}, **more}


def gone(answer: httpx.Response, id: str) -> None:
    assert answer.status_code == 502, answer.text
    assert answer.json() == {"sandboxId": id, "message": "The sandbox was not found", "code": 502}
