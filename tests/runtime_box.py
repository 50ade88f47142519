"""A sandbox for the runtime's tests: a stand-in process 1 that runs the shell code it is sent over a socket."""

from __future__ import annotations

import json
import os
import socket
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandkeep.runtime import cgroup
from sandkeep.runtime.base import Base, resolve
from sandkeep.runtime.driver import Driver
from sandkeep.runtime.plan import Plan
from waiting import PATIENCE as PATIENCE
from waiting import until as until

STAND_IN = r"""
import json, os, socket, subprocess, sys, threading, time
run = "/.sandkeep/run"
if os.path.exists(run + "/box.sock"):
    os.unlink(run + "/box.sock")
state = {"ticks": 0}
def tick():
    while True:
        state["ticks"] += 1
        time.sleep(0.01)
threading.Thread(target=tick, daemon=True).start()
def reap():
    try:
        while os.waitpid(-1, os.WNOHANG)[0]: pass
    except ChildProcessError: pass
while True:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(run + "/box.sock")
    listener.listen(8)
    asleep = False
    while not asleep:
        peer, _ = listener.accept()
        with peer, peer.makefile("rb") as lines:
            asked = json.loads(lines.readline())
            if "sh" in asked:
                done = subprocess.run(["/bin/sh", "-c", asked["sh"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, user=asked.get("user"), group=asked.get("user"),
                                      extra_groups=[] if asked.get("user") else None)
                told = {"code": done.returncode, "out": done.stdout.decode("utf-8", "surrogateescape")}
            elif "sleep" in asked:
                asleep = True
                told = {}
            else:
                told = dict(state)
            peer.sendall(json.dumps(told).encode() + b"\n")
        reap()
    listener.close()
    os.unlink(run + "/box.sock")
    while not os.path.exists(run + "/wake"):
        time.sleep(0.01)
    os.unlink(run + "/wake")
"""


class Gone(Exception):
    """Process 1 went away."""


class Box:
    """Started by `with`; stopped and looked after at its end."""

    def __init__(
        self, driver: Driver, home: Path, base: Base | None = None, id: str | None = None, **plan: Any
    ) -> None:
        self.driver = driver
        self.id = id or f"test-{uuid.uuid4().hex[:12]}"
        self.dir = home / self.id
        code = home / "code"
        code.mkdir(parents=True, exist_ok=True)
        (code / "stand_in.py").write_text(STAND_IN)
        plan.setdefault("argv", ["/usr/bin/python3", "-I", "-S", "/.sandkeep/guest/stand_in.py"])
        self.plan = Plan(
            id=self.id,
            dir=self.dir,
            base=base or resolve("host", home),
            layers=plan.pop("layers", []),
            upper=plan.pop("upper", self.dir / "upper"),
            work=plan.pop("work", self.dir / "work"),
            hostname=plan.pop("hostname", "box"),
            env={"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", **plan.pop("env", {})},
            code=code,
            **plan,
        )

    @property
    def group(self) -> str:
        return cgroup.name_of(self.id, self.dir)

    def __enter__(self) -> Box:
        self.driver.start(self.plan)
        return self

    def __exit__(self, *_: object) -> None:
        self.driver.stop(self.id, self.dir)

    def ask(self, **asked: Any) -> dict[str, Any]:
        folder = os.open(self.dir / "run", os.O_PATH)
        try:
            peer = until(lambda: self._connect(folder), "the stand-in's socket")
        finally:
            os.close(folder)
        with peer, peer.makefile("rb") as lines:
            peer.sendall(json.dumps(asked).encode() + b"\n")
            line = lines.readline()
        if not line:
            raise Gone((self.dir / "log/console").read_text())
        told: dict[str, Any] = json.loads(line)
        return told

    def _connect(self, folder: int) -> socket.socket | None:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(PATIENCE)
        try:
            peer.connect(f"/proc/self/fd/{folder}/box.sock")
        except (FileNotFoundError, ConnectionRefusedError):
            peer.close()
            if not self.driver.alive(self.id, self.dir):
                raise Gone((self.dir / "log/console").read_text()) from None
            return None
        return peer

    def sh(self, code: str, user: int | None = None) -> str:
        """The output of shell code that must succeed."""
        told = self.ask(sh=code, user=user)
        assert told["code"] == 0, (code, told)
        return str(told["out"]).rstrip("\n")

    def fails(self, code: str) -> str:
        told = self.ask(sh=code)
        assert told["code"] != 0, (code, told)
        return str(told["out"])

    def turn(self, number: int) -> Plan:
        """A plan whose frozen layer is the present top, and whose top is new."""
        self.plan = replace(
            self.plan,
            layers=[self.plan.upper, *self.plan.layers],
            upper=self.dir / f"upper{number}",
            work=self.dir / f"work{number}",
        )
        return self.plan
