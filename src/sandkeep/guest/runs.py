"""Requests that start commands, in the shell session, in its background, on a terminal; and those about what runs."""

from __future__ import annotations

import fcntl
import signal
import struct
import termios

from . import proc
from .following import Feed, Follow, Wait
from .handover import begin
from .problems import BAD_ARGUMENT, PROCESS_NOT_FOUND, Problem
from .shell import quote
from .starting import Plan, Script

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Tuple, Union

    from .main import Guest
    from .processes import Process
    from .streams import Input
    from .wire import Connection


def run(guest: Guest, conn: Connection, code: str, cwd: Optional[str], env: Optional[Dict[str, str]],
        user: Optional[Union[str, int]], timeout: Optional[float], stdin: bool, record: bool, background: bool,
        stays: bool, tag: Optional[str], max_output: Optional[int]) -> Optional[Dict[str, Any]]:  # fmt: skip
    session = guest.session
    plan = Plan(guest, session.shell.argv(), code, cwd, env, user, tag)
    plan.about["again"] = {"code": plan.about["code"], "user": user}
    text = session.shell.script(session.state, code, save=not background)
    if record:
        session.record(code)
    try:
        process, script = begin(plan, text, stdin or background, background, keep=not background)
    except BaseException:
        if record:
            session.history.undo()
        raise
    guest.table.add(process)
    if timeout is not None:
        process.limit(timeout)
    if background:
        return {"ok": True, "pid": process.number}
    began = dict(session.env)
    fixed = set(plan.given)
    if plan.person.uid != session.person.uid:
        fixed |= set(plan.person.environment())

    def absorb(done: Process) -> None:
        """Into the session, unless the call was killed."""
        dump = None if done.status is None or done.timed_out or done.signal is not None else script.dump()
        done.saved = dump is not None and session.absorb(dump, fixed, cwd is not None, began)
        script.close()

    process.on_settled.insert(0, absorb)
    conn.send_soon({"started": process.number})
    Follow(guest, conn, process, {}, max_output, lambda: guest.spare.answered(cwd, env, user, stdin), True, stays)
    return None


def start(guest: Guest, conn: Connection, argv: Optional[List[str]], code: Optional[str], session: bool, stdin: bool, follow: bool,
          pty: bool, cols: int, rows: int, cwd: Optional[str], env: Optional[Dict[str, str]], user: Optional[Union[str, int]],
          timeout: Optional[float], tag: Optional[str]) -> Optional[Dict[str, Any]]:  # fmt: skip
    if (argv is not None and code is not None) or (argv is None and code is None and not pty):
        raise Problem(BAD_ARGUMENT, "give either argv or code; neither is a shell on a terminal")
    if pty and not stdin:
        raise Problem(BAD_ARGUMENT, "a terminal is its process's input: stdin can't be false")
    plan, text = _planned(guest, argv, code, session, stdin, cwd, env, user, tag)
    process = _on_terminal(plan, text, cols, rows) if pty else _on_pipes(plan, text, stdin)
    guest.table.add(process)
    if timeout is not None:
        process.limit(timeout)
    if not follow:
        return {"ok": True, "pid": process.number}
    conn.send_json({"started": process.number})
    then = None if code is None or pty else lambda: guest.spare.answered(cwd, env, user, stdin)
    Follow(guest, conn, process, {}, None, then)
    return None


def relaunch(guest: Guest, conn: Connection, number: int, argv: Optional[List[str]], code: Optional[str], session: bool, stdin: bool,
             cwd: Optional[str], env: Optional[Dict[str, str]], user: Optional[Union[str, int]], tag: Optional[str]) -> Dict[str, Any]:  # fmt: skip
    """What ran in an earlier life of this sandbox, with the number that it had: the fields are its `again`."""
    if (argv is None) is (code is None):
        raise Problem(BAD_ARGUMENT, "give either argv or code")
    guest.table.vacate(number)
    plan, text = _planned(guest, argv, code, session, stdin, cwd, env, user, tag, number)
    guest.table.add(_on_pipes(plan, text, stdin))
    return {"ok": True}


