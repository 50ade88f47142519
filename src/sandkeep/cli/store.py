"""`sandkeep store …`"""

from __future__ import annotations

from typing import Any

import click

from sandkeep.cli.checkpoint import Watch, opened, store_options
from sandkeep.cli.output import count, guarded, json_option, show, size


@click.group()
def store() -> None:
    """Stores of checkpoints."""


@store.command()
@click.argument("place", metavar="[FOLDER|URL]", required=False)
@store_options
@json_option
@guarded
def init(place: str | None, as_json: bool, **where: Any) -> None:
    """Make a store where there is none."""
    if place is not None and where["url"] is not None:
        raise click.UsageError("say once where the store is to be")
    where["url"] = where["url"] if place is None else place
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
@click.option("--dry-run", is_flag=True, help="Say what would go and what becomes final, remove nothing.")
@click.option("--grace", help="Keep what was forgotten within this time, such as 24h [default: nothing of it].")
@store_options
@json_option
@guarded
def gc(dry_run: bool, grace: str | None, as_json: bool, **where: Any) -> None:
    """Free the space of what no checkpoint names. What was forgotten can't be taken back after that."""
    with opened(**where) as found, Watch("looking" if dry_run else "collecting", as_json):
        report = found.gc(dry_run, grace)
    if as_json:
        show(report, True)
        return
    told = "nothing to do"
    if report.removed_objects or report.repacked_packs:
        free, remove, repack = ("would free", "remove", "repack") if dry_run else ("freed", "removed", "repacked")
        objects, packs = count(report.removed_objects, "object"), count(report.repacked_packs, "pack")
        freed = f"{report.freed_bytes:,} bytes ({size(report.freed_bytes)})"
        told = f"{free} {freed}: {remove} {objects}, {repack} {packs}"
    if report.waiting_packs:
        told += f"; {count(report.waiting_packs, 'pack')} left to the next gc"
    if report.final:
        told += f"; {'would make' if dry_run else 'made'} {count(len(report.final), 'forgotten checkpoint')} final"
    click.echo(told)
    for id in report.final if dry_run else ():
        click.echo(f"final: {id}")
    if report.missing_blobs:
        click.echo(f"missing: {count(report.missing_blobs, 'blob')}; run `sandkeep checkpoint verify`", err=True)
