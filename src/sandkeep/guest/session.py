"""The shell session that commands share: environment, folder, shell state, history, secrets, user.

Secrets live here only, are added to the environment of what is started, and are taken out of all that is handed over.
"""

from __future__ import annotations

import os
import time

from . import people
from .fields import environment, text
from .problems import BAD_ARGUMENT, Problem, file_problem
from .shell import Shell, State

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Set, Tuple, Union

    from .people import Person

WORKSPACE = "/home/user/workspace"
MAX_HISTORY = 10_000
_LEAST_SECRET = 6  # shorter values occur everywhere by chance; they are known by their names only


class History:
    """Commands with their times. The list's text is in a memory file that shells read; emptying that file clears it."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("history")
        self._entries: List[Tuple[str, float]] = []

    def _sync(self) -> None:
        if self._entries and os.fstat(self.fd).st_size == 0:
            self._entries = []

    def entries(self) -> List[Dict[str, Any]]:
        self._sync()
        return [
            {"index": at, "command": command, "timestamp": when} for at, (command, when) in enumerate(self._entries, 1)
        ]

    def add(self, command: str) -> None:
        self._sync()
        self._entries.append((command, time.time()))
        if len(self._entries) > MAX_HISTORY:
            self.replace(self._entries[-MAX_HISTORY:])
        else:
            self._write(len(self._entries), command)

    def undo(self) -> None:
        self.replace(self._entries[:-1])

    def replace(self, entries: List[Tuple[str, float]]) -> None:
        os.ftruncate(self.fd, 0)
        self._entries = entries[-MAX_HISTORY:]
        for at, (command, _) in enumerate(self._entries, 1):
            self._write(at, command)

    def _write(self, index: int, command: str) -> None:
        line = os.fsencode("{:5d}  {}\n".format(index, command))
        os.pwrite(self.fd, line, os.fstat(self.fd).st_size)


class Session:
    def __init__(self) -> None:
        self.shell = Shell()
        self.history = History()
        self.secrets: Dict[str, str] = {}
        self.state = State()
        self.person = people.default()
        self.env = _begin(self.person)
        self.cwd = next((p for p in (WORKSPACE, self.person.home) if os.path.isdir(p)), "/")

    def choose(self, user: Optional[Union[str, int]]) -> Person:
        return self.person if user is None else people.lookup(user)

    def environment(self, person: Person, extra: Dict[str, str]) -> Dict[str, str]:
        """What a new process gets."""
        own = person.environment() if person.uid != self.person.uid else {}
        return {**self.env, **own, **self.secrets, **extra}

    def folder(self, cwd: Optional[str], person: Person) -> str:
        """Where a call starts: the folder asked for, or the session's, or what is left of it, or where its user may be."""
        if cwd is not None:
            return self.resolve(cwd)
        folder = self.cwd
        while not os.path.isdir(folder):
            folder = os.path.dirname(folder)
        if person is self.person:
            return folder
        with people.Acting(person):
            return next((place for place in (folder, person.home) if os.access(place, os.X_OK)), "/")

    def resolve(self, path: str) -> str:
        return os.path.join(self.cwd, path)

    def record(self, command: str) -> None:
        self.history.add(self.masked(command))

    def absorb(self, dump: bytes, fixed: Set[str], keep_cwd: bool, began: Dict[str, str]) -> bool:
        """Take over what a call changed. Fixed names were given for that call alone; `began` is the environment it began with."""
        read = self.shell.read(dump)
        if read is None:
            return False
        env, state, folder = read
        fixed = fixed | set(self.secrets)
        for name in set(began) | set(env):
            if name in fixed or not name.isidentifier() or began.get(name) == env.get(name):
                continue
            if name in env:
                self.env[name] = env[name]
            else:
                self.env.pop(name, None)
        state.variables = {name: value for name, value in state.variables.items() if name not in fixed}
        self.state = state
        if not keep_cwd and folder.startswith("/"):
            self.cwd = folder
        return True

    def set_env(self, values: Dict[str, str]) -> None:
        self.env.update(values)
        for name in values:
            self.state.variables.pop(name, None)

    def unset_env(self, names: List[str]) -> None:
        for name in names:
            self.env.pop(name, None)
            self.state.variables.pop(name, None)

    def masked(self, command: str) -> str:
        for name, value in self.secrets.items():
            if len(value) >= _LEAST_SECRET:
                command = command.replace(value, "[{}]".format(name))
        return command

    def _tells(self, value: str) -> bool:
        return self.masked(value) != value

    def withheld(self) -> List[str]:
        """Names of the variables (and "functions", "aliases") that hold a secret's value."""
        names = {name for name, value in self.env.items() if self._tells(value)}
        names |= {name for name, value in self.state.variables.items() if self._tells(value)}
        return sorted(names | {part for part in ("functions", "aliases") if self._tells(getattr(self.state, part))})

    def clean(self) -> None:
        """Drop what is withheld."""
        dropped = self.withheld()
        self.unset_env(dropped)
        for part in ("functions", "aliases"):
            if part in dropped:
                setattr(self.state, part, "")

    def get(self) -> Dict[str, Any]:
        """All that makes the session, without secrets; set takes it back."""
        env, state = dict(self.env), self.state
        self.state = State(dict(state.variables), state.functions, state.aliases, state.options)
        try:
            self.clean()
            return {"env": self.env, "cwd": self.cwd, "shell": self.state.as_dict(), "history": self.history.entries(),
                    "user": self.person.name}  # fmt: skip
        finally:
            self.env, self.state = env, state

    def set(self, env: Optional[Dict[str, str]], cwd: Optional[str], shell: Optional[Dict[str, Any]],
            history: Optional[List[Any]], user: Optional[Union[str, int]]) -> None:  # fmt: skip
        """Become what get told; nothing is changed if any part is wrong.

        With shell it is a whole session and env replaces all; without, env is laid over what every session begins with, and cwd
        must be a folder that the user may enter. A user that can't be used here gives way to the default one.
        """
        person = self.person if user is None else _usable(user)
        if cwd is not None and not cwd.startswith("/"):
            raise Problem(BAD_ARGUMENT, "cwd must be an absolute path")
        if cwd is not None and shell is None:
            _enter(cwd, person)
        state = self.state if shell is None else _state(shell)
        entries = None if history is None else [_entry(entry) for entry in history]
        self.person, self.state = person, state
        if env is not None:
            self.env = dict(env) if shell is not None else {**_begin(person), **env}
        if cwd is not None:
            self.cwd = cwd
        if entries is not None:
            self.history.replace(entries)


def _begin(person: Person) -> Dict[str, str]:
    return {"PATH": people.PATH, "LANG": "C.UTF-8", **person.environment()}


def _enter(cwd: str, person: Person) -> None:
    """Whether a command of the person could start there, as an error."""
    try:
        with people.Acting(person):
            os.chdir(cwd)
    except OSError as error:
        raise file_problem(error, cwd)
    finally:
        os.chdir("/")


def _usable(user: Union[str, int]) -> Person:
    try:
        person = people.lookup(user)
    except Problem:
        return people.default()
    return person if people.usable(person) else people.default()


def _state(shell: Dict[str, Any]) -> State:
    if set(shell) - {"variables", "functions", "aliases", "options"}:
        raise Problem(BAD_ARGUMENT, "shell has unknown parts")
    texts = [text(part, shell.get(part, "")) for part in ("functions", "aliases", "options")]
    return State(dict(environment("variables", shell.get("variables", {}))), *texts)


def _entry(entry: Any) -> Tuple[str, float]:
    if not isinstance(entry, dict) or not isinstance(entry.get("timestamp"), (int, float)):
        raise Problem(BAD_ARGUMENT, "history must be a list of objects with command and timestamp")
    return text("command", entry.get("command")), float(entry["timestamp"])
