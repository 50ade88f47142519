"""How a conversation begins: create a sandbox, or attach to one that is; live, asleep, or in another client's hands."""

from __future__ import annotations

from starlette.websockets import WebSocket

from sandkeep.errors import (
    BadArgument,
    CheckpointNotFound,
    Denied,
    SandboxElsewhere,
    SandboxNotFound,
    SandkeepError,
)
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.protocol import executing, handoff, messages
from sandkeep.server.protocol.conversation import Conversation
from sandkeep.server.protocol.hall import Stage
from sandkeep.server.protocol.messages import Close, Options, Status
from sandkeep.server.services import NewSandbox, Services
from sandkeep.server.sockets import Elsewhere
from sandkeep.sessions import Scope, SessionState


async def create(talk: Conversation, scope: Scope) -> Stage | None:
    """The client speaks first."""
    first = await talk.inbox.get()
    if first is None:
        return None
    client, services = talk.client, talk.services
    await client.tell(Status.CREATING)
    try:
        options = Options.read(first)
        options.check()
        if options.enable_sandbox_handoff:
            await client.tell(Status.LOCK_ACQUIRING)
        session = await services.create(scope, await _new(talk, scope, options))
        token = await services.db.call(services.tokens.issue, session.id)
    except SandkeepError as error:
        await client.refuse(Status.CREATION_ERROR, error.message)
        await client.close(Close.FATAL)
        return None
    stage = talk.hall.stage(session.id, options)
    stage.client = client
    if options.enable_sandbox_handoff:
        await client.tell(Status.LOCK_ACQUIRED)
    if not await client.send(messages.identity(session.id, token)):
        talk.hall.drop(stage)
        await executing.remove(services, session.id)  # nobody knows of it
        return None
    await client.tell(Status.RUNNING)
    return stage


async def _new(talk: Conversation, scope: Scope, options: Options) -> NewSandbox:
    """Idleness that only puts to sleep is the sweeper's; idleness that ends a sandbox is watched by `watch`."""
    return NewSandbox(
        memory=options.sleeps,
        metadata=options.metadata(),
        from_checkpoint=await _snapshot(talk, scope, options.filesystem_snapshot_name),
        auto_pause_timeout=options.idle_timeout if options.enable_idle_timeout_auto_checkpoint else 0,
    )


async def _snapshot(talk: Conversation, scope: Scope, name: str | None) -> str | None:
    if name is None:
        return None
    missing = f"Failed to create sandbox. Filesystem snapshot not found at {name!r}."
    try:
        messages.check_snapshot(name)
        store = await blocking(talk.services.spaces.store, scope.user, scope.project)
        return await blocking(store.resolve, messages.snapshot_name(name))
    except (BadArgument, CheckpointNotFound):
        raise CheckpointNotFound(missing) from None


async def pass_on(socket: WebSocket, id: str) -> None:
    """Raises `Elsewhere` for a sandbox that another living host runs, unless it is to be handed over to this one."""
    services: Services = socket.app.state.services
    try:
        session = await services.get(None, id)
    except SandkeepError:
        return
    options = Options.of(session.metadata)
    if options is not None and not options.enable_sandbox_handoff and (address := await services.address(session)):
        raise Elsewhere(id, session.host, address)


async def attach(talk: Conversation, id: str, token: str) -> Stage | None:
    """The token is looked at before anything is woken, and a refused client leaves no trace."""
    client, services = talk.client, talk.services
    try:
        session = await services.get(None, id)
        options = Options.of(session.metadata)
    except SandboxNotFound:
        options = None
    if options is None:
        await client.tell(Status.NOT_FOUND)
        await client.close(Close.REFUSED)
        return None
    try:
        await services.db.call(services.tokens.check, id, token)
    except Denied:
        why = "Invalid sandbox token." if token else "Sandbox token is missing."
        await client.refuse(Status.PERMISSION_DENIAL_ERROR, why)
        await client.close(Close.FATAL)
        return None
    return await _enter(talk, id, options)


async def _enter(talk: Conversation, id: str, options: Options) -> Stage | None:
    client, hall = talk.client, talk.hall
    stage = await hall.seat(id, options, client)
    if stage is None and options.enable_sandbox_handoff:
        return await handoff.take_seat(hall, hall.stage(id, options), client)
    if stage is None:
        await client.tell(Status.IN_USE)
        await client.close(Close.REFUSED)
        return None
    try:
        if await _wake(talk, stage):
            stage.state = "RUNNING"
            await client.tell(Status.RUNNING)
            return stage
    except SandboxNotFound:
        hall.drop(stage)
        await client.tell(Status.NOT_FOUND)
        await client.close(Close.REFUSED)
    except SandkeepError as error:
        await client.refuse(Status.RESTORE_ERROR, f"Failed to restore sandbox ID: {id}. {error.told()}")
        await client.close(Close.FATAL)
    finally:
        if stage.state != "RUNNING":
            stage.state = "STOPPED"
            await hall.leave(stage, client)
            if not stage.executing:
                hall.drop(stage)
    return None


async def _wake(talk: Conversation, stage: Stage) -> bool:
    """Running here, or False: it runs elsewhere and is not to be had."""
    services, client, options = talk.services, talk.client, stage.options
    stage.state = "RESTORING"
    session = await services.get(None, stage.id)
    here = session.host == services.keeper.host
    live = session.state is SessionState.RUNNING
    if live and here:
        await services.db.call(services.sessions.touch, stage.id)
        return True
    away = live and session.host is not None and await services.db.call(services.keeper.hosts.alive, session.host)
    if away and not options.enable_sandbox_handoff:
        await client.tell(Status.IN_USE)
        await client.close(Close.REFUSED)
        return False
    await client.tell(Status.RESTORING)
    if options.enable_sandbox_handoff:
        await client.tell(Status.LOCK_ACQUIRING)
    if away:
        await handoff.ask(services, stage.id)
    session = await services.keeper.wake(stage.id)
    if session.host != services.keeper.host:
        raise SandboxElsewhere(f"it was taken over by host {session.host}", "try again", host=session.host)
    if options.enable_sandbox_handoff:
        await client.tell(Status.LOCK_ACQUIRED)
    return True
