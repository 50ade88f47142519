"""`filesystem.Filesystem`: files through the guest, in E2B's words."""

from __future__ import annotations

import errno
import posixpath
from typing import Any

from sandkeep.errors import FileError, FileMissing
from sandkeep.server.e2b.box import Box
from sandkeep.server.e2b.errors import RpcError
from sandkeep.server.e2b.processes import Unary
from sandkeep.server.e2b.rpc import Message


def where(box: Box, asked: Message, name: str = "path") -> str:
    given = asked.get(name, "")
    if not isinstance(given, str) or "\0" in given:
        raise RpcError("invalid_argument", f"{name} is not a path")
    return box.path(given)


async def stat(box: Box, asked: Message) -> Message:
    return {"entry": await box.stat(where(box, asked))}


async def list_dir(box: Box, asked: Message) -> Message:
    path, depth = where(box, asked), asked.get("depth") or 1
    try:
        answer = await box.link.call("file_list", path=path, depth=depth, xattrs=True)
    except FileError as error:
        if error.details.get("errno") == errno.ENOTDIR:
            raise RpcError("invalid_argument", f"path is not a directory: {path}") from None
        raise
    found: list[dict[str, Any]] = answer["entries"]
    found.sort(key=lambda one: one["path"].split("/"))
    return {"entries": await box.entries(found)}


async def make_dir(box: Box, asked: Message) -> Message:
    path = where(box, asked)
    try:
        made = (await box.link.call("file_mkdir", path=path, parents=True, **box.acting))["made"]
    except FileError as error:
        if error.details.get("errno") in (errno.EEXIST, errno.ENOTDIR):
            raise RpcError("invalid_argument", f"path already exists but it is not a directory: {path}") from None
        raise
    if not made:
        raise RpcError("already_exists", f"directory already exists: {path}")
    return {"entry": await box.stat(path)}


async def move(box: Box, asked: Message) -> Message:
    source, target = where(box, asked, "source"), where(box, asked, "destination")
    await box.link.call("file_stat", path=source)
    await box.link.call("file_mkdir", path=posixpath.dirname(target), parents=True, **box.acting)
    await box.link.call("file_move", path=source, to=target)
    return {"entry": await box.stat(target)}


async def remove(box: Box, asked: Message) -> Message:
    try:
        await box.link.call("file_remove", path=where(box, asked), recursive=True)
    except FileMissing:
        pass
    return {}


UNARY: dict[str, Unary] = {
    "Stat": stat, "ListDir": list_dir, "MakeDir": make_dir, "Move": move, "Remove": remove,
}  # fmt: skip
CHANGES = frozenset({"MakeDir", "Move", "Remove"})
