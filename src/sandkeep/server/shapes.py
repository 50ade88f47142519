"""The JSON of the REST API: what requests may hold, and how the library's nouns are shown. Unknown fields are refused."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from sandkeep.errors import SandkeepError
from sandkeep.model import CommandResult, Limits
from sandkeep.server.services import NewSandbox
from sandkeep.sessions import Session

Texts = dict[str, str]
Level = Literal["memory", "relaunched", "files"]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid")


class LimitsBody(Body):
    memory: int | str | None = None
    cpus: float | None = None
    pids: int | None = 4096
    disk: int | str | None = None


class EgressBody(Body):
    """What may be reached: host names, `*.` and a name, addresses, networks. `0.0.0.0/0` is everything."""

    allow: list[str] = Field(default_factory=list, description="Wins over deny. Alone: only these.")
    deny: list[str] = Field(default_factory=list)


class CreateBody(Body):
    base: str = "host"
    runtime: Literal["auto", "runc", "crun", "runsc"] | None = None
    env: Texts = Field(default_factory=dict)
    secrets: Texts = Field(default_factory=dict)
    limits: LimitsBody = Field(default_factory=LimitsBody)
    network: Literal["none", "host"] = "none"
    cwd: str | None = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    project: str | None = None
    from_checkpoint: str | None = None
    require: Level = "files"
    auto_pause_timeout: float | None = Field(None, description="Seconds of idleness; 0 is never.")
    paused_expiry: float | None = Field(None, description="Seconds asleep until it is removed; 0 is never.")
    egress: EgressBody | None = Field(None, description="A way out, through a proxy. Without it there is none.")

    def new(self) -> NewSandbox:
        given = {name: getattr(self, name) for name in type(self).model_fields if name not in ("limits", "egress")}
        egress = None if self.egress is None else self.egress.model_dump()
        return NewSandbox(**given, limits=Limits(**self.limits.model_dump()), egress=egress)


class UpdateBody(Body):
    metadata: dict[str, Any] | None = None
    auto_pause_timeout: float | None = None
    paused_expiry: float | None = None


class ResumeBody(Body):
    secrets: Texts = Field(default_factory=dict)
    fail_over: bool = Field(
        default=False,
        description="Give up a host that is gone and go on from the last checkpoint; what came after it is lost.",
    )


class ForkBody(Body):
    count: int = Field(1, ge=1, le=1000)
    secrets: Texts | None = None
    memory: bool = False


class SnapshotBody(Body):
    comment: str = ""


class RestoreBody(Body):
    to: str
    keep: bool = False
    require: Level = "files"


class CheckpointBody(Body):
    comment: str | None = None
    tag: str | None = None
    metadata: dict[str, Any] | None = None
    scope: Literal["all", "workspace"] = "all"
    exclude: list[str] | None = None
    memory: bool = False


class CommandBody(Body):
    command: str
    background: bool = False
    cwd: str | None = None
    env: Texts | None = None
    user: str | None = None
    stdin: str | None = None
    timeout: float | None = Field(None, gt=0, le=1e8)
    max_output: int | None = Field(None, ge=0, description="Bytes of each stream in the answer; the rest is cut off.")
    tag: str | None = None


class SignalBody(Body):
    signal: int | str = 15


class MkdirBody(Body):
    path: str
    parents: bool = True
    mode: int = Field(0o755, ge=0, le=0o7777)


class MoveBody(Body):
    source: str
    target: str


class WorkflowBody(Body):
    variables: dict[str, Any]


def shown_session(session: Session) -> dict[str, Any]:
    """A sandbox from its row alone."""
    config = session.config
    return {
        "id": session.id, "state": session.state, "project": session.project, "metadata": session.metadata, "created": session.created,
        "last_activity": session.last_activity, "auto_pause_timeout": session.auto_pause_timeout,
        "paused_expiry": session.paused_expiry, "paused_at": session.paused_at, "checkpoint": session.checkpoint, "host": session.host,
        "base": config.get("base", "host"), "runtime": config.get("runtime", "auto"), "network": config.get("network", "none"),
        "egress": config.get("egress"), "limits": config.get("limits", {}), "forked_from": config.get("forked_from"), "last_error": session.last_error,
    }  # fmt: skip


def shown_result(result: CommandResult) -> dict[str, Any]:
    fields = ("stdout", "stderr", "exit_code", "duration_ms", "error_class", "truncated")
    return {name: getattr(result, name) for name in fields}


def shown(thing: Any) -> Any:
    """A noun, or a list of nouns and errors, as JSON."""
    if isinstance(thing, list):
        return [shown(one) for one in thing]
    if isinstance(thing, SandkeepError):
        return {"error": thing.as_dict()}
    if isinstance(thing, Session):
        return shown_session(thing)
    return dataclasses.asdict(thing)
