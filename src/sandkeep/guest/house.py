"""Requests about the sandbox as a whole: who is here, the session, what is used, sleep and shutdown."""

from __future__ import annotations

import os
import signal
import socket

from . import people, proc
from .problems import UNSUPPORTED, Problem
from .wire import Task

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Optional, Union

    from .main import Guest
    from .wire import Connection

VERSION = 1
OK = {"ok": True}


def hello(guest: Guest, conn: Connection) -> Dict[str, Any]:
    return {
        "ok": True,
        "version": VERSION,
        "boot": guest.boot,
        "pid": os.getpid(),
        "pid_namespace": _link("/proc/self/ns/pid"),
        "user": guest.session.person.name,
        "uid": guest.session.person.uid,
        "uids": people.mapped(),
        "shell": guest.session.shell.program,
    }


def _link(path: str) -> Optional[str]:
    try:
        return os.readlink(path)
    except OSError:
        return None


def processes(guest: Guest, conn: Connection) -> Dict[str, Any]:
    return {"ok": True, "processes": guest.table.describe()}


def process(guest: Guest, conn: Connection, pid: int) -> Dict[str, Any]:
    return {"ok": True, **guest.table.tell(pid)}


def kill_all(guest: Guest, conn: Connection) -> Dict[str, Any]:
    """End every process but this one; answered when none is left."""
    guest.table.never_again()
    return {"ok": True, "killed": proc.end_others()}


def stop_all(guest: Guest, conn: Connection) -> Dict[str, Any]:
    guest.stopped |= proc.stop_others()
    return {"ok": True, "stopped": len(guest.stopped)}


def cont_all(guest: Guest, conn: Connection) -> Dict[str, Any]:
    count = len(guest.stopped)
    proc.kill(guest.stopped, signal.SIGCONT)
    guest.stopped = set()
    return {"ok": True, "continued": count}


def history_list(guest: Guest, conn: Connection) -> Dict[str, Any]:
    return {"ok": True, "history": guest.session.history.entries()}


def history_clear(guest: Guest, conn: Connection) -> Dict[str, Any]:
    guest.session.history.replace([])
    return OK


def env_get(guest: Guest, conn: Connection) -> Dict[str, Any]:
    return {"ok": True, "env": guest.session.env, "cwd": guest.session.cwd}


def env_set(guest: Guest, conn: Connection, env: Dict[str, str]) -> Dict[str, Any]:
    guest.session.set_env(env)
    return OK


def env_unset(guest: Guest, conn: Connection, names: List[str]) -> Dict[str, Any]:
    guest.session.unset_env(names)
    return OK


def session_get(guest: Guest, conn: Connection) -> Dict[str, Any]:
    return {"ok": True, **_session(guest), "withheld": guest.session.withheld()}


def _session(guest: Guest) -> Dict[str, Any]:
    return {**guest.session.get(), "numbers": guest.numbers.saved()}


def session_set(guest: Guest, conn: Connection, numbers: Optional[Dict[str, Any]], **parts: Any) -> Dict[str, Any]:
    if numbers is not None:
        guest.numbers.add(numbers)
    guest.session.set(**parts)
    return {"ok": True, "user": guest.session.person.name}


def secrets_get(guest: Guest, conn: Connection) -> Dict[str, Any]:
    return {"ok": True, "secrets": guest.session.secrets}


def secrets_set(guest: Guest, conn: Connection, secrets: Dict[str, str]) -> Dict[str, Any]:
    guest.session.secrets = secrets
    return OK


def user_default(guest: Guest, conn: Connection, user: Optional[Union[str, int]]) -> Dict[str, Any]:
    """Tell the session's user, or change it first."""
    session = guest.session
    if user is not None:
        person = session.choose(user)
        if not people.usable(person):
            raise Problem(UNSUPPORTED, "user {} can't be used in this sandbox".format(person.name))
        session.person = person
        session.set_env(person.environment())
    return {
        "ok": True,
        "user": session.person.name,
        "uid": session.person.uid,
        "gid": session.person.gid,
        "home": session.person.home,
    }


def ports(guest: Guest, conn: Connection) -> Dict[str, Any]:
    own = {guest.egress.port} if guest.egress is not None else set()
    return {"ok": True, "ports": sorted(set(proc.ports()) - own)}


def usage(guest: Guest, conn: Connection) -> Dict[str, Any]:
    return {"ok": True, **proc.usage()}


def reseed(
    guest: Guest, conn: Connection, seed: str, hostname: Optional[str], machine_id: Optional[str]
) -> Dict[str, Any]:
    """After a fork or restore: no two sandboxes draw the same numbers or carry the same name. Tells what could be done."""
    salt = os.fsencode(seed)
    done: Dict[str, Any] = {"ok": True}
    done["urandom"] = _try(lambda: _put("/dev/urandom", salt, os.O_WRONLY))
    if hostname is not None:
        done["hostname"] = _try(lambda: socket.sethostname(hostname)) if os.getpid() == 1 else False
        done["hostname_file"] = (
            _try(lambda: _put("/etc/hostname", os.fsencode(hostname) + b"\n")) if os.getpid() == 1 else False
        )
    if machine_id is not None:
        done["machine_id"] = (
            _try(lambda: _put("/etc/machine-id", os.fsencode(machine_id) + b"\n")) if os.getpid() == 1 else False
        )
    return done


def _try(call: Any) -> bool:
    try:
        call()
    except OSError:
        return False
    return True


def _put(path: str, data: bytes, flags: int = os.O_WRONLY | os.O_CREAT | os.O_TRUNC) -> None:
    fd = os.open(path, flags | os.O_CLOEXEC, 0o644)
    try:
        os.write(fd, data)
    finally:
        os.close(fd)


class Hold(Task):
    """While its client stays, every other request that could change something waits."""

    def __init__(self, guest: Guest, conn: Connection) -> None:
        self._guest = guest
        self._conn = conn
        conn.task = self
        guest.holders.add(self)
        conn.send_json(facts(guest))

    def gone(self) -> None:
        self._guest.release(self)


def facts(guest: Guest) -> Dict[str, Any]:
    """What a save point needs to know of this instant. Idle: nobody but the guest can hold a file open."""
    session = guest.session
    return {
        "session": _session(guest),
        "withheld": session.withheld(),
        "processes": guest.table.describe(),
        "idle": not proc.others() and not guest.file_tasks(),
        "shared_maps": proc.shared_maps(),
        "asides": sorted(guest.asides),
    }


def hold(guest: Guest, conn: Connection) -> None:
    Hold(guest, conn)


def sleep(guest: Guest, conn: Connection) -> None:
    """Answer, then close every connection, this one last, and forget the secrets, until the host says `wake`."""
    if not guest.can_sleep:
        raise Problem(UNSUPPORTED, "this runtime's memory can't be saved: nobody could wake the guest")
    conn.finish({"ok": True, **facts(guest)})
    guest.loop.later(0, lambda: guest.sleep(conn))


def shutdown(guest: Guest, conn: Connection) -> None:
    conn.finish(OK)
    guest.loop.later(0, guest.shutdown)
