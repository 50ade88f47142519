"""A process beside this one that makes small files of a layer: the interpreter's lock lets no two threads make them at once.

Both take from one supply, each as fast as it can. The other sees neither the store nor its keys.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple

from sandkeep.checkpoints.layerfiles import LayerFiles
from sandkeep.checkpoints.nodes import Entry
from sandkeep.errors import StoreError
from sandkeep.store.stored import Stored

if TYPE_CHECKING:
    from sandkeep.store.repository import Repository

WORTH = 4000  # files from which on a process pays
_AHEAD = 2  # tasks it is given at once
_SOURCE = Path(__file__).parents[2]
_COMMAND = [sys.executable, "-S", "-c", "from sandkeep.checkpoints.beside import main; main()"]

Files = dict[bytes, list[tuple[bytes, Entry]]]  # blob → the files it is


class Task(NamedTuple):
    stored: Stored
    files: Files

    def make(self, layer: LayerFiles) -> list[bytes]:
        """The blobs whose files now exist."""
        made = []
        for blob, data in self.stored.blobs():
            for path, entry in self.files[blob]:
                layer.whole(path, entry, data)
            made.append(blob)
        return made


class Supply:
    """Small files to make, by the tasks that two threads take. What is damaged where it was found stays in `missing`."""

    def __init__(self, repo: Repository, files: Files) -> None:
        self.missing = dict.fromkeys(files)
        self._files = files
        self._stored = repo.stored(files)
        self._next = next(self._stored, None)
        self._lock = threading.Lock()

    def __iter__(self) -> Iterator[Task]:
        while True:
            with self._lock:
                stored, self._next = self._next, next(self._stored, None)
            if stored is None:
                return
            yield Task(stored, {place.id: self._files[place.id] for place in stored.places})

    def made(self, blobs: list[bytes]) -> None:
        for blob in blobs:
            del self.missing[blob]


class Answer(NamedTuple):
    made: list[bytes]
    done: int
    bytes: int
    lost: Counter[str]


class Beside:
    """The process for the folder `root`."""

    def __init__(self, root: int) -> None:
        self._process = subprocess.Popen(
            [*_COMMAND, str(root)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"PYTHONPATH": os.pathsep.join([str(_SOURCE), *filter(None, sys.path)])},
            pass_fds=(root,),
        )
        self._answers: SimpleQueue[Any] = SimpleQueue()
        self._listener = threading.Thread(target=self._listen, name="beside", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        """Answers are taken off the pipe at all times: while both sides wrote more than a pipe holds, both would wait for ever."""
        assert self._process.stdout is not None
        try:
            while True:
                self._answers.put(pickle.load(self._process.stdout))
        except (EOFError, pickle.UnpicklingError):
            self._answers.put(StoreError("the process that makes files has died", "try again"))

    def work(self, supply: Supply, layer: LayerFiles) -> None:
        """Make files until the supply is empty; `layer` is told."""
        assert self._process.stdin is not None
        waiting = 0
        with layer.or_give_up():
            with suppress(BrokenPipeError):
                for task in supply:
                    if layer.given_up:
                        return
                    pickle.dump(task, self._process.stdin, pickle.HIGHEST_PROTOCOL)
                    self._process.stdin.flush()
                    waiting += 1
                    if waiting > _AHEAD:
                        self._take(supply, layer)
                        waiting -= 1
                self._process.stdin.close()
            for _ in range(waiting):
                self._take(supply, layer)

    def _take(self, supply: Supply, layer: LayerFiles) -> None:
        answer = self._answers.get()
        if not isinstance(answer, Answer):
            raise answer
        supply.made(answer.made)
        layer.beside = (answer.done, answer.bytes, answer.lost)

    def end(self) -> None:
        self._process.kill()
        self._listener.join()
        with self._process:
            pass


@contextmanager
def beside(root: int, files: int) -> Iterator[Beside | None]:
    """A process for this folder, if so many files are worth one and there can be one."""
    process = None
    if files >= WORTH and sys.executable:
        with suppress(OSError):
            process = Beside(root)
    try:
        yield process
    finally:
        if process is not None:
            process.end()


def main() -> None:
    layer = LayerFiles(int(sys.argv[1]), [], None)
    try:
        while True:
            task: Task = pickle.load(sys.stdin.buffer)
            _tell(Answer(task.make(layer), layer.done, layer.bytes, layer.lost))
    except EOFError:
        pass
    except Exception as error:
        _tell(error)


def _tell(what: Any) -> None:
    pickle.dump(what, sys.stdout.buffer, pickle.HIGHEST_PROTOCOL)
    sys.stdout.buffer.flush()
