"""`sandkeep checkpoint …`: everything about saved states, without starting anything but what is restored."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

import click
from rich.progress import Progress

from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.compare import Change
from sandkeep.checkpoints.lineage import Ancestor
from sandkeep.checkpoints.retention import ForgetReport
from sandkeep.checkpoints.states import KINDS as STATES
from sandkeep.cli.drawing import drawn
from sandkeep.cli.output import (
    comment_option,
    count,
    guarded,
    json_option,
    messages,
    plain,
    printable,
    show,
    size,
    table,
    when,
)
from sandkeep.cli.sandbox import home_option
from sandkeep.sandbox import Sandbox


def store_options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--store", "url", help="A folder or s3://bucket/prefix [default: the home's own store]."),
        click.option("--endpoint", help="An S3-compatible server's address."),
        click.option("--region"),
        home_option,
    ):
        function = option(function)
    return function


def opened(url: str | None, endpoint: str | None, region: str | None, home: Path | None, create: bool = False) -> Store:
    return Store(url, endpoint=endpoint, region=region, home=home, create=create or url is None)


@click.group()
def checkpoint() -> None:
    """Save, list, compare, read and restore checkpoints."""


@checkpoint.command()
@click.argument("sandbox")
@comment_option
@click.option("--tag")
@click.option("--scope", type=click.Choice(["all", "workspace"]), default="all", show_default=True)
@click.option("--exclude", multiple=True, help="gitignore syntax.")
@click.option("--memory", is_flag=True, help="The memory of running processes too (runsc).")
@home_option
@json_option
@guarded
def create(
    sandbox: str,
    comment: str | None,
    tag: str | None,
    scope: Any,
    exclude: tuple[str, ...],
    memory: bool,
    home: Path | None,
    as_json: bool,
) -> None:
    """Save a sandbox's whole state; prints the checkpoint's id."""
    sb = Sandbox.connect(sandbox, home=home)
    with Watch("saving", as_json) as watch:
        made = sb.checkpoint(
            comment,
            tag=tag,
            scope=scope,
            exclude=list(exclude) or None,
            memory=memory,
            progress=None if memory else watch.told,
        )
    show(made, True) if as_json else click.echo(made.id)


class Watch:
    """Progress on a terminal, for what takes long; silent elsewhere."""

    def __init__(self, words: str, quiet: bool = False) -> None:
        self._bar = Progress(console=messages, transient=True) if not quiet and sys.stderr.isatty() else None
        self._task = self._bar.add_task(words, total=None) if self._bar else None

    def __enter__(self) -> Watch:
        if self._bar is not None:
            self._bar.start()
        return self

    def told(self, phase: str, entries: int, amount: int) -> None:
        self._say(f"{phase}: {entries:,} entries, {size(amount)}")

    def counted(self, done: int, total: int) -> None:
        self._say(f"{done:,} of {count(total, 'pack')}")

    def _say(self, words: str) -> None:
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, description=words)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


@checkpoint.command("list")
@click.option("--limit", type=int, default=100, show_default=True)
@click.option("--tag")
@click.option("--forgotten", is_flag=True, help="Those that `unforget` can take back.")
@store_options
@json_option
@guarded
def list_(limit: int, tag: str | None, forgotten: bool, as_json: bool, **where: Any) -> None:
    """The checkpoints of a store, newest first."""
    columns = {
        "id": lambda c: c.id, "time": lambda c: when(c.timestamp), "size": lambda c: size(c.size_bytes),
        "tag": lambda c: c.tag or "", "comment": lambda c: c.comment or "",
    }  # fmt: skip
    with opened(**where) as store:
        if forgotten:
            found = [one for one in store.forgotten() if tag in (None, one.tag)][:limit]
        else:
            found = store.checkpoints(limit, tag)
        table(found, columns, as_json)


@checkpoint.command()
@store_options
@json_option
@guarded
def tree(as_json: bool, **where: Any) -> None:
    """Draw the lineage."""
    with opened(**where) as store:
        found = store.tree()
    if as_json:
        click.echo(json.dumps([plain(one) for one in found]))
        return
    for before, one in drawn(found):
        click.echo(before + _label(one))


def _label(one: Ancestor) -> str:
    state = "" if one.state == "kept" else f"({one.state})"
    words = [one.id, state, one.comment or "", f"[{one.tag}]" if one.tag else ""]
    return printable(" ".join(filter(None, words)))


@checkpoint.command("show")
@click.argument("id")
@click.option("--left-out", is_flag=True, help="Only what was left out: all of it, and why.")
@store_options
@json_option
@guarded
def show_(id: str, left_out: bool, as_json: bool, **where: Any) -> None:
    """One checkpoint: what it holds, what was left out, its lineage."""
    with opened(**where) as store:
        if left_out:
            rows = [{"path": path, "why": why} for path, why in store.left_out(id).items()]
            table(rows, {"why": lambda row: row["why"], "path": lambda row: row["path"]}, as_json)
            return
        found = plain(store.get(id))
        found["lineage"] = [ancestor.id for ancestor in store.lineage(id)]
        show(found, as_json)


@checkpoint.command()
@click.argument("a")
@click.argument("b")
@click.option("--times/--no-times", default=True, help="Count what only was touched.")
@click.option("--all", "everything", is_flag=True, help="Also folders of which something inside is listed.")
@store_options
@json_option
@guarded
def diff(a: str, b: str, times: bool, everything: bool, as_json: bool, **where: Any) -> None:
    """What changed from one checkpoint to another."""
    with opened(**where) as store:
        found = list(store.diff(a, b, times))
    table(
        found if everything or as_json else _telling(found),
        {"change": lambda c: c.change, "path": _named, "what": lambda c: " ".join(c.what)},
        as_json,
    )


def _named(change: Change) -> str:
    """A file by its path; what is no file says what it is."""
    if change.kind not in STATES:
        return change.path
    told = f"{change.old} -> {change.new}" if change.old or change.new else change.path
    return told if told == change.kind else f"{change.kind} {told}"


def _telling(changes: list[Change]) -> list[Change]:
    """Without the folders that are there only for what is listed inside them: a folder of the base is stored, and counts as
    added, once something in it is."""
    states = [c for c in changes if c.kind in STATES]
    found = [
        c
        for c in changes
        if c.kind not in STATES
        and ((c.change, c.kind) != ("changed", "dir") or not {"content", "time"}.issuperset(c.what))
    ]
    above = {str(folder) for change in found for folder in PurePosixPath(change.path).parents}
    return [*(c for c in found if c.kind != "dir" or c.change == "changed" or c.path not in above), *states]


FILES = {
    "mode": lambda f: f"{f.mode:o}", "owner": lambda f: f"{f.uid}:{f.gid}", "size": lambda f: str(f.size), "kind": lambda f: f.kind,
    "modified": lambda f: when(f.mtime_ns / 1e9), "path": lambda f: f.path + (f" -> {f.target}" if f.target else ""),
}  # fmt: skip


@checkpoint.command()
@click.argument("id")
@click.argument("path", default="/")
@store_options
@json_option
@guarded
def ls(id: str, path: str, as_json: bool, **where: Any) -> None:
    """List a folder as a checkpoint holds it."""
    with opened(**where) as store:
        table(store.ls(id, path), FILES, as_json)


@checkpoint.command()
@click.argument("id")
@click.argument("path")
@store_options
@guarded
def cat(id: str, path: str, **where: Any) -> None:
    """Print a file of a checkpoint."""
    with opened(**where) as store:
        files, at = store.files(id), 0
        while piece := files.read(path, at, 1 << 20):
            sys.stdout.buffer.write(piece)
            at += len(piece)
        sys.stdout.buffer.flush()


@checkpoint.command()
@click.argument("id")
@click.argument("pattern")
@store_options
@json_option
@guarded
def find(id: str, pattern: str, as_json: bool, **where: Any) -> None:
    """Find files of a checkpoint by a pattern such as '**/*.py'."""
    with opened(**where) as store:
        table(store.find(id, pattern), FILES, as_json)


@checkpoint.command()
@click.argument("id")
@click.argument("to", metavar="FOLDER")
@click.option("--glob", "pattern", help="Only what matches.")
@store_options
@json_option
@guarded
def extract(id: str, to: str, pattern: str | None, as_json: bool, **where: Any) -> None:
    """Write files of a checkpoint into a folder of this machine."""
    with opened(**where) as store, Watch("extracting", as_json) as watch:
        written = store.extract(id, to, pattern, watch.told)
    if as_json:
        show(written, True)
        return
    click.echo(f"wrote {count(written.entries, 'entry', 'entries')} ({size(written.bytes)}) into {to}")
    for note in written.notes:
        click.echo(f"note: {printable(note)}", err=True)


@checkpoint.command()
@click.argument("id")
@click.option("--sandbox", help="Into this one, in place [default: a new sandbox].")
@click.option("--runtime", default="auto", show_default=True, type=click.Choice(["auto", "runc", "crun", "runsc"]))
@click.option("--require", type=click.Choice(["memory", "relaunched", "files"]), default="files", show_default=True)
@store_options
@json_option
@guarded
def restore(id: str, sandbox: str | None, runtime: str, require: Any, as_json: bool, **where: Any) -> None:
    """A sandbox that is what the checkpoint says; prints its id and how much came back."""
    if sandbox is not None and any(where[name] is not None for name in ("url", "endpoint", "region")):
        raise click.UsageError("a sandbox is restored from its own store: leave out --store, --endpoint and --region")
    with Watch("restoring", as_json) as watch:
        if sandbox is not None:
            sb = Sandbox.attach(sandbox, home=where["home"])
            sb.restore(id, require=require, progress=watch.told)
        else:
            store = opened(**where)
            sb = Sandbox(
                from_checkpoint=id,
                store=store,
                runtime=runtime,
                require=require,
                home=where["home"],
                progress=watch.told,
            )
    show({"id": sb.id, **plain(sb.restore_report)}, as_json)


@checkpoint.command()
@click.option("--quick", is_flag=True, help="Look at what is there, do not read all data.")
@store_options
@json_option
@guarded
def verify(quick: bool, as_json: bool, **where: Any) -> None:
    """Read everything and name what is damaged, and which checkpoints suffer."""
    with opened(**where) as store, Watch("verifying", as_json) as watch:
        found = store.verify(not quick, watch.counted)
    if as_json:
        click.echo(json.dumps(plain(found)))
    else:
        for one in found:
            click.echo(" ".join(f"{key}={value}" for key, value in plain(one).items()))
        click.echo("all is well" if not found else f"{len(found)} damaged", err=bool(found))
    sys.exit(5 if found else 0)


@checkpoint.command()
@click.argument("ids", nargs=-1)
@click.option("--keep-last", type=click.IntRange(min=0))
@click.option("--keep-within", help="Such as 7d or 12h.")
@click.option("--keep-tag", "keep_tags", multiple=True)
@click.option("--max-bytes", help="Such as 10g.")
@click.option("--allow-empty", is_flag=True, help="Even the newest of a line, and if the rules keep nothing.")
@click.option("--dry-run", is_flag=True, help="Say what would go and what that frees.")
@store_options
@json_option
@guarded
def forget(
    ids: tuple[str, ...], keep_last: int | None, keep_within: str | None, keep_tags: tuple[str, ...], max_bytes: str | None,
    allow_empty: bool, dry_run: bool, as_json: bool, **where: Any,
) -> None:  # fmt: skip
    """Forget checkpoints, by id or by rules; `sandkeep store gc` frees the space, until then `unforget` takes it back."""
    with opened(**where) as store:
        report = store.forget(
            list(ids) or None,
            keep_last=keep_last,
            keep_within=keep_within,
            keep_tags=keep_tags,
            max_bytes=max_bytes,
            allow_empty=allow_empty,
            dry_run=dry_run,
        )
    show(report, True) if as_json else _say(report)


def _say(report: ForgetReport) -> None:
    columns = {
        "id": lambda one: one.id, "time": lambda one: when(one.info.timestamp) if one.info else "",
        "bytes": lambda one: f"{one.bytes:,}", "comment": lambda one: (one.info.comment or "") if one.info else "(damaged)",
    }  # fmt: skip
    if report.forgotten:
        table(report.forgotten, columns, False)
    many, kept = count(len(report.forgotten), "checkpoint"), f"{report.kept:,} kept"
    free = f"free {report.bytes:,} bytes ({size(report.bytes)})"
    if report.dry_run:
        click.echo(f"would forget {many}, {kept}; `sandkeep store gc` would then {free}")
    else:
        click.echo(f"forgot {many}, {kept}; `sandkeep store gc` will {free}")
        if report.forgotten:
            click.echo("until then `sandkeep checkpoint unforget ID` takes one back", err=True)
    for note in report.notes:
        click.echo(f"note: {printable(note)}", err=True)


@checkpoint.command()
@click.argument("ids", nargs=-1, required=True)
@store_options
@guarded
def unforget(ids: tuple[str, ...], **where: Any) -> None:
    """Take back checkpoints that were forgotten and are not final; prints their ids."""
    with opened(**where) as store:
        for id in ids:
            click.echo(store.unforget(id).id)


@checkpoint.command()
@click.argument("name")
@click.argument("id", required=False)
@click.option("--remove", is_flag=True, help="Take the name away; the checkpoint stays.")
@store_options
@guarded
def name(name: str, id: str | None, remove: bool, **where: Any) -> None:
    """Give a checkpoint a movable name, or take the name away; without an id, show which one has it."""
    if remove and id is not None:
        raise click.UsageError("--remove takes a name and no checkpoint")
    with opened(**where) as store:
        if remove:
            store.unname(name)
        elif id is None:
            click.echo(store.get(name).id)
        else:
            store.name(name, id)


@checkpoint.command()
@click.argument("id")
@click.argument("to", metavar="FILE")
@store_options
@guarded
def export(id: str, to: str, **where: Any) -> None:
    """Write a checkpoint as one self-contained file (- for standard output)."""
    with opened(**where) as store, Watch("exporting") as watch:
        store.export(id, sys.stdout.buffer if to == "-" else to, watch.told)
        sys.stdout.buffer.flush()


@checkpoint.command("import")
@click.argument("file", type=click.File("rb"))
@store_options
@guarded
def import_(file: BinaryIO, **where: Any) -> None:
    """Take in an exported checkpoint; prints its id."""
    with opened(**where, create=True) as store, Watch("importing") as watch:
        taken = store.import_(file, watch.told)
    click.echo(taken)
