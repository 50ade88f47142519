"""E2B's control plane, both generations of its paths: create, list, info, kill, time-outs, pause, connect, fork, snapshots."""

from __future__ import annotations

import ipaddress
import os
from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit

from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field

from sandkeep.errors import BadArgument, SandkeepError, StateConflict, Unsupported
from sandkeep.model import Limits
from sandkeep.server.auth import Caller
from sandkeep.server.e2b import templates
from sandkeep.server.e2b.errors import plain_error
from sandkeep.server.e2b.forms import stamp
from sandkeep.server.e2b.life import Gone, Life
from sandkeep.server.e2b.metering import Meter, cpus_of, memory_of
from sandkeep.server.e2b.routes import E2BRoute
from sandkeep.server.e2b.rows import Row
from sandkeep.server.egress import ALL, Rules
from sandkeep.server.passing import HOP
from sandkeep.server.services import NewSandbox
from sandkeep.sessions import Scope, Session, SessionState
from sandkeep.sessions.records import make_cursor, read_cursor

ENVD_VERSION = "0.6.13"
CLIENT = "sandkeep"
_S = SessionState
RUNNING = frozenset({_S.RUNNING, _S.PAUSING, _S.RESUMING})
Seconds = Annotated[int, Field(ge=0, le=10**8)]

router = APIRouter(route_class=E2BRoute, include_in_schema=False)


class Body(BaseModel):
    """Fields that we do not know are E2B's business: they are passed over, as its own server does."""

    model_config = ConfigDict(extra="ignore")


class AutoResume(Body):
    enabled: bool = False


class CreateBody(Body):
    templateID: str = "base"
    timeout: Seconds | None = None
    metadata: dict[str, str] | None = None
    envVars: dict[str, str] | None = None
    secure: bool = True
    autoPause: bool = False
    autoPauseMemory: bool | None = None
    autoResume: AutoResume | None = None
    allow_internet_access: bool | None = None
    network: dict[str, Any] | None = None
    mcp: dict[str, Any] | None = None
    volumeMounts: list[Any] | None = None


class TimeoutBody(Body):
    timeout: Seconds


class ConnectBody(Body):
    timeout: Seconds = 300
    memory: bool | None = None


class PauseBody(Body):
    memory: bool | None = None


class ForkBody(Body):
    timeout: Seconds = 15
    count: int = Field(1, ge=1, le=100)


class SnapshotBody(Body):
    name: str | None = None
    memory: bool | None = None


def life_of(request: Request) -> Life:
    life: Life = request.app.state.e2b
    return life


@router.post("/sandboxes")
async def create_v1(caller: Caller, request: Request, body: CreateBody) -> Response:
    return await create(caller, request, body, 15)


@router.post("/v2/sandboxes")
async def create_v2(caller: Caller, request: Request, body: CreateBody) -> Response:
    return await create(caller, request, body.model_copy(update={"secure": True}), 300)


async def create(caller: Scope, request: Request, body: CreateBody, timeout: int) -> Response:
    life = life_of(request)
    policy = policy_of(body)
    if body.volumeMounts:
        raise BadArgument("there are no volumes here", "keep files in the sandbox: they last, also while it sleeps")
    begin = await templates.source(life.services, caller, body.templateID)
    egress = network_rules(body.allow_internet_access, body.network or {}) if life.services.settings.egress else None
    new = NewSandbox(
        env=body.envVars or {}, metadata=body.metadata or {}, limits=Limits(), egress=egress, memory=True, **begin
    )
    seconds = timeout if body.timeout is None else body.timeout
    key = request.headers.get("idempotency-key")
    session, row = await life.create(caller, new, seconds, policy, key)
    return JSONResponse(opened(request, session, row), 201)


def policy_of(body: CreateBody) -> dict[str, Any]:
    resume, memory = bool(body.autoResume and body.autoResume.enabled), body.autoPauseMemory is not False
    if resume and not (body.autoPause and memory):
        raise BadArgument("auto-resume needs auto-pause with memory", "set autoPause, and leave autoPauseMemory out")
    network = body.network or {}
    if not network.get("allowPublicTraffic", True) and not body.secure:
        raise BadArgument("private ports need a secured sandbox", "leave secure out")
    return {
        "template": body.templateID, "on_timeout": "pause" if body.autoPause else "kill", "keep_memory": memory,
        "auto_resume": resume, "secure": body.secure, "network": network,
    }  # fmt: skip


def network_rules(internet: bool | None, network: dict[str, Any]) -> dict[str, Any] | None:
    """E2B's words for what may be reached. Without internet access it is what is allowed, and without that nothing."""
    if network.get("egressProxy") or any(map(any, (network.get("rules") or {}).values())):
        raise BadArgument("there are no egress proxies and no header rules here", "leave egressProxy and rules out")
    allow, deny = network.get("allowOut") or [], network.get("denyOut") or []
    if internet is False:
        deny = [*deny, ALL]
    rules = Rules.of({"allow": allow, "deny": deny}).as_dict()
    return None if internet is False and not allow else rules


