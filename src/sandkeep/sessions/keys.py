"""API keys and sandbox tokens. A secret is shown once, when it is made; the database holds its SHA-256 only."""

from __future__ import annotations

import hashlib
import hmac
import secrets

from sqlalchemy import delete, func, insert, or_, select, update
from sqlalchemy.exc import IntegrityError

from sandkeep.errors import Denied, NotFound, SandboxNotFound
from sandkeep.sessions.database import Database
from sandkeep.sessions.records import Key, check_id, check_name
from sandkeep.sessions.tables import keys, now, tokens

_SHOWN = 11
_NEWS = 60.0
"""`last_used` is written at most this often, in seconds."""

_PUBLIC = [keys.c[name] for name in ("id", "prefix", "user", "project", "created", "last_used", "revoked")]


class Keys:
    def __init__(self, database: Database) -> None:
        self._db = database

    def create(self, user: str, project: str | None = None) -> tuple[Key, str]:
        """The key and its secret, which can't be had again."""
        secret = "sk_" + secrets.token_urlsafe(32)
        values = {
            "id": secrets.token_hex(8),
            "prefix": secret[:_SHOWN],
            "sha256": _sha256(secret),
            "user": check_name(user, "the user"),
            "project": None if project is None else check_name(project, "the project"),
        }
        with self._db.write() as connection:
            row = connection.execute(insert(keys).values(created=now(), **values).returning(*_PUBLIC)).mappings().one()
        return Key(**row), secret

    def check(self, secret: str) -> Key:
        """The key that this secret opens, or `Denied`, which does not say why."""
        given = _sha256(secret)
        prefix = secret[:_SHOWN] if secret.isascii() and secret.isprintable() else ""
        stale = or_(keys.c.last_used.is_(None), keys.c.last_used < now() - _NEWS).label("stale")
        wanted = select(*_PUBLIC, keys.c.sha256, stale).where(keys.c.prefix == prefix, keys.c.revoked.is_(None))
        with self._db.read() as connection:
            rows = connection.execute(wanted).mappings().all()
        found = next((dict(row) for row in rows if hmac.compare_digest(row["sha256"], given)), None)
        if found is None:
            raise Denied("this API key is not valid", "make one with: sandkeep key create --user NAME")
        if found.pop("stale"):
            with self._db.write(durable=False) as connection:
                connection.execute(update(keys).where(keys.c.id == found["id"]).values(last_used=now()))
        del found["sha256"]
        return Key(**found)

    def revoke(self, id: str) -> None:
        """At once and for ever; revoking twice keeps the first time."""
        with self._db.write() as connection:
            known = update(keys).where(keys.c.id == id).values(revoked=func.coalesce(keys.c.revoked, now()))
            if not connection.execute(known).rowcount:
                raise NotFound(f"no key {id}", "list the keys to see their ids")

    def all(self, user: str | None = None) -> list[Key]:
        """Newest first, the revoked too."""
        wanted = select(*_PUBLIC).order_by(keys.c.created.desc(), keys.c.id)
        with self._db.read() as connection:
            rows = connection.execute(wanted if user is None else wanted.where(keys.c.user == user)).mappings()
            return [Key(**row) for row in rows]


class Tokens:
    """What opens one sandbox without a key: the WebSocket protocol's `sandbox_token`."""

    def __init__(self, database: Database) -> None:
        self._db = database

    def issue(self, sandbox: str) -> str:
        token = secrets.token_urlsafe(32)
        try:
            with self._db.write() as connection:
                connection.execute(
                    insert(tokens).values(sandbox=check_id(sandbox), sha256=_sha256(token), created=now())
                )
        except IntegrityError as error:
            raise SandboxNotFound(f"no sandbox {sandbox}") from error
        return token

    def check(self, sandbox: str, token: str) -> None:
        given = _sha256(token)
        with self._db.read() as connection:
            known = (
                connection.execute(select(tokens.c.sha256).where(tokens.c.sandbox == check_id(sandbox))).scalars().all()
            )
        if not any(hmac.compare_digest(one, given) for one in known):
            raise Denied("this sandbox token is not valid", "use the token that came with the sandbox")

    def revoke(self, sandbox: str) -> None:
        with self._db.write() as connection:
            connection.execute(delete(tokens).where(tokens.c.sandbox == sandbox))


def _sha256(secret: str) -> str:
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).hexdigest()
