"""Every request the guest answers: its name, its fields with their checks and defaults, and who handles it.

A handler gives the answer, or None when a task of the connection will, or a generator whose end is the answer.
"""

from __future__ import annotations

import types

from . import egress, fields, files, house, jobs, runs, tunnel
from .fields import (
    REQUIRED,
    argv,
    attributes,
    environment,
    flag,
    integer,
    mapping,
    names,
    number,
    path,
    positions,
    text,
    user,
)
from .problems import BAD_ARGUMENT, Problem

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Dict, Optional, Tuple

    from .fields import Schema
    from .main import Guest
    from .wire import Connection

_PID = integer(1, 2**31 - 1)
_SECONDS = number(0, 10**8)
_SIZE = integer(0, 2**62)
_MODE = integer(0, 0o7777)
_ID = integer(-1, 2**32 - 2)
_CELLS = integer(1, 10_000)
_WHERE: Schema = {"path": (path, REQUIRED), "user": (user, None)}
_START: Schema = {
    "cwd": (path, None),
    "env": (environment, None),
    "user": (user, None),
    "timeout": (_SECONDS, None),
    "tag": (text, None),
}


def _watch(guest: Guest, conn: Connection, **taken: Any) -> None:
    from . import watch  # ctypes is a third of the guest's memory: only for those who need it

    watch.watch(guest, conn, **taken)


def _mark(guest: Guest, conn: Connection, **taken: Any) -> Dict[str, Any]:
    from . import watch

    return watch.mark(guest, conn, **taken)


def _list(name: str, value: Any) -> Any:
    if not isinstance(value, list):
        raise Problem(BAD_ARGUMENT, "{} must be a list".format(name))
    return value


def _signal(name: str, value: Any) -> int:
    return runs.signal_number(value)


