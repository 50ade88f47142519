"""`sandkeep serve` and `sandkeep key …`."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import click

from sandkeep.cli.output import guarded, json_option, show, table, when
from sandkeep.cli.sandbox import home_option, pairs
from sandkeep.errors import extra


def settings(**given: Any) -> Any:
    """The server's settings; says how to install the server's libraries if they are missing."""
    with extra("server"):
        from sandkeep.server.settings import Settings
    return Settings(**{name: value for name, value in given.items() if value is not None})


database_option = click.option("--database", metavar="URL", help="postgresql://… [default: SQLite in the home folder].")


@click.command()
@click.option("--host", help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=click.IntRange(0, 65535), help="0 picks a free one [default: 8700].")
@database_option
@click.option(
    "--store", metavar="URL", help="Folder or s3://bucket/prefix for checkpoints [default: in the home folder]."
)
@click.option("--store-option", multiple=True, metavar="NAME=VALUE", help="region or endpoint of the store.")
@click.option("--host-id", help="This machine among the servers of one database [default: its host name].")
@click.option("--address", metavar="URL", help="How others reach this server.")
@click.option("--runtime", type=click.Choice(["auto", "runc", "crun", "runsc"]), help="For sandboxes that name none.")
@click.option("--base", "bases", multiple=True, metavar="NAME=PATH", help="A root filesystem that clients may name.")
@click.option("--allow-host-network", "host_network", is_flag=True, help="Let clients ask for network=host.")
@click.option("--egress/--no-egress", default=True, help="Whether sandboxes may have a way out [default: they may].")
@click.option(
    "--egress-private", multiple=True, metavar="NETWORK", help="A private network that they may reach, as 10.1.0.0/16."
)
@click.option("--auto-pause", type=float, help="Seconds of idleness; 0 is never [default: 600].")
@click.option("--sweep-interval", type=float, help="Seconds [default: 5].")
@click.option("--drain-seconds", type=float, help="How long to put sandboxes to sleep when stopped [default: 60].")
@click.option("--rate", type=float, help="Requests per second of one key; 0 is no limit [default: 1000].")
@click.option("--burst", type=float)
@click.option("--storage-quota", type=int, help="Bytes that a user and project may keep under /storage.")
@click.option("--cors-origin", "cors_origins", multiple=True, metavar="ORIGIN")
@click.option("--no-websocket-protocol", "no_protocol", is_flag=True, help="Leave out /create and /attach.")
@home_option
@guarded
def serve(store_option: tuple[str, ...], bases: tuple[str, ...], no_protocol: bool, **given: Any) -> None:
    """Serve sandboxes to many users until told to stop; SIGTERM puts them to sleep first.

    The first start prints an API key, once.
    """
    chosen = settings(
        **given,
        store_options=pairs(store_option, "store-option"),
        bases=pairs(bases, "base"),
        websocket_protocol=not no_protocol,
    )
    from sandkeep.server.run import serve as run

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    first_key(chosen)
    if not run(chosen, lambda port: click.echo(f"sandkeep serves on http://{chosen.shown_host}:{port}")):
        sys.exit(1)


def first_key(chosen: Any) -> None:
    with opened(chosen) as keys:
        if not keys.all():
            _, secret = keys.create("default")
            click.echo(f"API key of user default, shown once: {secret}")


class opened:
    """The keys of a server's database, for one block."""

    def __init__(self, chosen: Any) -> None:
        self._settings = chosen

    def __enter__(self) -> Any:
        from sandkeep.sessions import Database, Keys

        self._settings.home.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._database = Database(self._settings.database).open()
        return Keys(self._database)

    def __exit__(self, *_: object) -> None:
        self._database.close()


@click.group()
def key() -> None:
    """API keys of a server."""


@key.command()
@click.option("--user", required=True)
@click.option("--project", help="See and make only this project's sandboxes.")
@database_option
@home_option
@json_option
@guarded
def create(user: str, project: str | None, database: str | None, home: Path | None, as_json: bool) -> None:
    """Make a key and print it; it can't be shown again."""
    with opened(settings(home=home, database=database)) as keys:
        made, secret = keys.create(user, project)
    show({"id": made.id, "key": secret, "user": user, "project": project}, True) if as_json else click.echo(secret)


@key.command("list")
@click.option("--user")
@database_option
@home_option
@json_option
@guarded
def list_(user: str | None, database: str | None, home: Path | None, as_json: bool) -> None:
    """All keys, newest first, without their secrets."""
    columns = {
        "id": lambda k: k.id, "key": lambda k: f"{k.prefix}…", "user": lambda k: k.user, "project": lambda k: k.project or "",
        "created": lambda k: when(k.created), "last used": lambda k: when(k.last_used) if k.last_used else "",
        "revoked": lambda k: when(k.revoked) if k.revoked else "",
    }  # fmt: skip
    with opened(settings(home=home, database=database)) as keys:
        table(keys.all(user), columns, as_json)


@key.command()
@click.argument("id")
@database_option
@home_option
@guarded
def revoke(id: str, database: str | None, home: Path | None) -> None:
    """End a key, at once and for ever."""
    with opened(settings(home=home, database=database)) as keys:
        keys.revoke(id)