@router.get("/v2/sandboxes")
@router.get("/sandboxes")
async def list_(
    caller: Caller,
    request: Request,
    metadata: str | None = None,
    state: Annotated[list[str] | None, Query()] = None,
    order: Literal["asc", "desc"] = "desc",
    startedAfter: datetime | None = None,
    template: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    nextToken: str | None = None,
) -> Response:
    life = life_of(request)
    labels = {unquote(k): unquote(v) for k, v in parse_qsl(metadata or "", keep_blank_values=True)}
    states = states_of(state)
    after = None if startedAfter is None else startedAfter.astimezone(UTC)
    wanted = None if template is None else templates.plain_name(template)

    def fits(session: Session, row: Row) -> bool:
        return (
            all(session.metadata.get(name) == value for name, value in labels.items())
            and (wanted is None or templates.plain_name(row.policy["template"]) == wanted)
            and (after is None or datetime.fromtimestamp(session.created, UTC) >= after)
        )

    found: list[tuple[Session, Row]] = []
    cursor = nextToken if order == "desc" else None
    while True:
        page = await life.services.find(caller, states=states, cursor=cursor, limit=500)
        rows = await life.call(life.rows.many, [one.id for one in page.sessions])
        found += [(one, rows[one.id]) for one in page.sessions if one.id in rows and fits(one, rows[one.id])]
        cursor = page.cursor
        if cursor is None or (order == "desc" and len(found) > limit):
            break
    if order == "asc":
        found.reverse()
        if nextToken is not None:
            last = read_cursor(nextToken)
            found = [pair for pair in found if (pair[0].created, pair[0].id) > last]
    headers = {"X-Next-Token": make_cursor(found[limit - 1][0])} if len(found) > limit else {}
    return JSONResponse([shown(request, *pair) for pair in found[:limit]], headers=headers)


def states_of(wanted: list[str] | None) -> frozenset[SessionState]:
    words = {word for one in wanted or ["running,paused"] for word in one.split(",") if word}
    if unknown := words - {"running", "paused"}:
        raise BadArgument(f"there is no state {', '.join(sorted(unknown))}", "running or paused")
    return (RUNNING if "running" in words else frozenset()) | (
        frozenset({_S.PAUSED}) if "paused" in words else frozenset()
    )


@router.get("/sandboxes/{id}")
async def info(caller: Caller, request: Request, id: str) -> dict[str, Any]:
    session, row = await life_of(request).find(caller, id)
    policy = row.policy
    told = {
        **shown(request, session, row), "domain": domain_of(request), "network": policy["network"],
        "allowInternetAccess": ALL not in (session.config.get("egress") or {"deny": [ALL]})["deny"],
        "lifecycle": {"autoResume": policy["auto_resume"], "onTimeout": policy["on_timeout"]},
    }  # fmt: skip
    if policy["secure"]:
        told["envdAccessToken"] = row.token
    if session.state is _S.PAUSED:
        told["pauseMode"] = "full" if policy.get("paused_with_memory", True) else "filesystem"
    return told


@router.delete("/sandboxes/{id}")
async def kill(caller: Caller, request: Request, id: str) -> Response:
    await life_of(request).kill(caller, id)
    return Response(status_code=204)


@router.post("/sandboxes/{id}/timeout")
async def timeout(caller: Caller, request: Request, id: str, body: TimeoutBody) -> Response:
    await life_of(request).set_timeout(caller, id, body.timeout)
    return Response(status_code=204)


@router.post("/sandboxes/{id}/pause")
async def pause(caller: Caller, request: Request, id: str, body: PauseBody | None = None) -> Response:
    await life_of(request).pause(caller, id, memory=body is None or body.memory is not False)
    return Response(status_code=204)


@router.post("/sandboxes/{id}/resume")
@router.post("/sandboxes/{id}/connect")
@router.post("/v2/sandboxes/{id}/connect")
async def connect(caller: Caller, request: Request, id: str, body: ConnectBody | None = None) -> Response:
    body = body or ConnectBody()
    session, row, woken = await life_of(request).connect(caller, id, body.timeout, memory=body.memory is not False)
    return JSONResponse(opened(request, session, row), 201 if woken else 200)


@router.post("/sandboxes/{id}/fork")
async def fork(caller: Caller, request: Request, id: str, body: ForkBody | None = None) -> Response:
    body = body or ForkBody(count=1)
    made = await life_of(request).fork(caller, id, body.count, body.timeout)
    return JSONResponse([_forked(request, one) for one in made], 201)


def _forked(request: Request, one: tuple[Session, Row] | SandkeepError) -> dict[str, Any]:
    if isinstance(one, SandkeepError):
        return {"error": {"code": plain_error(one).status_code, "message": str(one)}}
    return {"sandbox": opened(request, *one)}


