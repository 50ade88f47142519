"""A guest as an ordinary process, for tests: started in a folder of its own, ended with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandkeep.runtime.link import Link, door, guest_source
from sandkeep.runtime.process import find
from waiting import PATIENCE as PATIENCE
from waiting import until as until


@dataclass
class Done:
    exit_code: int
    stdout: bytes
    stderr: bytes
    result: dict[str, Any] = field(repr=False)


@dataclass
class Box:
    dir: Path
    link: Link
    process: subprocess.Popen[bytes]

    def run(self, code: str, body: list[bytes] | None = None, **fields: Any) -> Done:
        out = {"stdout": bytearray(), "stderr": bytearray()}
        with self.link.stream("run", {"code": code, **fields}, body=body, timeout=PATIENCE) as events:
            for kind, data in events:
                if kind in out:
                    out[kind] += data
            result = events.result
        return Done(result["exit_code"], bytes(out["stdout"]), bytes(out["stderr"]), result)

    def text(self, code: str, **fields: Any) -> str:
        """What a command that must succeed writes."""
        done = self.run(code, **fields)
        assert (done.exit_code, done.stderr) == (0, b""), done
        return done.stdout.decode()

    def read(self, path: str, **fields: Any) -> bytes:
        with self.link.stream("file_read", {"path": path, **fields}, timeout=PATIENCE) as events:
            return b"".join(data for kind, data in events if kind == "data")

    def write(self, path: str, *pieces: bytes, **fields: Any) -> dict[str, Any]:
        with self.link.stream("file_write", {"path": path, **fields}, body=pieces, timeout=PATIENCE) as events:
            list(events)
            return events.result

    def attach(self, pid: int, **fields: Any) -> Done:
        out = {"stdout": bytearray(), "stderr": bytearray()}
        with self.link.stream("attach", {"pid": pid, **fields}, timeout=PATIENCE) as events:
            for kind, data in events:
                if kind in out:
                    out[kind] += data
            return Done(events.result["exit_code"], bytes(out["stdout"]), bytes(out["stderr"]), events.result)

    def stdin(self, pid: int, *pieces: bytes) -> None:
        with self.link.stream("stdin", {"pid": pid}, body=pieces, timeout=PATIENCE) as events:
            list(events)


@contextmanager
def guest(dir: Path, before: str = "", calls: bool = False) -> Iterator[Box]:
    """`before` is Python that runs before the guest does. `calls`: it is called and comes, else it listens."""
    start = (
        f"import sys; sys.path[:0] = [{str(guest_source().parent)!r}]\n{before}\nfrom guest.main import main; main()"
    )
    given = door.make(dir, calls=calls)
    (dir / "run/numbers").unlink()
    os.link(dir / "numbers", dir / "run/numbers")  # a runtime would mount it
    shown = os.open(dir / "run", os.O_PATH)
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-B", "-X", "utf8", "-c", start],
        env={"SANDKEEP_RUN": f"/proc/self/fd/{shown}"},  # a socket's address is short
        cwd="/",
        stdin=given,
        pass_fds=[shown],
    )
    os.close(given)
    os.close(shown)
    record(dir, process.pid)
    link = Link(dir)
    try:
        link.ready(PATIENCE, lambda: process.poll() is None)
        yield Box(dir, link, process)
    finally:
        link.close()
        end_below(process.pid)
        process.kill()
        process.wait()


def record(dir: Path, pid: int) -> None:
    """As the runtime does: whose word counts as this sandbox's."""
    (dir / "bundle").mkdir(exist_ok=True)
    one = find(pid)
    assert one is not None
    (dir / "bundle/process").write_text(f"{one.pid} {one.started}")


def end_below(pid: int) -> None:
    """Kill what a guest has started, before it is killed itself and they are nobody's children."""
    for child in children(pid):
        end_below(child)
        try:
            os.kill(child, signal.SIGKILL)
        except ProcessLookupError:
            pass


def children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def gone(pid: int) -> bool:
    """Ended, reaped or not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return text.rpartition(")")[2].split()[0] in "ZX"
