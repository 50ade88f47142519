"""Real pip in a sandbox, through the filtering proxy, to an index of packages. As any user."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx

from serving import made, ran, serving

PACKAGE, VERSION = "carried", "1.0"
_PIP = "PIP_CONFIG_FILE=/dev/null PIP_CERT=/tmp/certificate PYTHONPATH=/tmp/pip.zip python3 -m pip --disable-pip-version-check --no-cache-dir"
_ASK = "--no-deps --only-binary :all: --retries 1 --timeout 60 -d got"


def story(home: Path, asked: dict[str, Any]) -> dict[str, Any]:
    """`asked`: runtime, private networks, index, its certificate, hosts, pip as a zip file. Each outcome by its rules."""
    private = [word for one in asked["private"] for word in ("--egress-private", one)]
    with serving(home / "served", "--runtime", asked["runtime"], *private) as server:
        api = server.api()
        id = made(api, egress={"allow": asked["hosts"]}, secrets={"PIP_INDEX_URL": asked["index"]})
        put(api, id, "/tmp/pip.zip", Path(asked["pip"]))
        put(api, id, "/tmp/certificate", Path(asked["cert"]))
        command = f"rm -rf got; {_PIP} download {_ASK} {PACKAGE}=={VERSION} 2>&1; python3 -m zipfile -l got/*"
        told = {"allowed": ran(api, id, command)}
        for name, rules in (
            ("refused", {"allow": ["other.example"]}),
            ("denied", {"deny": asked["hosts"]}),
            ("open", {}),
        ):
            assert api.put(f"/sandboxes/{id}/egress", json=rules).status_code == 200
            told[name] = ran(api, id, command)
        assert api.delete(f"/sandboxes/{id}").status_code == 204
    return told


def put(api: httpx.Client, id: str, path: str, source: Path) -> None:
    answer = api.put(f"/sandboxes/{id}/files", params={"path": path}, content=source.read_bytes())
    assert answer.status_code < 300, answer.text


def main() -> None:
    print(json.dumps(story(Path(os.environ["HOME"]), json.loads(sys.argv[1]))))
