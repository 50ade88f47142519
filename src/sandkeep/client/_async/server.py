"""A server as a client sees it: requests with a key, and links to sandboxes."""

from __future__ import annotations

from typing import Any, BinaryIO

from sandkeep.client import answers
from sandkeep.client._async.io import AsyncHttp, AsyncSocket


class AsyncServer:
    def __init__(self, url: str, api_key: str) -> None:
        self._url = url
        self._headers = {"Authorization": f"Bearer {api_key}"}
        self._http = AsyncHttp(url, self._headers)

    async def ask(self, method: str, path: str, body: Any = None, **query: Any) -> Any:
        """JSON in, JSON out."""
        params = {name: value for name, value in query.items() if value is not None}
        if body is None:
            return await self._http.request(method, path, params=params)
        headers = {"Content-Type": "application/json"}
        return await self._http.request(method, path, params=params, content=answers.written(body), headers=headers)

    async def upload(self, path: str, content: Any) -> Any:
        return await self._http.request("PUT", path, content=content)

    async def download(self, path: str, to: BinaryIO) -> None:
        await self._http.fetch(path, to)

    async def socket(self, path: str) -> AsyncSocket:
        return await AsyncSocket.open("ws" + self._url.removeprefix("http") + path, self._headers)

    async def close(self) -> None:
        await self._http.close()
