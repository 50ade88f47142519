"""Files inside, by way of the guest: the path is resolved in the sandbox, never by the host."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, BinaryIO, Self

from sandkeep.errors import BadArgument, FileMissing, GuestLied
from sandkeep.model import FileEvent, FileInfo
from sandkeep.runtime.link import AsyncLink
from sandkeep.sandbox._async.bridge import begin_now

PIECE = 512 << 10


class AsyncFiles:
    def __init__(self, link: AsyncLink) -> None:
        self._link = link

    async def read(self, path: str, offset: int = 0, length: int | None = None) -> bytes:
        pieces = bytearray()
        async for piece in self.read_stream(path, offset, length):
            pieces += piece
        return bytes(pieces)

    async def read_text(self, path: str) -> str:
        return (await self.read(path)).decode()

    async def read_stream(self, path: str, offset: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        fields: dict[str, Any] = {"path": checked(path), "offset": offset}
        if length is not None:
            fields["length"] = length
        left = length
        async with self._link.stream("file_read", fields) as events:
            async for kind, data in events:
                if kind == "data":
                    left = None if left is None else left - len(data)
                    if left is not None and left < 0:
                        raise GuestLied(f"the guest sent more than {length} bytes", "kill this sandbox")
                    yield data

    async def write(
        self,
        path: str,
        data: bytes | str | Iterable[bytes] | BinaryIO,
        *,
        mode: int | None = None,
        append: bool = False,
        user: str | None = None,
    ) -> FileInfo:
        """Write a file whole: its old content or the new one is there, never a part. Missing folders are made."""
        options = {"path": checked(path), "mode": mode, "append": append, "user": user}
        fields = {name: value for name, value in options.items() if value is not None}
        async with self._link.stream("file_write", fields, body=pieces_of(data)) as events:
            async for _ in events:
                pass
            return file_info(events.result["entry"])

    async def list(self, path: str, depth: int = 1) -> list[FileInfo]:
        answer = await self._link.call("file_list", path=checked(path), depth=depth)
        return [file_info(entry) for entry in answer["entries"]]

    async def stat(self, path: str) -> FileInfo:
        return file_info((await self._link.call("file_stat", path=checked(path)))["entry"])

    async def exists(self, path: str) -> bool:
        try:
            await self.stat(path)
        except FileMissing:
            return False
        return True

    async def mkdir(self, path: str, *, parents: bool = True, mode: int = 0o755) -> None:
        await self._link.call("file_mkdir", path=checked(path), parents=parents, mode=mode)

    async def move(self, source: str, target: str) -> None:
        await self._link.call("file_move", path=checked(source), to=checked(target))

    async def remove(self, path: str, *, recursive: bool = True) -> None:
        await self._link.call("file_remove", path=checked(path), recursive=recursive)

    def watch(self, path: str, *, recursive: bool = True) -> AsyncWatch:
        """Changes below `path` as they happen, until it is closed."""
        return AsyncWatch(self._link, {"path": checked(path), "recursive": recursive})


class AsyncWatch:
    """Iterate it for the changes. A sync one looks from the start; an async one from entering it, or its first event."""

    def __init__(self, link: AsyncLink, fields: dict[str, Any]) -> None:
        self._path: str = fields["path"]
        self._events = link.stream("file_watch", fields, timeout=None)
        self._begun = False
        begin_now(self)

    async def _begin(self) -> None:
        self._begun = True
        await self._events.__aenter__()
        await self._events.first_json()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> FileEvent:
        if not self._begun:
            await self._begin()
        async for kind, data in self._events:
            if kind == "json" and "event" in data and (event := told(data, self._path)) is not None:
                return event
        raise StopAsyncIteration

    async def __aenter__(self) -> Self:
        if not self._begun:
            await self._begin()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        await self._events.__aexit__()


def told(data: dict[str, Any], watched: str) -> FileEvent | None:
    """An event without the steps of our own whole-file writes, which end as one change of the file."""
    if data["event"] == "overflow":
        return FileEvent("overflow", watched)
    if "path" not in data or ours(data["path"]):
        return None
    return FileEvent("modified" if ours(data.get("from", "")) else data["event"], data["path"])


def ours(path: str) -> bool:
    return path.rpartition("/")[2].startswith(".sandkeep-")


def checked(path: str) -> str:
    if not isinstance(path, str) or not path or "\0" in path:
        raise BadArgument(f"{path!r} is not a path inside the sandbox")
    return path


def pieces_of(data: bytes | str | Iterable[bytes] | BinaryIO) -> Iterable[bytes]:
    if isinstance(data, str):
        data = data.encode()
    if not hasattr(data, "read") and not hasattr(data, "__iter__"):
        raise BadArgument(
            f"{data!r} can't be written to a file", "give bytes, a text, an iterable of bytes, or an open file"
        )
    if isinstance(data, (bytes, bytearray, memoryview)):
        view = memoryview(data)
        return (bytes(view[at : at + PIECE]) for at in range(0, len(view), PIECE))
    if hasattr(data, "read"):
        return iter(lambda: data.read(PIECE), b"")
    return data


def file_info(entry: dict[str, Any]) -> FileInfo:
    return FileInfo(**{name: entry[name] for name in FileInfo.__dataclass_fields__})
