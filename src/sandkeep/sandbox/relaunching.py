"""Processes across a restore: what ran, what is started again, what is lost, and the report that says so."""

from __future__ import annotations

from typing import Any

from sandkeep.errors import SandkeepError
from sandkeep.model import RestoreReport
from sandkeep.sandbox.machine import Machine, wait_until

PORT_SECONDS = 30.0
ONE_OFF = "websocket"  # the tag of executions over the WebSocket protocol


def running(machine: Machine) -> list[dict[str, Any]]:
    try:
        found: list[dict[str, Any]] = machine.link.call("list")["processes"]
    except SandkeepError:
        return []
    return [process for process in found if process["exit_code"] is None]


def report(
    machine: Machine, recorded: list[dict[str, Any]], *, relaunch: bool, ended: list[str] | None = None
) -> RestoreReport:
    """Start the recorded background processes again if asked, and say what became of everything that ran."""
    alive = [process for process in recorded if process["exit_code"] is None]
    again = [process for process in alive if _repeatable(process)] if relaunch else []
    started, lost = [], [process["code"] for process in alive if process not in again]
    for process in again:
        try:
            _start(machine, process)
            started.append(process["code"])
        except SandkeepError as error:
            lost.append(f"{process['code']}: {error.message}")
    why = "processes can't be carried over without a memory image" if alive else ""
    if ended:
        why = "; ".join(filter(None, [why, f"ended by the restore: {', '.join(ended)}"]))
    return RestoreReport("relaunched" if started else "files", started, lost, why)


def never_again(recorded: list[dict[str, Any]]) -> list[str]:
    """What ran and is never started again."""
    return [process["code"] for process in recorded if process["exit_code"] is None and not _repeatable(process)]


def _repeatable(process: dict[str, Any]) -> bool:
    """A service may be started again; a terminal's or a one-off execution's work must not be done twice."""
    return bool(process["background"]) and not process["pty"] and process["tag"] != ONE_OFF


def _start(machine: Machine, process: dict[str, Any]) -> None:
    machine.link.call(
        "run",
        code=process["code"],
        cwd=process["cwd"],
        env=process["env"],
        background=True,
        record=False,
        tag=process["tag"],
    )
    wanted = set(process["ports"])
    if wanted and not wait_until(lambda: wanted <= set(machine.link.call("ports")["ports"]), PORT_SECONDS, 0.05):
        raise SandkeepError(f"started again, but does not listen on {sorted(wanted)}")
