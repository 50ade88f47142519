"""Who may come in. The protocol has no keys of its own: on loopback its calls are taken as they are, elsewhere with an API key.

Taken as they are means from programs of this machine. A web page that some browser here shows, and whoever a proxy on this
machine lets through, are not that: they need a key too.
"""

from __future__ import annotations

import ipaddress
import logging
import re
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection

from sandkeep.server.auth import identify, services_of
from sandkeep.server.problems import Unauthorized
from sandkeep.server.settings import Settings
from sandkeep.sessions import Scope

LOCAL = Scope("local")
_SECRETS = re.compile(r"((?:sandbox_token|api_key)=)[^&\s\"']*")
_PROXIED = ("forwarded", "x-forwarded-for", "x-forwarded-host", "x-real-ip", "via")


async def admit(connection: HTTPConnection) -> Scope:
    """The scope that the caller acts in, or `Unauthorized`."""
    given = connection.headers
    if "x-api-key" in given or "authorization" in given or "api_key" in connection.query_params:
        return (await identify(connection)).scope
    settings = services_of(connection).settings
    if settings.loopback and not any(name in given for name in _PROXIED) and _from_here(connection, settings):
        return LOCAL
    raise Unauthorized(
        "this server wants an API key",
        "send it in a header (`Authorization: Bearer sk_…` or `X-API-Key`), for WebSockets also as ?api_key=…",
    )


def _from_here(connection: HTTPConnection, settings: Settings) -> bool:
    origin = connection.headers.get("origin")
    if origin is not None and origin not in settings.cors_origins and not _is_loopback(urlsplit(origin).hostname):
        return False
    return _is_loopback(urlsplit(f"//{connection.headers.get('host', '')}").hostname)


def _is_loopback(name: str | None) -> bool:
    if name is None:
        return False
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


class Redacted(logging.Filter):
    """Takes tokens and keys out of the addresses that the web server logs."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "sandbox_token=" in message or "api_key=" in message:
            record.msg, record.args = _SECRETS.sub(r"\1…", message), None
        return True


def redact_logs() -> None:
    for name in ("uvicorn.error", "uvicorn.access", "uvicorn.asgi"):
        logger = logging.getLogger(name)
        if not any(isinstance(one, Redacted) for one in logger.filters):
            logger.addFilter(Redacted())
