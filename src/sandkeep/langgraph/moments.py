"""Which snapshot a checkpoint gets: the one of the moment between two steps, whatever `durability` a graph runs with.

LangGraph saves in the background, while the next step may run already; a snapshot taken then would be of another moment.
What it calls between the steps, with nothing running, is `get_next_version`, and at the start of a run that goes back in
time `get_tuple`. There a moment is taken and left in the context, which LangGraph copies for the `put` that follows.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import deque
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import Checkpoint

from sandkeep.errors import BadArgument, SandkeepError
from sandkeep.langgraph.rows import Place

# LangGraph's own keys in the config of a run
DURABILITY_KEY = "__pregel_durability"
RUNTIME_KEY = "__pregel_runtime"


class Sandbox(Protocol):
    """What the saver needs of a sandbox."""

    def snapshot(self, comment: str) -> Any: ...

    def restore(self, id: str) -> Any: ...

    def delete_snapshot(self, id: str) -> Any: ...


class Moment:
    """A snapshot for one checkpoint: of a step that ended with `version`, or of a run that begins anew at `start`."""

    def __init__(
        self,
        sandbox: Sandbox,
        id: str,
        unused: deque[Unused],
        *,
        version: int | None = None,
        start: Place | None = None,
    ) -> None:
        self.sandbox, self._id, self._version, self._start = sandbox, id, version, start
        self._unclaimed = weakref.finalize(self, unused.append, Unused(sandbox, id))
        self._unclaimed.atexit = False

    def claim(self, sandbox: Sandbox, here: Place, checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> str | None:
        """Its snapshot, once, and only for the checkpoint that it was taken for."""
        if self._start is not None:
            fits = here == self._start and metadata.get("source") == "fork"
        else:
            fits = self._version in checkpoint["channel_versions"].values()
        return self._id if fits and sandbox is self.sandbox and self._unclaimed.detach() else None


@dataclass(frozen=True)
class Unused:
    sandbox: Sandbox
    id: str


_moment: ContextVar[Moment | None] = ContextVar("sandkeep_moment", default=None)


@dataclass
class Moments:
    """Shared by a saver and the copies that LangGraph makes of it."""

    unused: deque[Unused] = field(default_factory=deque)

    def step(self, sandbox: Sandbox, version: int) -> None:
        _moment.set(Moment(sandbox, sandbox.snapshot("langgraph, between two steps").id, self.unused, version=version))

    def begin(self, sandbox: Sandbox, here: Place) -> None:
        id = sandbox.snapshot(f"langgraph {here.thread}, where a run goes on").id
        _moment.set(Moment(sandbox, id, self.unused, start=here))

    def claim(self, sandbox: Sandbox, here: Place, checkpoint: Checkpoint, metadata: Mapping[str, Any]) -> str:
        """The snapshot for this checkpoint; taken now if its caller waits for it."""
        moment = _moment.get()
        id = moment.claim(sandbox, here, checkpoint, metadata) if moment else None
        comment = f"langgraph {here.thread} step {metadata.get('step', '?')}"
        return id or str(sandbox.snapshot(comment).id)

    def give_back(self, sandbox: Sandbox, id: str) -> None:
        self.unused.append(Unused(sandbox, id))

    def sweep(self) -> None:
        """Delete the snapshots that no checkpoint took: of interrupts, drawings, failed saves."""
        while True:
            try:
                each = self.unused.popleft()
            except IndexError:
                return
            with contextlib.suppress(SandkeepError):
                each.sandbox.delete_snapshot(each.id)


def runs(config: RunnableConfig) -> bool:
    """Whether this config is of a run, not of one who looks. A run that saves at its end only is refused, before it begins."""
    configurable = config.get("configurable") or {}
    if configurable.get(DURABILITY_KEY) == "exit":
        raise BadArgument(
            "a graph bound to a sandbox can't run with durability='exit': its steps would have no snapshots of their own",
            "leave durability out, or pass 'sync' or 'async'",
        )
    return RUNTIME_KEY in configurable


def forget() -> None:
    _moment.set(None)
