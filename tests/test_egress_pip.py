"""Egress rules with real pip and real TLS, against an index of packages on this machine's loopback."""

from __future__ import annotations

import functools
import json
import shutil
import ssl
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

import ordinary_user
import pip_story

HOST = "127.0.0.2"
WHEEL = f"{pip_story.PACKAGE}-{pip_story.VERSION}-py3-none-any.whl"


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An index with one package, behind a certificate that only who is told of it trusts."""
    folder = tmp_path_factory.mktemp("index")
    key, cert = folder / "key", folder / "cert"
    make = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
        "-days",
        "2",
    ]
    names = ["-subj", "/CN=index", "-addext", f"subjectAltName=IP:{HOST}"]
    subprocess.run([*make, *names, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    page = folder / "site" / "simple" / pip_story.PACKAGE
    page.mkdir(parents=True)
    (page / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    about = f"{pip_story.PACKAGE}-{pip_story.VERSION}.dist-info"
    with zipfile.ZipFile(page / WHEEL, "w") as wheel:
        wheel.writestr(f"{pip_story.PACKAGE}/__init__.py", "")
        wheel.writestr(
            f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {pip_story.PACKAGE}\nVersion: {pip_story.VERSION}\n"
        )
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(cert, key)
    with ThreadingHTTPServer((HOST, 0), functools.partial(Quiet, directory=str(folder / "site"))) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            index = f"https://{HOST}:{server.server_port}/simple/"
            yield {"index": index, "cert": str(cert), "hosts": [f"{HOST}/32"], "private": [f"{HOST}/32"]}
        finally:
            server.shutdown()
            thread.join()


def with_pip(asked: dict[str, Any], folder: Path, **more: Any) -> dict[str, Any]:
    """The same with pip, and what else is read, in a folder that whoever runs it can see."""
    import pip

    source = Path(pip.__file__).parent
    with zipfile.ZipFile(folder / "pip.zip", "w", zipfile.ZIP_DEFLATED) as packed:
        for file in source.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                packed.write(file, file.relative_to(source.parent))
    cert = Path(shutil.copy(asked["cert"], folder / "certificate"))
    for file in (folder / "pip.zip", cert):
        file.chmod(0o644)
    return {**asked, **more, "pip": str(folder / "pip.zip"), "cert": str(cert)}


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
