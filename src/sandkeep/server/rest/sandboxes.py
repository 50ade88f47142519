"""/sandboxes: life, save points, and the session's env, history and workflow state."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from sandkeep.sandbox._async.bridge import blocking
from sandkeep.sandbox.lifecycle import check_variables
from sandkeep.server import relay
from sandkeep.server.auth import Caller, Use
from sandkeep.server.services import Services
from sandkeep.server.shapes import (
    CheckpointBody,
    CreateBody,
    EgressBody,
    ForkBody,
    RestoreBody,
    ResumeBody,
    SnapshotBody,
    Texts,
    UpdateBody,
    WorkflowBody,
    shown,
)
from sandkeep.sessions import Session, SessionState

router = APIRouter(prefix="/sandboxes", tags=["sandboxes"])


@router.post("", status_code=201)
async def create(caller: Caller, services: Use, body: CreateBody) -> dict[str, Any]:
    return with_report(services, await services.create(caller, body.new()))


def with_report(services: Services, session: Session) -> dict[str, Any]:
    """A sandbox, and how much came back when it last woke or was made from a checkpoint."""
    report = services.hands.reports.get(session.id)
    return {**shown(session), "restore_report": shown(report) if report else None}


@router.get("")
async def list_(
    caller: Caller,
    services: Use,
    project: str | None = None,
    state: Annotated[list[SessionState] | None, Query()] = None,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """Newest first; `cursor` goes on where the last page ended."""
    states = frozenset(state) if state else None
    page = await services.find(caller, project=project, states=states, cursor=cursor, limit=limit)
    return {"sandboxes": shown(page.sessions), "cursor": page.cursor}


@router.get("/{id}")
async def get(caller: Caller, services: Use, id: str, request: Request) -> Any:
    """What is known of it; a paused one is not woken."""
    session = await services.get(caller, id)
    if (answer := await relay.http(request, session)) is not None:
        return answer
    info = await services.info(session)
    live = {} if info is None else {name: getattr(info, name) for name in ("runtime", "layers", "cwd", "env", "notes")}
    return {**with_report(services, session), **live}


@router.patch("/{id}")
async def update(caller: Caller, services: Use, id: str, body: UpdateBody) -> dict[str, Any]:
    return dict(shown(await services.update(caller, id, **body.model_dump())))


@router.delete("/{id}", status_code=204)
async def kill(caller: Caller, services: Use, id: str) -> Response:
    await services.kill(caller, id)
    return Response(status_code=204)


@router.put("/{id}/egress")
async def set_egress(caller: Caller, services: Use, id: str, body: EgressBody) -> dict[str, Any]:
    """All rules become these, for every connection from now on; open ones that they refuse are cut."""
    return dict(shown(await services.set_egress(caller, id, body.model_dump())))


@router.delete("/{id}/egress")
async def end_egress(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    """No way out."""
    return dict(shown(await services.set_egress(caller, id, None)))


@router.post("/{id}/pause")
async def pause(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    """With its memory where its runtime can; `notes` say what was not kept."""
    session = await services.pause(caller, id)
    return {**shown(session), "notes": services.hands.notes.get(id, [])}


@router.post("/{id}/resume")
async def resume(caller: Caller, services: Use, id: str, request: Request, body: ResumeBody | None = None) -> Any:
    body = body or ResumeBody()
    session = await services.resume(caller, id, body.secrets, fail_over=body.fail_over)
    return await relay.http(request, session) or with_report(services, session)


@router.post("/{id}/activity")
async def activity(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    return dict(shown(await services.touch(caller, id)))


@router.post("/{id}/fork", status_code=201)
async def fork(caller: Caller, services: Use, id: str, body: ForkBody | None = None) -> dict[str, Any]:
    """One entry each: the new sandbox, or `error`."""
    body = body or ForkBody(count=1)
    made = await services.fork(caller, id, body.count, secrets=body.secrets, memory=body.memory)
    return {"sandboxes": shown(made)}


@router.post("/{id}/snapshot", status_code=201)
async def snapshot(caller: Caller, services: Use, id: str, body: SnapshotBody | None = None) -> dict[str, Any]:
    return dict(shown(await services.snapshot(caller, id, body.comment if body else "")))


@router.get("/{id}/snapshots")
async def snapshots(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    return {"snapshots": shown(await services.snapshots(caller, id))}


@router.delete("/{id}/snapshots/{snapshot}", status_code=204)
async def delete_snapshot(caller: Caller, services: Use, id: str, snapshot: str) -> Response:
    await services.delete_snapshot(caller, id, snapshot)
    return Response(status_code=204)


@router.post("/{id}/restore")
async def restore(caller: Caller, services: Use, id: str, body: RestoreBody) -> dict[str, Any]:
    return dict(shown(await services.restore(caller, id, body.to, keep=body.keep, require=body.require)))


@router.post("/{id}/checkpoints", status_code=201)
async def checkpoint(caller: Caller, services: Use, id: str, body: CheckpointBody | None = None) -> dict[str, Any]:
    return dict(shown(await services.checkpoint(caller, id, **(body or CheckpointBody()).model_dump())))


@router.get("/{id}/env")
async def env(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return {"env": await sandbox.env.all(), "cwd": await sandbox.cwd}


@router.put("/{id}/env", status_code=204)
async def set_env(caller: Caller, services: Use, id: str, body: Texts) -> Response:
    """Set these variables; the others stay."""
    async with services.use(caller, id) as sandbox:
        await sandbox._link.call("env_set", env=check_variables("env", body))
    return Response(status_code=204)


@router.delete("/{id}/env/{name}", status_code=204)
async def unset_env(caller: Caller, services: Use, id: str, name: str) -> Response:
    async with services.use(caller, id) as sandbox:
        await sandbox.env.unset(name)
    return Response(status_code=204)


@router.get("/{id}/history")
async def history(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return {"history": shown(await sandbox.history.list())}


@router.delete("/{id}/history", status_code=204)
async def clear_history(caller: Caller, services: Use, id: str) -> Response:
    async with services.use(caller, id) as sandbox:
        await sandbox.history.clear()
    return Response(status_code=204)


@router.get("/{id}/workflow")
async def workflow(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return {"variables": await blocking(sandbox.workflow.export)}


@router.put("/{id}/workflow", status_code=204)
async def set_workflow(caller: Caller, services: Use, id: str, body: WorkflowBody) -> Response:
    """All variables become these."""
    async with services.use(caller, id) as sandbox:
        await blocking(sandbox.workflow.replace, body.variables)
    return Response(status_code=204)


@router.patch("/{id}/workflow", status_code=204)
async def change_workflow(caller: Caller, services: Use, id: str, body: WorkflowBody) -> Response:
    """Set these variables; the others stay."""
    async with services.use(caller, id) as sandbox:
        await blocking(sandbox.workflow.update, body.variables)
    return Response(status_code=204)


@router.delete("/{id}/workflow/{key}")
async def delete_variable(caller: Caller, services: Use, id: str, key: str) -> dict[str, bool]:
    async with services.use(caller, id) as sandbox:
        return {"deleted": await blocking(sandbox.workflow.delete_state, key)}


@router.get("/{id}/ports")
async def ports(caller: Caller, services: Use, id: str) -> dict[str, list[int]]:
    async with services.use(caller, id) as sandbox:
        return {"ports": await sandbox.ports()}


@router.get("/{id}/usage")
async def usage(caller: Caller, services: Use, id: str) -> dict[str, Any]:
    async with services.use(caller, id) as sandbox:
        return await sandbox.usage()


@router.get("/{id}/events")
async def events(
    caller: Caller,
    services: Use,
    id: str,
    after: Annotated[int, Query(ge=0)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> dict[str, Any]:
    """What happened to it beside its owner's calls: warnings, failures, take-overs."""
    await services.get(caller, id)
    return {"events": shown(await services.db.call(services.log.events, id, after=after, limit=limit))}
