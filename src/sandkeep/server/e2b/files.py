"""envd's `/files`: download, and upload as multipart or as a plain body; opened by the sandbox's token or by a signature."""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
import zlib
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from sandkeep.errors import BadArgument, FileError
from sandkeep.server.e2b.box import Box
from sandkeep.server.e2b.errors import NO_SPACE, RpcError
from sandkeep.server.e2b.forms import METADATA
from sandkeep.server.e2b.multipart import Parts, boundary_of
from sandkeep.server.streams import Upload, streamed

_KEY = re.compile(r"[a-z0-9!#$%&'*+.^_`|~-]{1,240}")
_VALUE = re.compile(r"[\x20-\x7e]*")


def signature(path: str, operation: str, user: str, token: str, expiration: str | None) -> str:
    words = [path, operation, user, token, *([expiration] if expiration is not None else [])]
    digest = hashlib.sha256(":".join(words).encode("utf-8", "surrogatepass")).digest()
    return "v1_" + base64.b64encode(digest).decode().rstrip("=")


def signed_with(request: Request, token: str) -> bool:
    """Whether the request's signature was made with this token."""
    query = request.query_params
    operation = "read" if request.method == "GET" else "write"
    path, user = query.get("path", ""), query.get("username", "")
    made = signature(path, operation, user, token, query.get("signature_expiration"))
    return hmac.compare_digest(made.encode(), query.get("signature", "").encode("utf-8", "surrogatepass"))


def check_expiration(request: Request) -> None:
    given = request.query_params.get("signature_expiration")
    if given is not None and not (given.isascii() and given.isdigit() and int(given) >= time.time()):
        raise RpcError("unauthenticated", "signature is already expired")


async def download(box: Box, request: Request) -> Response:
    path = _path(box, request.query_params.get("path", ""))
    zipped = "gzip" in request.headers.get("accept-encoding", "").lower()
    try:
        if zipped:
            return await streamed(_zipped(_pieces(box, path)), headers={"Content-Encoding": "gzip"})
        return await streamed(_pieces(box, path))
    except FileError as error:
        raise BadArgument(error.message) from None


async def _pieces(box: Box, path: str) -> AsyncGenerator[bytes, None]:
    fields = {"path": path, "offset": 0, **box.acting}
    async with box.link.stream("file_read", fields) as events:
        async for kind, data in events:
            if kind == "data":
                yield data


async def _zipped(source: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    packer = zlib.compressobj(1, wbits=31)
    try:
        async for piece in source:
            if out := packer.compress(piece):
                yield out
        yield packer.flush()
    finally:
        await source.aclose()


async def upload(box: Box, request: Request) -> Response:
    """Each file whole or not at all, with its metadata."""
    labels = labels_of(request)
    kind, given = request.headers.get("content-type", ""), request.query_params.get("path")
    if kind.startswith("multipart/"):
        parts = Parts(boundary_of(kind), request.stream())
        written = []
        async for name in parts.names():
            path = given or name
            if not path:
                raise BadArgument("a part has no file name, and no path is given")
            written.append(await _write(box, path, parts.body(), labels))
        return JSONResponse(written)
    if not given:
        raise BadArgument("no path is given")
    body = request.stream()
    if request.headers.get("content-encoding", "").lower() == "gzip":
        body = _unzipped(body)
    return JSONResponse([await _write(box, given, body, labels)])


def labels_of(request: Request) -> dict[str, str]:
    """`X-Metadata-<key>` headers: the file's metadata, all of it."""
    found = {n.removeprefix("x-metadata-"): v for n, v in request.headers.items() if n.startswith("x-metadata-")}
    for name, value in found.items():
        if not _KEY.fullmatch(name) or not _VALUE.fullmatch(value):
            raise BadArgument(f"{name!r} can't be a key of metadata, or its value is not printable ASCII")
    return found


async def _write(box: Box, given: str, body: AsyncIterator[bytes], labels: dict[str, str]) -> dict[str, Any]:
    fields: dict[str, Any] = {"path": _path(box, given), **box.acting}
    if labels:
        fields["xattrs"] = {METADATA + name: value for name, value in labels.items()}
    source = Upload(body)
    try:
        async with box.link.stream("file_write", fields, body=source) as events:
            await source.during(_finish(events))
            entry = events.result["entry"]
    except FileError as error:
        if error.details.get("errno") in NO_SPACE:
            raise
        raise BadArgument(error.message) from None
    except ClientDisconnect:
        raise BadArgument("the client left before the file was whole") from None
    told = {"name": entry["name"], "path": entry["path"], "type": "file"}
    return {**told, "metadata": labels} if labels else told


async def _finish(events: Any) -> None:
    async for _ in events:
        pass


async def _unzipped(source: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    opener = zlib.decompressobj(wbits=31)
    try:
        async for piece in source:
            while piece:
                if out := opener.decompress(piece, 1 << 20):
                    yield out
                piece = opener.unconsumed_tail
        if not opener.eof:
            raise BadArgument("the compressed body ends too early")
    except zlib.error as error:
        raise BadArgument(f"the body is not gzip: {error}") from None


def _path(box: Box, given: str) -> str:
    if "\0" in given:
        raise BadArgument("a path has no NUL")
    return box.path(given)
