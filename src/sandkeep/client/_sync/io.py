"""HTTP and WebSockets, blocking. Written by hand on both sides."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

import httpx
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.protocol import State
from websockets.sync.client import ClientConnection, connect

from sandkeep.client import answers
from sandkeep.errors import ServerUnreachable

Body = Iterable[bytes]
_PIECE = 256 << 10
_MAX_MESSAGE = 34 << 20


def gone(error: BaseException) -> ServerUnreachable:
    return ServerUnreachable(
        f"the server does not answer: {error or type(error).__name__}", "see that it runs, then look again"
    )


class Http:
    def __init__(self, url: str, headers: dict[str, str]) -> None:
        self._url, self._headers = url, headers
        self._client: httpx.Client | None = None
        self._lock = threading.Lock()

    def _pool(self) -> httpx.Client:
        with self._lock:
            if self._client is None:
                timeout = httpx.Timeout(30.0, read=None)
                self._client = httpx.Client(base_url=self._url, headers=self._headers, timeout=timeout, trust_env=False)
            return self._client

    def request(self, method: str, path: str, *, content: Any = None, **options: Any) -> Any:
        if content is not None and hasattr(content, "read"):
            content = _pieces(content)
        try:
            answer = self._pool().request(method, path, content=content, **options)
        except httpx.TransportError as error:
            raise gone(error) from error
        return answers.checked(answer.status_code, answer.content)

    def fetch(self, path: str, to: BinaryIO) -> None:
        """An answer of any size into a file."""
        try:
            with self._pool().stream("GET", path) as answer:
                if answer.status_code >= 400:
                    answers.checked(answer.status_code, answer.read())
                for piece in answer.iter_bytes():
                    to.write(piece)
        except httpx.TransportError as error:
            raise gone(error) from error

    def close(self) -> None:
        with self._lock:
            client, self._client = self._client, None
        if client is not None:
            client.close()


def _pieces(file: BinaryIO) -> Iterator[bytes]:
    while piece := file.read(_PIECE):
        yield piece


class Socket:
    """A WebSocket to a sandbox's link."""

    def __init__(self, connection: ClientConnection) -> None:
        self._connection = connection
        self._sender: threading.Thread | None = None
        self._failed: BaseException | None = None

    @classmethod
    def open(cls, url: str, headers: dict[str, str]) -> Socket:
        try:
            # entered, since newer releases of the library want it; older ones do not mind
            made = connect(
                url, additional_headers=headers, compression=None, proxy=None, max_size=_MAX_MESSAGE, open_timeout=60,
                user_agent_header=None, ping_timeout=60,
            ).__enter__()  # fmt: skip
        except InvalidStatus as error:
            answers.checked(error.response.status_code, bytes(error.response.body or b""))
            raise gone(error) from error
        except (InvalidHandshake, OSError, EOFError, TimeoutError) as error:
            raise gone(error) from error
        return cls(made)

    @property
    def stale(self) -> bool:
        return self._connection.protocol.state is not State.OPEN

    def send(self, message: str | bytes) -> None:
        try:
            self._connection.send(message)
        except (ConnectionClosed, OSError) as error:
            raise gone(error) from error

    def feed(self, body: Body) -> None:
        """Send this as data while answers are received."""
        self._failed = None
        self._sender = threading.Thread(target=self._send_all, args=(body,), daemon=True)
        self._sender.start()

    def _send_all(self, body: Body) -> None:
        try:
            for piece in body:
                for at in range(0, len(piece), _PIECE):
                    self.send(answers.END + piece[at : at + _PIECE])
            self.send(answers.END)
        except BaseException as error:
            self._failed = error
            self._connection.close_socket()  # whoever receives learns of it

    @property
    def sending(self) -> bool:
        return self._failed is not None or (self._sender is not None and self._sender.is_alive())

    def receive(self, timeout: float | None) -> str | bytes:
        """The next message. TimeoutError when none comes in time; a body that can't be had ends the wait."""
        try:
            message = self._connection.recv(timeout)
        except TimeoutError:
            raise
        except (ConnectionClosed, OSError) as error:
            if self._failed is not None:
                raise self._failed from None
            raise gone(error) from error
        return message

    def close(self) -> None:
        self._connection.close()

    def drop(self) -> None:
        """Leave a request that is under way, without waiting for what the other side still wants to say."""
        self._connection.close_socket()
        if self._sender is not None:
            self._sender.join()
