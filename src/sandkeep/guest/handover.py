"""A call in the hands of the shell that waited for it. Until its command begins, the death of that shell is not the call's: a
fresh one begins it anew, once. Input is kept back meanwhile, so that none of it dies with the shell.
"""

from __future__ import annotations

from .problems import Problem
from .spawn import BLOB

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Tuple

    from .processes import Process
    from .starting import Plan, Script

_SOON, _LATER = 0.0005, 0.02


def begin(plan: Plan, text: bytes, stdin: bool, background: bool, keep: bool) -> Tuple[Process, Script]:
    """A shell with this script as a process. Its script stays open only if it is to be kept."""
    started, script = plan.guest.spare.shell(plan, text, stdin)
    process = started.process(plan, background)
    process.inherits(script.fds[BLOB])
    if started.waited:
        Handover(plan, process, script, stdin, keep)
    elif not keep:
        script.close()
    return process, script


class Handover:
    def __init__(self, plan: Plan, process: Process, script: Script, stdin: bool, keep: bool) -> None:
        self._plan = plan
        self._process = process
        self._script = script
        self._stdin = stdin
        self._keep = keep
        self._over = False
        process.again = self._again
        process.on_settled.append(lambda _: self._end())
        if process.input is not None:
            process.input.hold()
        if process.input is not None or not keep:
            self._look(_SOON)

    def _look(self, again: float) -> None:
        if self._over:
            return
        if self._script.begun:
            self._end()
        else:
            self._plan.guest.loop.later(again, lambda: self._look(min(again * 2, _LATER)))

    def _again(self) -> bool:
        """True if a fresh shell is at it now. Only a shell that is dead may be asked about."""
        process, script = self._process, self._script
        for output in process.outputs.values():
            output.drain()
        told = any(output.ring.end for output in process.outputs.values())
        if told or script.begun or self._plan.guest.still:
            return False
        try:
            script.again()
            started = self._plan.on_pipes(script.fds, self._stdin)
            script.inherited()
        except (Problem, OSError):
            return False
        process.replace(started.pid, started.run, started.ours)
        self._end()
        return True

    def _end(self) -> None:
        if self._over:
            return
        self._over = True
        self._process.again = None
        if self._process.input is not None:
            self._process.input.release()
        if not self._keep:
            self._script.close()
