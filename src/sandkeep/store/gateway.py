"""Objects that a Sandkeep server keeps for a client without a bucket: `sandkeep://`, with SANDKEEP_API_URL and SANDKEEP_API_KEY."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

from sandkeep.errors import BadArgument, Corrupt, NotFound, StoreDenied, StoreError, StoreFull, StoreUnreachable, extra
from sandkeep.store.objects import check_name, check_prefix

_TRIES = 5
_PAGE = 10_000
_BATCH = 1000


class Gateway:
    """The key says whose objects they are; nothing else is in the address."""

    url = "sandkeep://"
    parallel = 8
    direct = False

    def __init__(self, rest: str = "") -> None:
        address, key = os.environ.get("SANDKEEP_API_URL"), os.environ.get("SANDKEEP_API_KEY")
        if rest:
            raise BadArgument(
                f"sandkeep://{rest} names more than there is", "write sandkeep:// alone; the key says whose it is"
            )
        if not address or not key:
            raise BadArgument("sandkeep:// needs a server and a key", "set SANDKEEP_API_URL and SANDKEEP_API_KEY")
        self._address, self._key = address.rstrip("/"), key
        self.place = self._address
        self._local = threading.Lock()
        self._client: Any = None
        self._pid = 0

    def put(self, name: str, *data: bytes | bytearray | memoryview, soon: bool = True) -> None:
        whole = b"".join(data)
        self._ask("PUT", check_name(name), content=whole, headers={"Content-SHA256": hashlib.sha256(whole).hexdigest()})

    def get(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        check_name(name)
        if length == 0:
            if self.size(name) is None:
                raise NotFound(f"{name} is not in the store {self.url}")
            return b""
        headers = {}
        if offset or length is not None:
            headers["Range"] = f"bytes={offset}-{'' if length is None else offset + length - 1}"
        data: bytes = self._ask("GET", name, headers=headers).content
        if length is not None and len(data) != length:
            raise Corrupt(f"{name} ends too early", "run verify", object=name)
        return data

    def list(self, prefix: str, after: str = "") -> Iterator[tuple[str, int, float]]:
        check_prefix(prefix)
        while True:
            page = self._ask("GET", "", params={"prefix": prefix, "after": after, "limit": _PAGE}).json()
            for name, size, at in page["objects"]:
                after = name
                yield name, size, at
            if not page["more"]:
                return

    def delete(self, names: Iterable[str]) -> None:
        wanted = [check_name(name) for name in names]
        for at in range(0, len(wanted), _BATCH):
            self._ask("POST", "", json={"delete": wanted[at : at + _BATCH]})

    def newest(self, prefix: str) -> Iterator[str] | None:
        return None

    def size(self, name: str) -> int | None:
        try:
            return int(self._ask("HEAD", check_name(name)).headers["X-Object-Size"])
        except NotFound:
            return None

    def __del__(self) -> None:
        if getattr(self, "_client", None) is not None and self._pid == os.getpid():
            self._client.close()

    def _pool(self) -> Any:
        """Of this process: connections do not survive a fork."""
        with extra("client"):
            import httpx

        with self._local:
            if self._client is None or self._pid != os.getpid():
                headers = {"Authorization": f"Bearer {self._key}"}
                self._client = httpx.Client(base_url=self._address, headers=headers, timeout=60.0, trust_env=False)
                self._pid = os.getpid()
            return self._client

    def _ask(self, method: str, name: str, **options: Any) -> Any:
        """Every request may be repeated: it sets or removes a whole object."""
        with extra("client"):
            import httpx

        path = f"/storage/{name}" if name else "/storage"
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(0.1 * 3**attempt)
            try:
                answer = self._pool().request(method, path, **options)
            except httpx.TransportError as error:
                said, kind = f"{type(error).__name__}: {error}", StoreUnreachable
                continue
            if answer.status_code < 400:
                return answer
            if answer.status_code not in (429, 502, 503, 504):
                raise _refusal(answer, name)
            said, kind = f"status {answer.status_code}", StoreUnreachable
        raise kind(f"the server at {self._address} does not answer: {said}", "see that it runs, then try again")


def _refusal(answer: Any, name: str) -> Exception:
    try:
        told = answer.json()
        code, message, remedy = told["code"], str(told["message"]), str(told["remedy"])
    except (ValueError, KeyError, TypeError):
        code, message, remedy = "", f"status {answer.status_code}", ""
    kinds: dict[int, type[Exception]] = {401: StoreDenied, 403: StoreDenied, 404: NotFound, 507: StoreFull}
    kind = (
        Corrupt
        if code == "CORRUPT"
        else BadArgument
        if code == "BAD_ARGUMENT"
        else kinds.get(answer.status_code, StoreError)
    )
    return kind(f"{name}: {message}", remedy)
