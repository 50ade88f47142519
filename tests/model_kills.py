"""kill -9 of the host's process at any instant of an operation, again and again; after each the state is looked at item by item.

An operation runs in a process of its own, forked from one that has everything imported. What it acknowledged before it died
must be there; what it did not is there whole or not at all; and in the end nothing is left.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sandkeep import Sandbox, Store
from sandkeep.errors import CheckpointNotFound, SandboxNotFound, SandkeepError
from sandkeep.model import State
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc

VERBS = ["create", "snapshot", "checkpoint", "restore", "restore_checkpoint", "fork", "pause", "resume", "kill", "gc", "export", "store_gc", "create_from"]  # fmt: skip
FILL = "cd ~/workspace && rm -rf d && mkdir d && echo {n} > f && echo {n} > d/n{n} && ln f d/link && head -c 200000 /dev/urandom > noise"
SHOW = "cd ~/workspace && cat f d/* && ls d | wc -l"


def shown(number: int) -> str:
    return f"{number}\n" * 3 + "2\n"


class Killer:
    """One sandbox at a time, one store; `lost` and `left` say what went wrong."""

    def __init__(self, folder: Path, runtime: str, seed: int) -> None:
        self.folder, self.runtime, self.rng = folder, runtime, random.Random(seed)
        self.home, self.place = folder / "home", folder / "store"
        self.kills = self.cycles = self.number = 0
        self.lost: list[str] = []
        self.left: list[str] = []
        self.took: dict[str, float] = {}
        self.snapshots: dict[str, int] = {}
        self.checkpoints: dict[str, int] = {}
        self.id, self.paused = "", False
        self.nursery = Nursery(self.place, runtime)

    def __enter__(self) -> Killer:
        return self

    def __exit__(self, *_: object) -> None:
        self.nursery.close()
        for id in Home(self.home).ids():
            try:
                Sandbox.attach(id, home=self.home).kill()
            except SandkeepError:
                pass

    def run(self, until: float, kills: int = 1 << 30) -> None:
        self.begin()
        while time.monotonic() < until and self.kills < kills and not self.lost:
            verb = "resume" if self.paused else self.rng.choice(VERBS)
            try:
                self.once(verb)
            except (SandkeepError, AssertionError) as error:
                self.lost.append(f"{verb}: {type(error).__name__} {error}")
        if not self.lost:
            self.end()

    def begin(self) -> None:
        sandbox = Sandbox(home=self.home, runtime=self.runtime, store=self.place)
        self.id, self.snapshots, self.paused = sandbox.id, {}, False
        if self.rng.random() < 0.5:
            sandbox.commands.run("while :; do date > /tmp/now; sleep 0.01; done", background=True)
        self.write(sandbox)

    def write(self, sandbox: Sandbox) -> None:
        self.number += 1
        ran = sandbox.commands.run(FILL.format(n=self.number), timeout=120)
        assert ran.exit_code == 0, ran.stderr

    def once(self, verb: str) -> None:
        """One operation, killed somewhere or not, and a look at everything that it could have harmed."""
        argument = self.argument(verb)
        if argument is None:
            return
        if not self.paused and self.rng.random() < 0.6:
            self.write(Sandbox.attach(self.id, home=self.home))
        usual = self.took.get(verb, 0.3)
        told = self.nursery.run(self.home, verb, [self.id, argument], self.rng.random() * 1.3 * usual)
        if told["failed"] and not (verb == "store_gc" and "Busy" in told["failed"]):
            raise AssertionError(told["failed"])
        if told["killed"]:
            self.kills += 1
        else:
            self.took[verb] = 0.7 * usual + 0.3 * told["took"]
            self.cycles += verb == "resume"
        self.acknowledged(verb, told["answer"])
        self.look(verb, argument, told)

    def argument(self, verb: str) -> str | None:
        if verb == "restore":
            return self.rng.choice(list(self.snapshots)) if self.snapshots else None
        if verb in ("restore_checkpoint", "create_from"):
            return self.rng.choice(list(self.checkpoints)) if self.checkpoints else None
        return None if verb == "resume" and not self.paused else str(self.folder / "blob")

    def acknowledged(self, verb: str, answer: str) -> None:
        if answer and verb == "snapshot":
            self.snapshots[answer] = self.number
        elif answer and verb in ("checkpoint", "pause"):
            self.checkpoints[answer] = self.number

    def look(self, verb: str, argument: str, told: dict[str, Any]) -> None:
        gc(Home(self.home))
        others = [info.id for info in Sandbox.list(home=self.home) if info.id != self.id]
        wanted = {self.number}
        if verb in ("restore", "restore_checkpoint"):
            wanted.add({**self.snapshots, **self.checkpoints}[argument])
        for other in others:
            assert verb in ("create", "fork", "create_from"), f"{other} came from nowhere"
            twin = Sandbox.connect(other, home=self.home)
            if verb != "create":
                self.same(twin, {self.number if verb == "fork" else self.checkpoints[argument]})
            twin.kill()
        assert not told["answer"] or verb not in ("create", "fork", "create_from") or others, (
            "an acknowledged sandbox is gone"
        )
        if verb == "kill":
            self.killed(told)
            return
        sandbox = self.awake(verb, told)
        if sandbox is None:
            return
        self.number = self.same(sandbox, wanted)
        self.snapshots_there(sandbox, verb)
        if self.rng.random() < 0.1:
            self.checkpoints_there()

    def awake(self, verb: str, told: dict[str, Any]) -> Sandbox | None:
        state = next(info.state for info in Sandbox.list(home=self.home) if info.id == self.id)
        if told["answer"] and verb == "pause":
            assert state is State.PAUSED, f"an acknowledged pause left it {state}"
        self.paused = state is State.PAUSED
        if self.paused and self.rng.random() < 0.5:
            return None
        self.cycles += self.paused
        self.paused = False
        return Sandbox.connect(self.id, home=self.home)

    def killed(self, told: dict[str, Any]) -> None:
        try:
            sandbox = Sandbox.connect(self.id, home=self.home)
            assert not told["answer"], "an acknowledged kill left it"
            self.same(sandbox, {self.number})
        except SandboxNotFound:
            self.begin()

    def same(self, sandbox: Sandbox, wanted: set[int]) -> int:
        ran = sandbox.commands.run(SHOW, timeout=120)
        found = {number for number in wanted if ran.stdout == shown(number)}
        assert found, f"{sandbox.id} shows {ran.stdout!r} {ran.stderr!r}, wanted one of {wanted}"
        return found.pop()

    def snapshots_there(self, sandbox: Sandbox, verb: str) -> None:
        listed = {info.id for info in sandbox.snapshots()}
        assert listed >= self.snapshots.keys(), "an acknowledged snapshot is gone"
        for id in listed - self.snapshots.keys():
            assert verb == "snapshot", f"snapshot {id} came from nowhere"
            self.snapshots[id] = self.number
        if self.snapshots and self.rng.random() < 0.15:
            id = self.rng.choice(list(self.snapshots))
            sandbox.restore(id)
            self.number = self.same(sandbox, {self.snapshots[id]})

    def checkpoints_there(self) -> None:
        with Store(self.place, home=self.folder / "elsewhere") as store:
            for id, number in self.checkpoints.items():
                found = store.read(id, "/home/user/workspace/f")
                assert found == f"{number}\n".encode(), f"checkpoint {id} has {found!r}, wanted {number}"
            if self.rng.random() < 0.2:
                damage = store.verify()
                assert not damage, repr(damage)

    def end(self) -> None:
        """Everything goes; what stays is left over."""
        try:
            self.checkpoints_there()
            for info in Sandbox.list(home=self.home):
                Sandbox.attach(info.id, home=self.home).kill()
        except (SandkeepError, AssertionError, CheckpointNotFound) as error:
            self.lost.append(f"at the end: {type(error).__name__} {error}")
        until, left, before = time.monotonic() + 30, [""], [""]
        while left and time.monotonic() < until:
            before = left
            time.sleep(0.3)
            gc(Home(self.home), cache=True)
            left = leftovers(self.home, self.nursery.process.pid)
            if left == before and not any(one.startswith("process") for one in left):
                break  # nobody is at it any more
        self.left += left


def leftovers(home: Path, but: int) -> list[str]:
    """What is still there of a home without sandboxes: folders, temporaries, processes, mounts, control groups."""
    left = [str(path) for name in ("sandboxes", "layers", "trash") for path in (home / name).iterdir()]
    left += [str(path) for path in (home / "cache").glob("carry-*")]
    left += [
        str(path)
        for path in home.rglob(".*")
        if path.suffix and "bases" not in path.parts and "guest" not in path.parts
    ]
    left += [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if str(home) in line]
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(home).encode() in (folder / "cmdline").read_bytes() and int(folder.name) not in (os.getpid(), but):
                left.append(f"process {folder.name} {(folder / 'cmdline').read_bytes()[:200]!r}")
        except OSError:
            continue
    return left


class Nursery:
    """A process that has everything imported and forks one child for each operation."""

    def __init__(self, store: Path, runtime: str) -> None:
        paths = os.pathsep.join(sys.path)
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), json.dumps([str(store), runtime])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": paths},
            text=True,
        )

    def run(self, home: Path, verb: str, arguments: list[str], delay: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(home), verb, arguments, delay]) + "\n")
        self.process.stdin.flush()
        told: dict[str, Any] = json.loads(self.process.stdout.readline())
        return told

    def close(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.wait(60)
        self.process.stdout.close()


def nursery(where: list[str]) -> None:
    for line in sys.stdin:
        home, verb, arguments, delay = json.loads(line)
        read, write = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(read)
            labour([home, *where], verb, arguments, write)
        os.close(write)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        with os.fdopen(read, "rb") as file:
            answer = json.loads(file.read() or b"{}")
        _, status = os.waitpid(child, 0)
        told = {
            "answer": "",
            "failed": "",
            "took": time.monotonic() - began,
            **answer,
            "killed": os.WIFSIGNALED(status),
        }
        print(json.dumps(told), flush=True)


def labour(where: list[str], verb: str, arguments: list[str], write: int) -> None:
    began, told = time.monotonic(), {}
    try:
        told["answer"] = act(where, verb, *arguments) or "done"
    except BaseException as error:
        told["failed"] = f"{verb}: {type(error).__name__} {error}"
    told["took"] = time.monotonic() - began
    os.write(write, json.dumps(told).encode())
    os._exit(0)


def act(where: list[str], verb: str, id: str, argument: str) -> str | None:
    home, store, runtime = where
    if verb == "create":
        return Sandbox(home=home, runtime=runtime, store=store).id
    if verb == "create_from":
        return Sandbox(home=home, runtime=runtime, store=store, from_checkpoint=argument).id
    if verb == "gc":
        gc(Home(home), cache=True)
        return None
    if verb == "store_gc":
        with Store(store, home=home) as opened:
            opened.gc()
        return None
    sandbox = Sandbox.attach(id, home=home)
    if verb in ("snapshot", "checkpoint", "pause", "fork"):
        return str(getattr(sandbox, verb)().id)
    if verb in ("restore", "restore_checkpoint"):
        sandbox.restore(argument)
    elif verb == "export":
        sandbox.export_state(argument)
    else:
        getattr(sandbox, verb)()
    return None


if __name__ == "__main__":
    nursery(json.loads(sys.argv[1]))
