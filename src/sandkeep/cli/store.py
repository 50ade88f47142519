"""`sandkeep store …`"""

from __future__ import annotations

from typing import Any

import click

from sandkeep.cli.checkpoint import opened, store_options
from sandkeep.cli.output import guarded, json_option, show


@click.group()
def store() -> None:
    """Stores of checkpoints."""


@store.command()
@store_options
@json_option
@guarded
def init(as_json: bool, **where: Any) -> None:
    """Make a store where there is none."""
    with opened(**where, create=True) as made:
        show({"id": made.repo.id, "url": made.spec.url}, as_json)


@store.command()
@store_options
@json_option
@guarded
def info(as_json: bool, **where: Any) -> None:
    """What a store holds."""
    with opened(**where) as found:
        objects = list(found.repo.objects.list(""))
        show(
            {
                "id": found.repo.id,
                "url": found.spec.url,
                "checkpoints": sum(1 for _ in found.repo.list_records("checkpoints")),
                "names": found.names(),
                "objects": len(objects),
                "bytes": sum(size for _, size, _ in objects),
            },
            as_json,
        )


@store.command()
@click.option("--dry-run", is_flag=True, help="Say what would go, remove nothing.")
@store_options
@json_option
@guarded
def gc(dry_run: bool, as_json: bool, **where: Any) -> None:
    """Free the space of what no checkpoint names."""
    with opened(**where) as found:
        show(found.gc(dry_run), as_json)
