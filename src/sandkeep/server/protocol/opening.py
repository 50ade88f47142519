"""How a conversation begins: create a sandbox, or attach to one that is; live, asleep, or in another client's hands."""

from __future__ import annotations

import asyncio

from sandkeep.errors import BadArgument, CheckpointNotFound, Denied, SandboxNotFound, SandkeepError
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.protocol import executing, handoff, messages
from sandkeep.server.protocol.conversation import Conversation
from sandkeep.server.protocol.hall import Stage
from sandkeep.server.protocol.messages import Close, Options, Status
from sandkeep.server.services import NewSandbox
from sandkeep.sessions import Scope, Session, SessionState


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
        runtime=await talk.hall.runtime(options),
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
        if not token:
            raise Denied("Sandbox token is missing.")
        await services.db.call(services.tokens.check, id, token)
    except Denied:
        why = "Invalid sandbox token." if token else "Sandbox token is missing."
        await client.refuse(Status.PERMISSION_DENIAL_ERROR, why)
        await client.close(Close.FATAL)
        return None
    return await _enter(talk, session, options)


async def _enter(talk: Conversation, session: Session, options: Options) -> Stage | None:
    client, hall = talk.client, talk.hall
    here = session.host == talk.services.keeper.host
    live = session.state is SessionState.RUNNING
    stage = hall.stage(session.id, options)
    if live and here and stage.client is not None and options.enable_sandbox_handoff:
        return await handoff.take_seat(hall, stage, client)
    away = live and not here and not await talk.services.keeper._dead(session.host)
    if (away and not options.enable_sandbox_handoff) or not await hall.seat(stage, client):
        await client.tell(Status.IN_USE)
        await client.close(Close.REFUSED)
        return None
    try:
        if live and here:
            await talk.services.db.call(talk.services.sessions.touch, session.id)
        else:
            stage.state = "RESTORING"
            await _restore(talk, stage, away)
        stage.state = "RUNNING"
        await client.tell(Status.RUNNING)
        return stage
    except SandkeepError as error:
        await client.refuse(Status.RESTORE_ERROR, f"Failed to restore sandbox ID: {session.id}. {error}")
        await client.close(Close.FATAL)
    except asyncio.CancelledError:
        await hall.leave(stage, client)
        raise
    await hall.leave(stage, client)
    return None


async def _restore(talk: Conversation, stage: Stage, away: bool) -> None:
    await talk.client.tell(Status.RESTORING)
    if stage.options.enable_sandbox_handoff:
        await talk.client.tell(Status.LOCK_ACQUIRING)
    if away:
        await handoff.ask(talk.services, stage.id)
    await talk.services.resume(None, stage.id)
    if stage.options.enable_sandbox_handoff:
        await talk.client.tell(Status.LOCK_ACQUIRED)
