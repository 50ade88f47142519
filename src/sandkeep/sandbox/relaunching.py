"""Processes across a restore: what ran, what is started again, what is lost, and the report that says so."""

from __future__ import annotations

from typing import Any

from sandkeep.errors import SandkeepError
from sandkeep.model import RestoreReport
from sandkeep.sandbox.machine import Machine, wait_until

PORT_SECONDS = 30.0
_AGAIN = ("argv", "code", "session", "stdin", "user")
ONE_OFF = "websocket"  # the tag of executions over the WebSocket protocol


def running(machine: Machine) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = machine.link.call("list")["processes"]
    except SandkeepError:
        return []
    return alive(found)


def report(
    machine: Machine, recorded: list[dict[str, Any]], *, relaunch: bool, ended: list[str] | None = None
) -> RestoreReport:
    """Start the recorded background processes again if asked, and say what became of everything that ran."""
    ran = alive(recorded)
    again = [process for process in ran if _repeatable(process)] if relaunch else []
    started, lost = [], [process["code"] for process in ran if process not in again]
    for process in again:
        try:
            _start(machine, process)
            started.append(process["code"])
        except SandkeepError as error:
            lost.append(f"{process['code']}: {error.message}")
    why = "processes can't be carried over without a memory image" if ran else ""
    if ended:
        why = "; ".join(filter(None, [why, f"ended by the restore: {', '.join(ended)}"]))
    return RestoreReport("relaunched" if started else "files", started, lost, why)


def never_again(recorded: list[dict[str, Any]]) -> list[str]:
    """What ran and is never started again."""
    return [process["code"] for process in alive(recorded) if not _repeatable(process)]


def alive(processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those that were killed and had not died yet."""
    return [process for process in processes if process["exit_code"] is None and not process.get("doomed")]


def _repeatable(process: dict[str, Any]) -> bool:
    """A service may be started again; a terminal's or a one-off execution's work must not be done twice."""
    return bool(process["background"]) and not process["pty"] and process["tag"] != ONE_OFF


def _start(machine: Machine, process: dict[str, Any]) -> None:
    known = process.get("again", {"code": process["code"]})
    again = {name: known[name] for name in _AGAIN if name in known}
    machine.link.call(
        "relaunch", number=process["pid"], cwd=process["cwd"], env=process["env"], tag=process["tag"], **again
    )
    wanted = set(process["ports"])
    if wanted and not wait_until(lambda: wanted <= set(machine.link.call("ports")["ports"]), PORT_SECONDS, 0.05):
        raise SandkeepError(f"started again, but does not listen on {sorted(wanted)}")
