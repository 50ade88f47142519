"""Egress rules with real pip and real TLS, against the registry of this machine's own pip configuration."""

from __future__ import annotations

import json
import re
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.request
import zipfile
from pathlib import Path
from typing import Any
from urllib.parse import urljoin, urlsplit

import pytest

import ordinary_user
import pip_story

WAIT = 60.0
CONFIGURED = """
import json
from pip._internal.commands import create_command
found = create_command("download").parser.get_default_values()
print(json.dumps([None if found.no_index else found.index_url, found.cert]))
"""


@pytest.fixture(scope="module")
def asked() -> dict[str, Any]:
    """What pip is set up for. Fails where nothing can be fetched from there."""
    done = subprocess.run([sys.executable, "-c", CONFIGURED], capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 0, f"no pip in this Python: python -m ensurepip\n{done.stderr}"
    index, cert = json.loads(done.stdout)
    assert index, "pip has no index: pip config set global.index-url https://…"
    assert urlsplit(index).scheme == "https", "pip's index is not https: pip config set global.index-url https://…"
    page = f"{index.rstrip('/')}/{pip_story.PACKAGE}/"
    parts = urlsplit(page)
    bare = parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=cert))
    )
    try:
        with opener.open(bare, timeout=WAIT) as answer:
            links = re.findall(r'href="([^"]+)"', answer.read().decode())
        hosts = sorted({urlsplit(urljoin(bare, link)).hostname or "" for link in [bare, *links]})
        found = {entry[4][0] for host in hosts for entry in socket.getaddrinfo(host, 443, type=socket.SOCK_STREAM)}
    except OSError as error:
        pytest.fail(
            f"pip's index can't be reached directly from here: {error}; pip config set global.index-url https://…"
        )
    private = sorted(map(str, found))  # a mirror may well be in a network of the machine's own
    return {"index": index, "cert": cert, "hosts": hosts, "private": private}


def with_pip(asked: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
    """The same with pip, and what else is read, in a folder that whoever runs it can see."""
    import pip

    source = Path(pip.__file__).parent
    with zipfile.ZipFile(folder / "pip.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for file in source.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                packed.write(file, file.relative_to(source.parent))
    files = [folder / "pip.zip"]
    if asked["cert"]:
        files.append(Path(shutil.copy(asked["cert"], folder / "certificates")))
    for file in files:
        file.chmod(0o644)
    return {**asked, **more, "pip": str(files[0]), "cert": str(files[1]) if asked["cert"] else None}


def check(told: dict[str, Any]) -> None:
    for name in ("allowed", "open"):
        assert told[name]["exit_code"] == 0, told[name]["stdout"]
        assert f"{pip_story.PACKAGE}/__init__.py" in told[name]["stdout"]
    for name in ("refused", "denied"):
        assert told[name]["exit_code"] != 0
        assert "403 EGRESS_DENIED" in told[name]["stdout"], told[name]["stdout"]


@pytest.mark.timeout(400)
@pytest.mark.parametrize("runtime", ["crun", "runsc"])
def test_pip_gets_out_as_the_rules_say(asked: dict[str, Any], tmp_path: Path, runtime: str) -> None:
    check(pip_story.story(tmp_path, with_pip(asked, tmp_path, runtime=runtime)))


@pytest.mark.rootless
@pytest.mark.timeout(400)
def test_pip_gets_out_of_an_ordinary_users_server(asked: dict[str, Any]) -> None:
    with ordinary_user.home() as home:
        words = json.dumps(with_pip(asked, home, runtime="crun"))
        said = ordinary_user.run("import pip_story; pip_story.main()", words, home=home, timeout=380)
    check(json.loads(said.splitlines()[-1]))
