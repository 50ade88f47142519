"""Scripts in processes of their own, if need be with mounts of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = str(Path(__file__).resolve().parent.parent / "src")
ENV = {**os.environ, "PYTHONPATH": SOURCE}
OWN_MOUNTS = ("unshare", "--mount") if os.geteuid() == 0 else ("unshare", "--user", "--map-root-user", "--mount")


def run(script: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*prefix, sys.executable, "-c", script, *arguments],
        env=ENV,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def begin(script: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, env=ENV)
