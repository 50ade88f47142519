"""StateManager: the workflow variables of one session and the checkpoints of them, one JSON file each.

Owns the files `<session>_checkpoint_<timestamp>_<sequence>.json` of its session in its folder, and no others. The sequence
number alone gives the order; the timestamp is for people. docs/design.md, "Workflow state", has the invariants.
"""

from __future__ import annotations

import hashlib
import os
import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sandkeep.errors import BadArgument, CheckpointNotFound, Corrupt, StoreError, Unsupported
from sandkeep.workflow import files
from sandkeep.workflow.state import WorkflowState, plain

LONGEST_NAME = 120


@dataclass(frozen=True)
class WorkflowCheckpoint:
    """`parent` is the checkpoint this state grew from; `parent_session` is the session's own word for where it came from."""

    id: str
    path: Path
    timestamp: str  # ISO 8601, UTC
    reason: str
    stage: str
    parent: str | None
    sequence: int
    session_id: str
    parent_session: str | None = None


@dataclass(frozen=True)
class Problem:
    """A file that was passed over, where it is now, and why."""

    path: Path
    reason: str


@dataclass(frozen=True)
class _File:
    path: Path
    id: str
    sequence: int


class StateManager:
    """Safe for threads and processes. Each manager has its own variables; the checkpoints belong to the session."""

    def __init__(
        self, session_id: str | None = None, directory: str | os.PathLike[str] | None = None, limit: int = 10
    ) -> None:
        if type(limit) is not int or limit < 1:
            raise BadArgument(f"limit must be a whole number from 1 up, not {limit!r}", "1 keeps only the newest")
        if directory is not None and not (isinstance(directory, (str, os.PathLike)) and _names(os.fspath(directory))):
            raise BadArgument(f"{directory!r} names no folder", "leave it out for the one in the home")
        self.session_id = str(uuid.uuid4()) if session_id is None else session_id
        name = file_name(self.session_id)
        self.directory = Path(directory) if directory is not None else default_directory()
        self.limit = limit
        self.problems: list[Problem] = []
        self._state = WorkflowState()
        self._parent: str | None = None
        self._guard = threading.RLock()
        self._prefix = f"{name}_checkpoint_"
        self._lock_path = self.directory / f".{name}.lock"
        self._temporary = self.directory / f".{name}.tmp"
        self._ours = re.compile(re.escape(self._prefix) + r"(\d{8}_\d{6}_\d{6}_(\d{6,}))\.json(\.corrupt)?")
        self._verified: dict[tuple[str, int, int, int], WorkflowCheckpoint] = {}

    def set_state(self, key: str, value: Any) -> None:
        with self._guard:
            self._state.set(key, value)

    def get_state(self, key: str, default: Any = None) -> Any:
        with self._guard:
            return self._state.get(key, default)

    def update(self, mapping: Mapping[str, Any]) -> None:
        with self._guard:
            self._state.update(mapping)

    def delete_state(self, key: str) -> bool:
        with self._guard:
            return self._state.delete(key)

    @property
    def state(self) -> dict[str, Any]:
        """A deep copy: changing it changes nothing here."""
        with self._guard:
            return self._state.variables()

    def checkpoint(self, reason: str = "manual") -> WorkflowCheckpoint:
        """Save all variables durably; then drop the oldest checkpoints beyond the limit."""
        if type(reason) is not str:
            raise BadArgument(f"reason must be a text, not {reason!r}")
        plain(reason, "reason")
        with self._guard, files.typed_errors("save a checkpoint", self.directory):
            files.make_folder(self.directory)
            with files.locked(self._lock_path):
                made = self._write(reason)
                self._rotate()
            self._parent = made.id
            return made

    def checkpoints(self) -> list[WorkflowCheckpoint]:
        """Newest first. What can't be read is passed over and noted in `problems`."""
        with self._guard, files.typed_errors("list the checkpoints", self.directory):
            return list(self._readable())

    def load(self, id: str = "latest") -> WorkflowCheckpoint:
        """Make the variables what the checkpoint says. A corrupt newest one is passed over; a newer format is not."""
        with self._guard, files.typed_errors("load a checkpoint", self.directory):
            found, variables = self._latest() if id == "latest" else self._exactly(id)
            self._state = WorkflowState(variables)
            self._parent = found.id
            return found

    def rollback(self, id: str) -> WorkflowCheckpoint:
        """Load it and save it again as the newest, so that "latest" means it even after a crash. Nothing newer is deleted."""
        with self._guard:
            before, parent = self._state, self._parent
            found = self.load(id)
            try:
                return self.checkpoint(f"rollback to {found.id}")
            except BaseException:
                self._state, self._parent = before, parent
                raise

    def _write(self, reason: str) -> WorkflowCheckpoint:
        now = datetime.now(UTC)
        sequence = max((each.sequence for each in self._files(corrupt=True)), default=0) + 1
        id = f"{now:%Y%m%d_%H%M%S_%f}_{sequence:06}"
        variables = self._state.live()
        record = {
            "session_id": self.session_id,
            "id": id,
            "sequence": sequence,
            "timestamp": now.isoformat(),
            "reason": reason,
            "stage": _word(variables.get("current_stage", "unknown")),
            "parent": self._parent,
            "parent_session": _word(variables.get("parent_session")),
            "state_info": variables,
        }
        path = self.directory / f"{self._prefix}{id}.json"
        files.write_whole(path, files.seal(record), self._temporary)
        return self._info(path, record)

    def _rotate(self) -> None:
        for old in list(self._readable())[self.limit :]:
            try:
                old.path.unlink(missing_ok=True)
            except OSError as refusal:
                self._note(old.path, f"beyond the limit of {self.limit}, but can't be removed: {refusal.strerror}")
        live = {each.path.name for each in self._files()}
        self._verified = {key: info for key, info in self._verified.items() if key[0] in live}

    def _files(self, corrupt: bool = False) -> list[_File]:
        if not self.directory.is_dir():
            return []
        with os.scandir(self.directory) as entries:
            matches = [(e.path, self._ours.fullmatch(e.name)) for e in entries if e.is_file(follow_symlinks=False)]
        ours = [
            _File(Path(path), match[1], int(match[2])) for path, match in matches if match and (corrupt or not match[3])
        ]
        return sorted(ours, key=lambda each: each.sequence, reverse=True)

    def _readable(self) -> Iterator[WorkflowCheckpoint]:
        for each in self._files():
            try:
                stat = each.path.stat()
                key = (each.path.name, stat.st_ino, stat.st_size, stat.st_mtime_ns)
                if key not in self._verified:
                    self._verified[key] = self._read(each)[0]
                yield self._verified[key]
            except FileNotFoundError:
                continue  # rotated away by another process meanwhile
            except Corrupt as error:
                self._set_aside(each.path, error)
            except Unsupported as error:
                self._note(each.path, error.message)
            except OSError as error:
                self._note(each.path, f"can't be read: {error.strerror}")

    def _latest(self) -> tuple[WorkflowCheckpoint, dict[str, Any]]:
        for each in self._files():
            try:
                return self._read(each)
            except FileNotFoundError:
                continue
            except Corrupt as error:
                self._set_aside(each.path, error)
        raise self._missing("latest")

    def _exactly(self, id: str) -> tuple[WorkflowCheckpoint, dict[str, Any]]:
        for each in self._files():
            if each.id == id:
                try:
                    return self._read(each)
                except FileNotFoundError:
                    break
                except Corrupt as error:
                    self._set_aside(each.path, error)
                    raise
        raise self._missing(id)

    def _missing(self, id: str) -> CheckpointNotFound:
        aside = [str(each.path) for each in self.problems]
        remedy = "see checkpoints() for those that are kept" + (" and problems for those passed over" if aside else "")
        return CheckpointNotFound(f"session {self.session_id!r} has no checkpoint {id!r}", remedy, passed_over=aside)

    def _read(self, file: _File) -> tuple[WorkflowCheckpoint, dict[str, Any]]:
        record = files.unseal(files.read_file(file.path), file.path.name)
        if (record.get("session_id"), record.get("id")) != (self.session_id, file.id):
            raise Corrupt(f"{file.path.name} holds another checkpoint than its name says", "load an older checkpoint")
        return self._info(file.path, record), record["state_info"]

    def _info(self, path: Path, record: dict[str, Any]) -> WorkflowCheckpoint:
        names = ("id", "timestamp", "reason", "stage", "parent", "sequence", "session_id", "parent_session")
        return WorkflowCheckpoint(path=path, **{name: record[name] for name in names})

    def _set_aside(self, path: Path, error: StoreError) -> None:
        aside = path.with_name(f"{path.name}.corrupt")
        try:
            os.rename(path, aside)
        except FileNotFoundError:
            pass  # another process was first
        except OSError as refusal:
            self._note(path, f"{error.message}; it stays where it is: {refusal.strerror}")
            return
        self._note(aside, error.message)

    def _note(self, path: Path, reason: str) -> None:
        problem = Problem(path, reason)
        if problem not in self.problems:
            self.problems.append(problem)


def _names(folder: str | bytes) -> bool:
    return isinstance(folder, str) and bool(folder) and "\0" not in folder


def default_directory() -> Path:
    home = os.environ.get("SANDKEEP_HOME")
    return (Path(home) if home else Path.home() / ".sandkeep") / "sessions"


def file_name(session_id: str) -> str:
    """One file name for one session id, whatever the id holds: letters, digits, `-`, `_` as they are, the rest as %XX."""
    if type(session_id) is not str or not session_id:
        raise BadArgument(f"a session id is a text of at least one character, not {session_id!r}")
    plain(session_id, "session_id")
    name = quote(session_id, safe="").replace(".", "%2E").replace("~", "%7E")
    if len(name) <= LONGEST_NAME:
        return name
    return f"{name[:40]}~{hashlib.sha256(session_id.encode()).hexdigest()}"


def _word(value: Any) -> Any:
    return value if value is None or isinstance(value, str) else str(value)
