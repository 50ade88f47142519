"""A server to measure."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

from sandkeep import Sandbox


class Serving:
    """A real server in a process of its own."""

    def __init__(self, home: Path, runtime: str) -> None:
        self.home, self._runtime = home, runtime

    def __enter__(self) -> Serving:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sandkeep", "serve", "--home", str(self.home), "--port", "0", "--runtime", self._runtime, "--rate", "0"],
            stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if found := re.search(r"once: (\S+)", line):
                self.key = found[1]
            if found := re.search(r"serves on http://(\S+)", line):
                self.address = found[1]
                return self
        raise RuntimeError("the server did not start")

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def crash(self) -> None:
        """Killed, and started again on another port."""
        self._process.kill()
        self._process.wait()
        self.__enter__()

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(120)
        for info in Sandbox.list(home=self.home):
            Sandbox.attach(info.id, home=self.home).kill()
