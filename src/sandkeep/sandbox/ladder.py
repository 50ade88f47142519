"""The ladder of a restore: memory, relaunched, files. Says where it stopped and why; never less than was asked in silence."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sandkeep.errors import BadArgument, FloorNotReached
from sandkeep.model import RestoreReport
from sandkeep.sandbox import relaunching
from sandkeep.sandbox.machine import Machine
from sandkeep.sandbox.saved import Saved

LEVELS = ("files", "relaunched", "memory")


def check_level(require: str) -> None:
    if require not in LEVELS:
        raise BadArgument(f"require must be one of {', '.join(LEVELS)}, not {require!r}")


def check(saved: Saved, require: str) -> None:
    """Refuse what can't be reached, before anything has changed."""
    check_level(require)
    if require == "memory" and saved.image is None:
        raise FloorNotReached(
            "the checkpoint holds no memory image", "take it with memory=True on runtime runsc, or require less"
        )
    if saved.image is None:
        check_processes(saved.processes, require)


def check_snapshot(processes: list[dict[str, Any]], require: str) -> None:
    check_level(require)
    if require == "memory":
        raise FloorNotReached("a snapshot holds no memory", "take a checkpoint with memory=True on runtime runsc")
    check_processes(processes, require)


def check_processes(recorded: list[dict[str, Any]], require: str) -> None:
    if require == "relaunched" and (never := relaunching.never_again(recorded)):
        raise FloorNotReached(
            f"not to be started again: {', '.join(never)}", "require='files' restores without what ran in a terminal"
        )


def ended(commands: list[str]) -> str:
    return f"ended by the restore: {', '.join(commands)}" if commands else ""


def report(
    machine: Machine, saved: Saved, *, relaunch: bool, ended: list[str] | None = None, notes: list[str] | None = None
) -> RestoreReport:
    found = relaunching.report(machine, saved.processes, relaunch=relaunch, ended=ended)
    return replace(found, why="; ".join(filter(None, [found.why, *(notes or [])])))


def enforce(found: RestoreReport, require: str) -> None:
    """`relaunched` holds when every process that ran is running again, also when none ran."""
    if require == "relaunched" and found.lost:
        raise FloorNotReached(f"not started again: {', '.join(found.lost)}", "require='files' restores without them")