OPS: Dict[str, Tuple[Callable[..., Any], Schema]] = {
    "hello": (house.hello, {}),
    # commands
    "run": (runs.run, {
        **_START, "code": (text, REQUIRED), "stdin": (flag, False), "record": (flag, True), "background": (flag, False),
        "stays": (flag, False), "max_output": (_SIZE, None)}),
    "start": (runs.start, {
        **_START, "argv": (argv, None), "code": (text, None), "session": (flag, True), "stdin": (flag, True), "follow": (flag, False), "pty": (flag, False),
        "cols": (_CELLS, 80), "rows": (_CELLS, 24)}),
    "relaunch": (runs.relaunch, {
        "number": (_PID, REQUIRED), "argv": (argv, None), "code": (text, None), "session": (flag, True), "stdin": (flag, True), "cwd": (path, None),
        "env": (environment, None), "user": (user, None), "tag": (text, None)}),
    "attach": (runs.attach, {"pid": (_PID, REQUIRED), "positions": (positions, None)}),
    "wait": (runs.wait, {"pid": (_PID, REQUIRED), "timeout": (_SECONDS, None)}),
    "signal": (runs.send_signal, {"pid": (_PID, REQUIRED), "signal": (_signal, 15), "tree": (flag, True)}),
    "stdin": (runs.write_stdin, {"pid": (_PID, REQUIRED)}),
    "close_stdin": (runs.close_stdin, {"pid": (_PID, REQUIRED)}),
    "resize": (runs.resize, {"pid": (_PID, REQUIRED), "cols": (_CELLS, REQUIRED), "rows": (_CELLS, REQUIRED)}),
    "list": (house.processes, {}),
    "process": (house.process, {"pid": (_PID, REQUIRED)}),
    "kill_all": (house.kill_all, {}),
    "stop_all": (house.stop_all, {}),
    "cont_all": (house.cont_all, {}),
    # session
    "history_list": (house.history_list, {}),
    "history_clear": (house.history_clear, {}),
    "env_get": (house.env_get, {}),
    "env_set": (house.env_set, {"env": (environment, REQUIRED)}),
    "env_unset": (house.env_unset, {"names": (names, REQUIRED)}),
    "session_get": (house.session_get, {}),
    "session_set": (house.session_set, {
        "env": (environment, None), "cwd": (path, None), "shell": (mapping, None), "history": (_list, None), "user": (user, None),
        "numbers": (mapping, None)}),
    "secrets_get": (house.secrets_get, {}),
    "secrets_set": (house.secrets_set, {"secrets": (environment, REQUIRED)}),
    "user_default": (house.user_default, {"user": (user, None)}),
    # files
    "file_stat": (files.stat, {**_WHERE, "follow": (flag, False), "xattrs": (flag, False)}),
    "file_list": (files.list_folder, {**_WHERE, "depth": (integer(1, 1000), 1), "xattrs": (flag, False)}),
    "file_read": (files.read, {**_WHERE, "offset": (_SIZE, 0), "length": (_SIZE, None)}),
    "file_write": (files.write, {
        **_WHERE, "mode": (_MODE, None), "append": (flag, False), "offset": (_SIZE, None), "parents": (flag, True),
        "xattrs": (attributes, None)}),
    "file_mkdir": (files.mkdir, {**_WHERE, "parents": (flag, False), "mode": (_MODE, 0o755)}),
    "file_move": (files.move, {**_WHERE, "to": (path, REQUIRED), "overwrite": (flag, True)}),
    "file_remove": (files.remove, {**_WHERE, "recursive": (flag, False)}),
    "file_chmod": (files.chmod, {**_WHERE, "mode": (_MODE, REQUIRED)}),
    "file_chown": (files.chown, {
        "path": (path, REQUIRED), "uid": (_ID, -1), "gid": (_ID, -1), "follow": (flag, True)}),
    "file_symlink": (files.symlink, {**_WHERE, "target": (path, REQUIRED)}),
    "file_watch": (_watch, {"path": (path, REQUIRED), "recursive": (flag, False), "name": (text, None)}),
    "watch_mark": (_mark, {"name": (text, REQUIRED), "mark": (integer(1, 2**53), REQUIRED)}),
    # the house
    "ports": (house.ports, {}),
    "connect": (tunnel.connect, {"port": (integer(1, 65535), REQUIRED), "host": (text, "127.0.0.1")}),
    "egress": (egress.hold, {"port": (integer(1, 65535), REQUIRED), "env": (environment, REQUIRED)}),
    "egress_take": (egress.take, {"number": (integer(1, 2**62), REQUIRED)}),
    "usage": (house.usage, {}),
    "reseed": (house.reseed, {"seed": (text, REQUIRED), "hostname": (text, None), "machine_id": (text, None)}),
    "hold": (house.hold, {}),
    "sleep": (house.sleep, {}),
    "shutdown": (house.shutdown, {}),
}  # fmt: skip


# What a hold keeps waiting: whatever may change files, processes or the session.
HELD = frozenset(
    "run start relaunch stdin close_stdin resize signal history_clear env_set env_unset file_write file_mkdir file_move file_remove "
    "file_chmod file_chown file_symlink file_read file_watch connect".split()
)

# What must be alone here, or changes what a shell begins with: no shell is kept waiting over it.
ALONE = frozenset(
    "kill_all stop_all env_set env_unset session_set secrets_set user_default reseed hold sleep shutdown".split()
)


def serve(guest: Guest, conn: Connection, request: Dict[str, Any]) -> None:
    """Answer one request, or set the task that will."""
    op = request.get("op")
    conn.body = op in ("file_write", "stdin") or (op == "run" and request.get("stdin") is True)
    answer = jobs.outcome(lambda: _handle(guest, conn, op, request))
    if isinstance(answer, types.GeneratorType):
        jobs.Job(conn, answer)
    elif answer is not None:
        conn.finish(answer)


def _handle(guest: Guest, conn: Connection, op: Any, request: Dict[str, Any]) -> Optional[Any]:
    if not isinstance(op, str) or op not in OPS:
        raise Problem(BAD_ARGUMENT, "there is no request {!r}".format(op))
    handler, schema = OPS[op]
    taken = fields.take(schema, request)
    if op in ALONE:
        guest.spare.drop()
    return handler(guest, conn, **taken)
