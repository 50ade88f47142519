"""Templates by name: `base`, the server's bases, named checkpoints; and snapshots, which are checkpoints with a mark.

A name may come as E2B writes it, `team/name:tag`: the team is the key's own, and there is one tag, `default`.
"""

from __future__ import annotations

from typing import Any

from sandkeep.errors import BadArgument, CheckpointNotFound, NotFound
from sandkeep.model import CheckpointInfo
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.services import Services
from sandkeep.sessions import Scope

MARK = "e2b_snapshot"
_TAG = ":default"


class TemplateNotFound(NotFound):
    """No base and no checkpoint has that name."""


def plain_name(template: str) -> str:
    name = template.removesuffix(_TAG).rpartition("/")[2]
    if not name or ":" in name:
        raise TemplateNotFound(f"template '{template}' not found", "the only tag is default")
    return name


async def source(services: Services, scope: Scope, template: str) -> dict[str, Any]:
    """The fields of a new sandbox that say what it begins from."""
    name = plain_name(template)
    if name in ("base", "host"):
        return {"base": "host"}
    if name in services.settings.bases:
        return {"base": name}
    try:
        _, found = await services.store_with(scope, name, scope.project)
    except (CheckpointNotFound, BadArgument):
        raise TemplateNotFound(
            f"template '{template}' not found", "base, a base of the server or a checkpoint"
        ) from None
    return {"from_checkpoint": found.id}


async def take(
    services: Services, scope: Scope, id: str, name: str | None, *, memory: bool
) -> tuple[CheckpointInfo, str | None]:
    """A snapshot; with a name, what had that name before keeps only its id."""
    given = None if name is None else plain_name(name)
    session = await services.get(scope, id)
    taken = await services.checkpoint(
        scope, id, comment=f"E2B snapshot of {id}", metadata={MARK: id, "name": given}, memory=memory
    )
    if given is not None:
        store = await blocking(services.spaces.store, session.owner, session.project)
        await blocking(store.name, given, taken.id)
    return taken, given


def shown(info: CheckpointInfo, name: str | None) -> dict[str, Any]:
    return {"snapshotID": (name or info.id) + _TAG, "names": [name] if name else []}


async def listing(services: Services, scope: Scope, sandbox: str | None, name: str | None) -> list[dict[str, Any]]:
    """All snapshots of a scope, newest first."""
    found = []
    for store in await services.stores(scope):
        named = {id: given for given, id in (await blocking(store.names)).items()}
        infos = await blocking(_marked, store)
        found += [(one, named.get(one.id)) for one in infos if sandbox in (None, one.metadata[MARK])]
    wanted = None if name is None else plain_name(name)
    found.sort(key=lambda pair: pair[0].id, reverse=True)
    return [shown(one, given) for one, given in found if wanted in (None, given, one.id)]


def _marked(store: Any) -> list[CheckpointInfo]:
    marked: list[CheckpointInfo] = []
    before: str | None = None
    while page := store.checkpoints(500, None, before):
        marked += [one for one in page if MARK in one.metadata]
        before = page[-1].id
    return marked


async def delete(services: Services, scope: Scope, template: str) -> None:
    """Forget a snapshot; other checkpoints and bases are not E2B's to delete."""
    store, found = await services.store_with(scope, plain_name(template))
    if MARK not in found.metadata:
        raise TemplateNotFound(f"snapshot '{template}' not found", "list the snapshots to see their ids")
    for name, id in (await blocking(store.names)).items():
        if id == found.id:
            await blocking(store.unname, name)
    await blocking(store.forget, [found.id])
