"""Namespaces: where the persisted state of a name is, and who may write it.

<home>/namespaces/<name>/  state.json         generations, newest first, and those set aside
                           owner.json         who may save: token, sandbox, mode, process, boot
                           owner-<token>.lock held by that owner while it lives
                           lock               held for moments, while owner or state change

A generation is a checkpoint in the namespace's store. Whoever saves shows its token under the lock; who has been replaced
finds another's and is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sandkeep.errors import BadArgument, StateConflict
from sandkeep.sandbox.home import Home, boot, lock, read_json, write_json
from sandkeep.workflow.manager import file_name

KEPT = 5
MOST = 8  # more are cut down to KEPT at once


@dataclass(frozen=True)
class Generation:
    id: str  # the checkpoint
    hash: str
    timestamp: str
    history: str = ""  # digest of the command history, which is no part of the state's hash


@dataclass
class Persisted:
    generations: list[Generation] = field(default_factory=list)
    aside: list[Generation] = field(default_factory=list)  # could not be loaded, or were stepped over by hand

    def before(self, id: str) -> Generation | None:
        """The generation that came before this one."""
        ids = [one.id for one in self.generations]
        return self.generations[ids.index(id) + 1] if id in ids[:-1] else None


class Namespace:
    def __init__(self, home: Home, name: str) -> None:
        if not isinstance(name, str) or not name:
            raise BadArgument(f"a namespace is a text of at least one character, not {name!r}")
        self.name = name
        self.home = home
        self.folder = home.path / "namespaces" / file_name(name)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with lock(self.folder / "lock", what=f"namespace {self.name}"):
            yield

    def load(self) -> Persisted:
        try:
            found = read_json(self.folder / "state.json")
        except FileNotFoundError:
            return Persisted()
        return Persisted(*([Generation(**one) for one in found[part]] for part in ("generations", "aside")))

    def save(self, state: Persisted) -> None:
        write_json(self.folder / "state.json", {"namespace": self.name, **asdict(state)})

    def owner(self) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = read_json(self.folder / "owner.json")
        except FileNotFoundError:
            return None
        return found

    def claim(self, mode: str, *, takeover: bool) -> tuple[Claim, dict[str, Any] | None]:
        """Become the owner; also who was it before, living or dead."""
        with self.alone():
            before = self.owner()
            if before is not None and not takeover and self.lives(before):
                raise StateConflict(
                    f"namespace {self.name!r} is in use by sandbox {before['sandbox']} of process {before['pid']}",
                    "end that one, choose another namespace, or say takeover=True",
                    sandbox=before["sandbox"],
                )
            claim = Claim(self, secrets.token_hex(8), mode)
            claim.write(None)
            if before is not None and not self.lives(before):
                self._lock_of(before["token"]).unlink(missing_ok=True)
            return claim, before

    def lives(self, owner: dict[str, Any]) -> bool:
        return _lives(self._lock_of(owner["token"]))

    def _lock_of(self, token: str) -> Path:
        return self.folder / f"owner-{token}.lock"


class Claim:
    """The right to save in a namespace, until released or taken over. Dies with its process."""

    def __init__(self, namespace: Namespace, token: str, mode: str) -> None:
        self.namespace, self.token, self._mode = namespace, token, mode
        self._path = namespace._lock_of(token)
        self._handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._handle, fcntl.LOCK_EX)

    def write(self, sandbox: str | None) -> None:
        about = {"token": self.token, "sandbox": sandbox, "mode": self._mode, "pid": os.getpid(), "boot": boot()}
        write_json(self.namespace.folder / "owner.json", about)

    @contextlib.contextmanager
    def held(self) -> Iterator[Persisted]:
        """The namespace's state, to be changed by nobody else meanwhile; StateConflict when this claim was taken over."""
        with self.namespace.alone():
            self.require()
            yield self.namespace.load()

    def require(self) -> None:
        """StateConflict when this claim was taken over."""
        owner = self.namespace.owner()
        if owner is None or owner["token"] != self.token:
            by = f" by sandbox {owner['sandbox']}" if owner and owner.get("sandbox") else ""
            raise StateConflict(
                f"namespace {self.namespace.name!r} was taken over{by}", "kill(save=False) ends this one without saving"
            )

    def owns(self, sandbox: str) -> None:
        with self.held():
            self.write(sandbox)

    def abandon(self, before: dict[str, Any] | None) -> None:
        """As if it had never been claimed: whoever owned it before owns it again."""
        with self.namespace.alone():
            owner = self.namespace.owner()
            if owner is not None and owner["token"] == self.token and before is not None:
                write_json(self.namespace.folder / "owner.json", before)
        self.release(forget=True)

    def release(self, *, forget: bool) -> None:
        """Let go; unless `forget`, the sandbox is found and saved by the next owner."""
        if self._handle < 0:
            return
        with self.namespace.alone():
            owner = self.namespace.owner()
            if forget and owner is not None and owner["token"] == self.token:
                (self.namespace.folder / "owner.json").unlink()
            if forget or owner is None or owner["token"] != self.token:
                self._path.unlink(missing_ok=True)
            os.close(self._handle)
            self._handle = -1


def _lives(path: Path) -> bool:
    """Whether somebody holds the lock; a process may ask about its own."""
    try:
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False