def _planned(guest: Guest, argv: Optional[List[str]], code: Optional[str], session: bool, stdin: bool, cwd: Optional[str], env: Optional[Dict[str, str]],
             user: Optional[Union[str, int]], tag: Optional[str], number: Optional[int] = None) -> Tuple[Plan, Optional[bytes]]:  # fmt: skip
    """A process to be, and its shell's script if it has one."""
    shell = guest.session.shell
    plan = Plan(
        guest, argv or (shell.argv() if code is not None else [shell.program]), code, cwd, env, user, tag, number
    )
    what = {"argv": plan.about["argv"]} if code is None else {"code": plan.about["code"]}
    plan.about["again"] = {**what, "session": session, "stdin": stdin, "user": user}
    if code is not None and not session:
        plan.about["code"] = " ".join(map(quote, plan.about["argv"]))
    return plan, None if code is None else shell.script(guest.session.state if session else None, code, save=False)


def _on_pipes(plan: Plan, text: Optional[bytes], stdin: bool) -> Process:
    if text is None:
        return plan.on_pipes({}, stdin).process(plan, True)
    return begin(plan, text, stdin, background=True, keep=False)[0]


def _on_terminal(plan: Plan, text: Optional[bytes], cols: int, rows: int) -> Process:
    if text is None:
        return plan.on_terminal({}, cols, rows)
    script = Script(plan.guest)
    try:
        script.give(text)
        return plan.on_terminal(script.fds, cols, rows)
    finally:
        script.close()


# --- on processes that run


def attach(guest: Guest, conn: Connection, pid: int, positions: Optional[Dict[int, int]]) -> None:
    process = guest.table.find(pid)
    follow = Follow(guest, conn, process, positions or {}, None)
    follow.pump()


def wait(guest: Guest, conn: Connection, pid: int, timeout: Optional[float]) -> Optional[Dict[str, Any]]:
    process = guest.table.find(pid)
    if process.settled:
        return {"ok": True, "running": False, **process.result()}
    Wait(conn, process, timeout)
    return None


def send_signal(guest: Guest, conn: Connection, pid: int, signal: Union[str, int], tree: bool) -> Dict[str, Any]:
    process = guest.table.find(pid)
    number = signal_number(signal)
    process.again = None
    if tree:
        pids = process.tree()
    else:
        pids = set() if process.root is None else {process.root}
    if not pids:
        raise Problem(PROCESS_NOT_FOUND, "process {} has ended".format(pid))
    if tree and number == signal_number("KILL"):
        process.end_tree()
    else:
        process.doomed = process.doomed or number == signal_number("KILL")
        proc.kill(pids, number)
    return {"ok": True, "signalled": len(pids)}


def signal_number(value: Union[str, int]) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value < signal.NSIG:
        return value
    if isinstance(value, str):
        name = value.upper() if value.upper().startswith("SIG") else "SIG" + value.upper()
        found = signal.Signals.__members__.get(name)
        if found is not None:
            return int(found)
    raise Problem(BAD_ARGUMENT, "{!r} is not a signal".format(value))


def _input(guest: Guest, pid: int) -> Input:
    source = guest.table.find(pid).input
    if source is None or not source.open:
        raise Problem(PROCESS_NOT_FOUND, "process {} takes no more input".format(pid))
    return source


def write_stdin(guest: Guest, conn: Connection, pid: int) -> None:
    Feed(conn, _input(guest, pid))


def close_stdin(guest: Guest, conn: Connection, pid: int) -> Dict[str, Any]:
    process = guest.table.find(pid)
    source = _input(guest, pid)
    if process.terminal is not None:
        source.write(b"\x04")
    else:
        source.end()
    return {"ok": True}


def resize(guest: Guest, conn: Connection, pid: int, cols: int, rows: int) -> Dict[str, Any]:
    process = guest.table.find(pid)
    if process.terminal is None or not process.outputs[1].open:
        raise Problem(BAD_ARGUMENT, "process {} has no terminal".format(pid))
    fcntl.ioctl(process.terminal, termios.TIOCSWINSZ, struct.pack("HHHH", rows, cols, 0, 0))
    return {"ok": True}
