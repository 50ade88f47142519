"""/checkpoints: those of the key's own sandboxes. Found, looked into, compared, taken out."""

from __future__ import annotations

import contextlib
import tarfile
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from sandkeep import owned
from sandkeep.checkpoints.catalog import Store
from sandkeep.errors import BadArgument, CheckpointNotFound, FileError
from sandkeep.sandbox._async.bridge import blocking
from sandkeep.server.auth import Caller, Use
from sandkeep.server.shapes import shown
from sandkeep.server.streams import streamed

router = APIRouter(prefix="/checkpoints", tags=["checkpoints"])
_PIECE = 256 << 10


@router.get("")
async def list_(
    caller: Caller,
    services: Use,
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
    tag: str | None = None,
    before: str | None = None,
    project: str | None = None,
) -> dict[str, Any]:
    """Newest first; `before` is the last id of the page before."""
    found = [
        one
        for store in await services.stores(caller, project)
        for one in await blocking(store.checkpoints, limit, tag, before)
    ]
    found.sort(key=lambda one: one.id, reverse=True)
    return {"checkpoints": shown(found[:limit])}


@router.get("/tree")
async def tree(caller: Caller, services: Use, project: str | None = None) -> dict[str, Any]:
    """Who descends from whom, through those that were forgotten: each with its parent, the oldest first."""
    found = [one for store in await services.stores(caller, project) for one in await blocking(store.tree)]
    return {"checkpoints": shown(sorted(found, key=lambda one: one.id))}


@router.get("/diff")
async def diff(caller: Caller, services: Use, a: str, b: str, times: bool = True) -> dict[str, Any]:
    """What changed from `a` to `b`."""
    store, old = await services.store_with(caller, a)
    try:
        return {"changes": shown(await blocking(store.diff, old.id, b, times))}
    except CheckpointNotFound:
        await services.store_with(caller, b)
        raise BadArgument("these checkpoints are of different projects", "compare two of one project") from None


@router.get("/{checkpoint}")
async def get(caller: Caller, services: Use, checkpoint: str) -> dict[str, Any]:
    return dict(shown((await services.store_with(caller, checkpoint))[1]))


@router.get("/{checkpoint}/ls")
async def ls(caller: Caller, services: Use, checkpoint: str, path: str = "/") -> dict[str, Any]:
    store, found = await services.store_with(caller, checkpoint)
    return {"files": shown(await blocking(store.ls, found.id, path))}


@router.get("/{checkpoint}/files")
async def read(caller: Caller, services: Use, checkpoint: str, path: str) -> Response:
    """A file's bytes, streamed from the store."""
    store, found = await services.store_with(caller, checkpoint)
    files = await blocking(store.files, found.id)
    entry = await blocking(files.entry, path)
    about = await blocking(files.stat, path)
    if about.kind != "file":
        raise FileError(f"{path} is a {about.kind}, not a file")

    async def pieces() -> AsyncGenerator[bytes, None]:
        rest = files.pieces(entry, 0, entry.size)
        while piece := await blocking(next, rest, b""):
            yield piece

    return await streamed(pieces(), headers={"Content-Length": str(about.size)})


@router.get("/{checkpoint}/extract")
async def extract(caller: Caller, services: Use, checkpoint: str, glob: str | None = None) -> Response:
    """A tar of the files, or of those that match `glob` and all below them."""
    store, found = await services.store_with(caller, checkpoint)
    above = services.settings.home / "cache"
    above.mkdir(parents=True, exist_ok=True)
    kept = contextlib.ExitStack()
    try:
        folder = kept.enter_context(owned.folder("extract-", above))
        archive = await blocking(_pack, store, found.id, folder, glob)
    except BaseException:
        await blocking(kept.close)
        raise

    async def pieces() -> AsyncGenerator[bytes, None]:
        try:
            with archive.open("rb") as file:
                while piece := await blocking(file.read, _PIECE):
                    yield piece
        finally:
            await blocking(kept.close)

    return await streamed(pieces(), "application/x-tar", {"Content-Length": str(archive.stat().st_size)})


def _pack(store: Store, checkpoint: str, folder: Path, glob: str | None) -> Path:
    store.extract(checkpoint, folder / "files", glob)
    archive = folder / "files.tar"
    with tarfile.open(archive, "w") as tar:
        tar.add(folder / "files", arcname=".")
    return archive
