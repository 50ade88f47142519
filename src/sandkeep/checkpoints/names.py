"""Movable names for immutable checkpoints: an append-only record of moves, of which the newest holds.

A move is a record of its own, called by a sequence number and a random part, so two writers at once never collide and
every reader picks the same winner. A writer then removes the older moves of the same name.
"""

from __future__ import annotations

import re
import secrets

import msgpack

from sandkeep.checkpoints.records import is_id
from sandkeep.errors import BadArgument, Corrupt, NotFound
from sandkeep.store.format import record_name
from sandkeep.store.repository import Repository

KIND = "names"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,99}")


def check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "latest" or name.startswith(("ck_", "sn_")):
        raise BadArgument(
            f"{name!r} can't name a checkpoint",
            "begin with a letter or digit, go on with those, '.', '_', '-' and '/', at most 100; not 'latest', ck_… or sn_…",
        )


def read_names(repo: Repository) -> dict[str, str]:
    """Name → checkpoint id."""
    return {name: target for name, (target, _) in sorted(_moves(repo)[0].items()) if target is not None}


def move(repo: Repository, name: str, target: str | None) -> None:
    """Make `name` mean `target`; None takes the name away."""
    check_name(name)
    held, number = _moves(repo)
    older = held[name][1] if name in held else []
    repo.put_record(KIND, f"{number + 1:016d}-{secrets.token_hex(8)}", msgpack.packb([name, target]))
    for record in older:
        repo.delete_record(KIND, record)


def _moves(repo: Repository) -> tuple[dict[str, tuple[str | None, list[str]]], int]:
    """Each name with its target and its moves, and the highest number in use."""
    held: dict[str, tuple[str | None, list[str]]] = {}
    number = 0
    for record in repo.list_records(KIND, full=True):
        try:
            name, target, place = _move(record, repo.get_record(KIND, record, cached=True))
        except NotFound:
            continue  # another writer has just moved the name on
        except (Corrupt, ValueError, TypeError, msgpack.UnpackException):
            full = record_name(KIND, record)
            raise Corrupt(
                f"the record {full} of a name is damaged",
                "delete that object from the store's folder or bucket, then give the name again",
                object=full,
            ) from None
        held[name] = (target, [*(held[name][1] if name in held else []), record])
        number = max(number, place)
    return held, number


def _move(record: str, data: bytes) -> tuple[str, str | None, int]:
    """A name, what it means from here on, and the number of the move."""
    name, target = msgpack.unpackb(data)
    if not isinstance(name, str) or not (target is None or (isinstance(target, str) and is_id(target))):
        raise ValueError("it names no checkpoint")
    return name, target, int(record.split("-")[0])
