"""What a run gives back, and what an agent says about itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from sandkeep.agents.events import Event
from sandkeep.model import CheckpointInfo

RunStatus = Literal["completed", "failed", "interrupted", "timed_out", "running"]


@dataclass(frozen=True)
class AgentResponse:
    run_id: str
    sandbox_id: str
    session_id: str  # the tag of the checkpoints of this agent object
    status: RunStatus
    exit_code: int | None  # None while it runs in the background
    stdout: str = ""
    stderr: str = ""
    events: list[Event] = field(default_factory=list)
    checkpoint: CheckpointInfo | None = None
    checkpoint_error: str | None = None
    output: Any = None  # structured output, where a schema was given
    output_error: str | None = None  # why there is none
    duration_ms: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The last thing that the agent said, put together where it came in pieces."""
        said: list[str] = []
        for event in reversed(self.events):
            if event.kind == "message" and event.role == "assistant":
                said.append(event.text)
                if event.data != {"delta": True}:
                    break
            elif said:
                break
        return "".join(reversed(said))


@dataclass(frozen=True)
class AgentStatus:
    state: Literal["none", "idle", "busy", "running", "paused", "dead"]  # running: a run in the background
    operation: str | None  # what this object is doing
    sandbox_id: str | None
    session_id: str
    run_id: str | None
    checkpoint: str | None  # the one that the next descends from


@dataclass(frozen=True)
class Best:
    """The winner of `best_of`, and how all did."""

    response: AgentResponse
    score: float
    scores: list[float]
    responses: list[AgentResponse]
