"""What an agent's checkpoint says about the run that made it, and whether an agent may go on from it. Reads records only."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sandkeep.agents import events
from sandkeep.agents.spec import AgentSpec
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import AgentMismatch, FileMissing
from sandkeep.model import WORKSPACE, CheckpointInfo

PROMPT_SHOWN = 500


def metadata(spec: AgentSpec, mode: str, model: str | None, **run: Any) -> dict[str, Any]:
    facts = {"type": spec.name, "package": f"{spec.package}@{spec.version}" if spec.package else "", "model": model}
    return {"agent": {**facts, "workspace_mode": mode, "workspace": WORKSPACE, **run}}


def of(info: CheckpointInfo) -> dict[str, Any] | None:
    found = info.metadata.get("agent")
    return found if isinstance(found, dict) and isinstance(found.get("type"), str) else None


def nearest(store: Store, checkpoint: str) -> dict[str, Any] | None:
    """The facts of the checkpoint, or of its nearest ancestor that an agent made: a pause adds none of its own."""
    for ancestor in store.lineage(checkpoint):
        if ancestor.state == "kept" and (found := of(store.get(ancestor.id))) is not None:
            return found
    return None


def check(store: Store, checkpoint: str, spec: AgentSpec, mode: str) -> CheckpointInfo:
    """The checkpoint to go on from, if it is of this agent and workspace mode. Nothing of its contents is fetched."""
    info = store.get(checkpoint)
    found = nearest(store, info.id)
    if found is None:
        if spec.script:
            return info
        raise AgentMismatch(f"checkpoint {info.id} was not made by an agent", "go on from it with Agent('shell')")
    if found["type"] != spec.name:
        raise AgentMismatch(
            f"checkpoint {info.id} is of agent {found['type']!r}, this is {spec.name!r}",
            f"use Agent({found['type']!r})",
        )
    if found.get("workspace_mode") != mode:
        kept = found.get("workspace_mode")
        raise AgentMismatch(
            f"checkpoint {info.id} has workspace mode {kept!r}, this agent {mode!r}", f"use workspace_mode={kept!r}"
        )
    return info


@dataclass(frozen=True)
class Step:
    """A checkpoint in a lineage: who did what."""

    checkpoint: CheckpointInfo
    agent: dict[str, Any] | None
    events: list[events.Event]


def log(store: Store, checkpoint: str = "latest") -> list[Step]:
    """The lineage of a checkpoint, the oldest first, with the events of each run."""
    return list(reversed(list(_steps(store, checkpoint))))


def _steps(store: Store, checkpoint: str) -> Iterator[Step]:
    for ancestor in store.lineage(checkpoint):
        if ancestor.state != "kept":
            continue
        info = store.get(ancestor.id)
        found = of(info)
        run_id = found.get("run_id") if found else None
        yield Step(info, found, _events(store, info.id, run_id) if isinstance(run_id, str) else [])


def _events(store: Store, checkpoint: str, run_id: str) -> list[events.Event]:
    if "/" in run_id:
        return []
    try:
        return events.unpack(store.read(checkpoint, events.path_of(run_id)))
    except FileMissing:
        return []