@router.post("/sandboxes/{id}/snapshots")
async def snapshot(caller: Caller, request: Request, id: str, body: SnapshotBody | None = None) -> Response:
    life, body = life_of(request), body or SnapshotBody()
    session, _ = await life.find(caller, id)
    try:
        await life.running(id)
    except Gone:
        raise StateConflict(f"sandbox {id} is paused", "connect to it first") from None
    memory = body.memory is not False and await life.has_memory(session)
    taken, name = await templates.take(life.services, caller, id, body.name, memory=memory)
    return JSONResponse(templates.shown(taken, name), 201)


@router.get("/snapshots")
async def snapshots(
    caller: Caller,
    request: Request,
    sandboxID: str | None = None,
    name: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    nextToken: str | None = None,
) -> Response:
    found = await templates.listing(life_of(request).services, caller, sandboxID, name)
    if nextToken is not None:
        ids = [one["snapshotID"] for one in found]
        if nextToken not in ids:
            raise BadArgument("this token is not one of ours", "start again without a token")
        found = found[ids.index(nextToken) + 1 :]
    headers = {"X-Next-Token": found[limit - 1]["snapshotID"]} if len(found) > limit else {}
    return JSONResponse(found[:limit], headers=headers)


@router.delete("/templates/{template:path}")
async def delete_snapshot(caller: Caller, request: Request, template: str) -> Response:
    await templates.delete(life_of(request).services, caller, template)
    return Response(status_code=204)


@router.get("/templates/aliases/{template:path}")
async def template_exists(caller: Caller, request: Request, template: str) -> dict[str, Any]:
    await templates.source(life_of(request).services, caller, template)
    return {"templateID": templates.plain_name(template), "public": False}


@router.api_route("/v3/templates", methods=["POST"])
@router.api_route("/volumes", methods=["GET", "POST"])
@router.api_route("/secrets", methods=["GET", "POST"])
async def not_here(_: Caller, request: Request) -> Response:
    what = request.url.path.rpartition("/")[2]
    raise Unsupported(
        f"this server keeps no {what} of E2B's", "start from a base of the server, a checkpoint or a snapshot"
    )


@router.get("/sandboxes/{id}/metrics")
async def metrics(
    caller: Caller, request: Request, id: str, start: float | None = None, end: float | None = None
) -> list[dict[str, Any]]:
    session, _ = await life_of(request).find(caller, id)
    if session.state is _S.RUNNING:
        session = await life_of(request).here(session)
    meter: Meter = request.app.state.e2b_meter
    return await meter.read(session, start, end)


@router.put("/sandboxes/{id}/network")
async def network(caller: Caller, request: Request, id: str, body: dict[str, Any]) -> Response:
    life = life_of(request)
    session, row = await life.find(caller, id)
    if life.services.settings.egress and session.config.get("network", "none") == "none":
        await life.services.set_egress(caller, id, network_rules(body.get("allow_internet_access"), body))
    kept = {name: row.policy["network"][name] for name in ("allowPublicTraffic",) if name in row.policy["network"]}
    await life.call(life.rows.set_policy, id, {**row.policy, "network": {**body, **kept}})
    return Response(status_code=204)


def domain_of(request: Request) -> str:
    """What `get_host` puts behind `{port}-{id}.`: how the client reached us, if that is a name."""
    host = urlsplit(f"//{request.headers.get(HOP) or request.headers.get('host', '')}")
    name = (host.hostname or "localhost").removeprefix("api.")
    try:
        ipaddress.ip_address(name)
        name = "localhost"
    except ValueError:
        pass
    return f"{name}:{host.port}" if host.port else name


def opened(request: Request, session: Session, row: Row) -> dict[str, Any]:
    """A sandbox as its maker gets it, with what opens it."""
    told = {
        "templateID": row.policy["template"], "sandboxID": session.id, "clientID": CLIENT, "envdVersion": ENVD_VERSION,
        "alias": row.policy["template"], "domain": domain_of(request),
    }  # fmt: skip
    if row.policy["secure"]:
        told["envdAccessToken"] = row.token
    if row.traffic is not None:
        told["trafficAccessToken"] = row.traffic
    return told


def shown(request: Request, session: Session, row: Row) -> dict[str, Any]:
    asleep = session.state is _S.PAUSED
    end = session.paused_at if asleep else row.deadline
    disk = os.statvfs(life_of(request).services.settings.home)
    return {
        "templateID": row.policy["template"], "alias": row.policy["template"], "sandboxID": session.id, "clientID": CLIENT,
        "startedAt": stamp(session.created), "endAt": stamp(end if end is not None else session.updated),
        "envdVersion": ENVD_VERSION, "cpuCount": cpus_of(session),
        "memoryMB": memory_of(session) >> 20, "diskSizeMB": disk.f_frsize * disk.f_blocks >> 20,
        "state": "paused" if asleep else "running", "metadata": session.metadata,
    }  # fmt: skip
