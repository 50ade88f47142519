"""A sandbox for the runtime's tests: a stand-in process 1 that runs the shell code it is sent over a socket."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

from sandkeep.runtime import cgroup
from sandkeep.runtime.base import Base, resolve
from sandkeep.runtime.driver import Driver
from sandkeep.runtime.link import door
from sandkeep.runtime.link._sync.io import Wire
from sandkeep.runtime.plan import Plan
from waiting import PATIENCE as PATIENCE
from waiting import until as until

STAND_IN = r"""
import json, os, socket, stat, subprocess, threading, time
door = os.dup(0)
os.dup2(os.open("/dev/null", os.O_RDWR), 0)
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
def clients():
    if stat.S_ISSOCK(os.fstat(door).st_mode):
        listener = socket.socket(fileno=door)
        listener.listen(8)
        while True:
            yield listener.accept()[0]
    for line in open(door, closefd=False):
        peer = socket.socket(socket.AF_UNIX)
        try:
            peer.connect("/.sandkeep/run/" + line.strip())
        except OSError:
            continue
        yield peer
for peer in clients():
    with peer, peer.makefile("rb") as lines:
        asked = json.loads(lines.readline())
        if "sh" in asked:
            done = subprocess.run(["/bin/sh", "-c", asked["sh"]], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                  stderr=subprocess.STDOUT, user=asked.get("user"), group=asked.get("user"),
                                  extra_groups=[] if asked.get("user") else None)
            told = {"code": done.returncode, "out": done.stdout.decode("utf-8", "surrogateescape")}
        else:
            told = dict(state)
        peer.sendall(json.dumps(told).encode() + b"\n")
    reap()
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
        """Returns when process 1 has closed the connection."""
        wire = until(self._connect, "the stand-in to come")
        told = b""
        try:
            wire.send(json.dumps(asked).encode() + b"\n")
            while data := wire.receive(PATIENCE):
                told += data
        finally:
            wire.close()
        if not told:
            raise Gone((self.dir / "log/console").read_text())
        found: dict[str, Any] = json.loads(told)
        return found

    def _connect(self) -> Wire | None:
        try:
            return Wire.connect(self.dir, PATIENCE)
        except door.ABSENT:
            if not self.driver.alive(self.id, self.dir):
                raise Gone((self.dir / "log/console").read_text()) from None
            return None

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
