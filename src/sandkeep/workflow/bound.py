"""BoundState: the workflow variables of one sandbox, in one JSON file that every process with that sandbox shares.

Each change is durable when the call returns. The sandbox calls `export` when it takes a snapshot or checkpoint and
`replace` when it restores one.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sandkeep.errors import Corrupt
from sandkeep.workflow import files
from sandkeep.workflow.state import WorkflowState


class BoundState:
    """Nothing is cached: what another process set is seen by the next call."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)

    def set_state(self, key: str, value: Any) -> None:
        self.update({key: value})

    def get_state(self, key: str, default: Any = None) -> Any:
        return self._read().get(key, default)

    def update(self, mapping: Mapping[str, Any]) -> None:
        WorkflowState(mapping)
        with self._alone():
            state = self._read()
            state.update(mapping)
            self._write(state)

    def delete_state(self, key: str) -> bool:
        with self._alone():
            state = self._read()
            found = state.delete(key)
            if found:
                self._write(state)
            return found

    @property
    def state(self) -> dict[str, Any]:
        return self._read().variables()

    def export(self) -> dict[str, Any]:
        return self.state

    def replace(self, variables: Mapping[str, Any]) -> None:
        """All variables become these, even if the file was corrupt."""
        state = WorkflowState(variables)
        with self._alone():
            if not self._has(state):
                self._write(state)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        with files.typed_errors("save workflow state", self.path):
            files.make_folder(self.path.parent)
            with files.locked(self.path.with_name(f".{self.path.name}.lock")):
                yield

    def _read(self) -> WorkflowState:
        with files.typed_errors("read workflow state", self.path):
            try:
                data = files.read_file(self.path)
            except FileNotFoundError:
                return WorkflowState()
        try:
            return WorkflowState(files.unseal(data, self.path.name)["variables"])
        except Corrupt as error:
            raise Corrupt(error.message, "restore the sandbox from a snapshot or checkpoint") from error

    def _has(self, state: WorkflowState) -> bool:
        try:
            return files.read_file(self.path) == _sealed(state)
        except FileNotFoundError:
            return not state.live()

    def _write(self, state: WorkflowState) -> None:
        files.write_whole(self.path, _sealed(state), self.path.with_name(f".{self.path.name}.tmp"))


def _sealed(state: WorkflowState) -> bytes:
    return files.seal({"variables": state.live()})
