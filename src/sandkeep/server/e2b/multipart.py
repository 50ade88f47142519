"""`multipart/form-data`, read as it comes: the head of each part, then its bytes, with never more than a piece in memory."""

from __future__ import annotations

from collections.abc import AsyncIterator
from email.message import Message
from email.parser import HeaderParser

from sandkeep.errors import BadArgument

_MOST_HEAD = 16 << 10


def boundary_of(content_type: str) -> bytes:
    head = Message()
    head["content-type"] = content_type
    found = head.get_param("boundary")
    if head.get_content_type() != "multipart/form-data" or not isinstance(found, str) or not 0 < len(found) <= 200:
        raise BadArgument("the body is not multipart/form-data with a boundary")
    return found.encode("latin-1", "replace")


class Parts:
    """`names()` gives each part's file name, or None; `body()` is that part's bytes. What is not read is passed over."""

    def __init__(self, boundary: bytes, source: AsyncIterator[bytes]) -> None:
        self._mark = b"\r\n--" + boundary
        self._source = source
        self._held = bytearray(b"\r\n")  # the first mark may stand at the very beginning
        self._inside = True

    async def names(self) -> AsyncIterator[str | None]:
        while True:
            async for _ in self.body():
                pass
            if await self._line_end() == b"--":
                async for _ in self._source:
                    pass
                return
            head = await self._head()
            self._inside = True
            yield head

    async def body(self) -> AsyncIterator[bytes]:
        while self._inside:
            at = self._held.find(self._mark)
            safe = at if at >= 0 else len(self._held) - len(self._mark)
            if safe > 0:
                piece = bytes(self._held[:safe])
                del self._held[:safe]
                yield piece
            if at >= 0:
                del self._held[: len(self._mark)]
                self._inside = False
            else:
                await self._fill()

    async def _line_end(self) -> bytes:
        while len(self._held) < 2:
            await self._fill()
        found = bytes(self._held[:2])
        del self._held[:2]
        return found

    async def _head(self) -> str | None:
        while (end := self._held.find(b"\r\n\r\n")) < 0:
            if len(self._held) > _MOST_HEAD:
                raise BadArgument("the head of a part is too long")
            await self._fill()
        head = HeaderParser().parsestr(bytes(self._held[:end]).decode(errors="replace"))
        del self._held[: end + 4]
        found = head.get_param("filename", header="content-disposition")
        found = found[2] if isinstance(found, tuple) else found
        return found or None

    async def _fill(self) -> None:
        try:
            self._held += await anext(self._source)
        except StopAsyncIteration:
            raise BadArgument("the body ends in the middle of a part") from None
