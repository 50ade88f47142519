"""`sandkeep sandbox …` and `sandkeep gc`."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import click

from sandkeep.cli.output import comment_option, count, guarded, json_option, plain, show, size, table, when
from sandkeep.cli.terminal import attach
from sandkeep.errors import BadArgument
from sandkeep.model import Limits, Mount, SandboxInfo
from sandkeep.sandbox import Sandbox, killing, purging
from sandkeep.sandbox._sync.commands import MAX_OUTPUT, Collector, run_fields
from sandkeep.sandbox.checking import check as check_layers
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc as sweep

ALL_OUTPUT = 1 << 62


def folder(text: str) -> Path:
    """Not the one that is current, for lack of a name."""
    if not text:
        raise ValueError("no folder")
    return Path(text)


home_option = click.option(
    "--home", type=folder, metavar="FOLDER", help="Where sandboxes live [default: $SANDKEEP_HOME or ~/.sandkeep]."
)


@click.group()
def sandbox() -> None:
    """Create, use, save, rewind and fork sandboxes."""


def pairs(items: tuple[str, ...], what: str) -> dict[str, str]:
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise BadArgument(f"{what} {item!r} has no '='", f"write --{what} NAME=VALUE")
        found[name] = value
    return found


def mount(text: str) -> Mount:
    host, _, rest = text.partition(":")
    guest, _, mode = rest.partition(":")
    if not guest or mode not in ("", "ro", "rw"):
        raise BadArgument(f"mount {text!r} is not HOST:GUEST[:rw]")
    return Mount(host, guest, readonly=mode != "rw")


def limits_of(memory: str | None, cpus: float | None, pids: int | None) -> Limits | None:
    if memory is None and cpus is None and pids is None:
        return None
    return Limits(memory=memory, cpus=cpus, **({} if pids is None else {"pids": pids}))


@sandbox.command()
@click.option("--base", default="host", show_default=True, help="host, a root filesystem folder, or a tar of one.")
@click.option("--runtime", default="auto", show_default=True, type=click.Choice(["auto", "runc", "crun", "runsc"]))
@click.option("--env", multiple=True, metavar="NAME=VALUE")
@click.option("--memory", help="Limit, such as 512m.")
@click.option("--cpus", type=float)
@click.option("--pids", type=int, help="Limit [default: 4096 where the host can].")
@click.option("--network", type=click.Choice(["none", "host"]), default="none", show_default=True)
@click.option("--mount", "mounts", multiple=True, metavar="HOST:GUEST[:rw]")
@click.option("--from", "from_checkpoint", metavar="CHECKPOINT", help="A checkpoint's id, a name, or latest.")
@click.option("--store", help="Where its checkpoints go [default: the home's own store].")
@home_option
@json_option
@guarded
def create(
    base: str, runtime: str, env: tuple[str, ...], memory: str | None, cpus: float | None, pids: int | None, network: Any,
    mounts: tuple[str, ...], from_checkpoint: str | None, store: str | None, home: Path | None, as_json: bool,
) -> None:  # fmt: skip
    """Create a sandbox and print its id."""
    made = Sandbox(
        base=base, runtime=runtime, env=pairs(env, "env"), limits=limits_of(memory, cpus, pids), network=network,
        mounts=[mount(text) for text in mounts], from_checkpoint=from_checkpoint, store=store, home=home,
    )  # fmt: skip
    if as_json:
        show(made.info(), True)
    else:
        click.echo(made.id)


@sandbox.command("list")
@home_option
@json_option
@guarded
def list_(home: Path | None, as_json: bool) -> None:
    """All sandboxes of this home, oldest first."""
    columns = {
        "id": lambda s: s.id, "state": lambda s: str(s.state), "runtime": lambda s: s.runtime, "base": lambda s: s.base,
        "created": lambda s: when(s.created), "from": lambda s: s.forked_from or "",
    }  # fmt: skip
    table(Sandbox.list(home=home), columns, as_json)


@sandbox.command()
@click.argument("id")
@home_option
@json_option
@guarded
def info(id: str, home: Path | None, as_json: bool) -> None:
    """Everything about one sandbox."""
    found = Sandbox.attach(id, home=home).info()
    show(found if as_json else readable(found), as_json)


def readable(found: SandboxInfo) -> dict[str, Any]:
    limits = found.limits
    most = {
        "memory": None if limits.memory is None else size(int(limits.memory)),
        "cpus": limits.cpus,
        "pids": limits.pids,
        "disk": None if limits.disk is None else size(int(limits.disk)),
    }
    return {
        **plain(found),
        "created": when(found.created),
        "limits": ", ".join(f"{name} {value}" for name, value in most.items() if value is not None) or "none",
        "mounts": [
            f"{one.host} at {one.guest} ({'read-only' if one.readonly else 'writable'})" for one in found.mounts
        ],
    }


@sandbox.command(context_settings={"ignore_unknown_options": True})
@click.argument("id")
@click.argument("command", nargs=-1, required=True)
@click.option("--timeout", type=float, help="Seconds.")
@click.option("--cwd")
@click.option("--user")
@home_option
@json_option
@guarded
def exec(
    id: str,
    command: tuple[str, ...],
    timeout: float | None,
    cwd: str | None,
    user: str | None,
    home: Path | None,
    as_json: bool,
) -> None:
    """Run a command in the shell session; ends with its exit code.

    One word is a command line for the shell: 'cd src && ls *.py'. Of several words each reaches the program as it is:
    exec ID -- python3 -c 'print(1)'. Input that is no terminal is passed on as it comes.
    """
    signal.signal(signal.SIGINT, _interrupted)
    sb = Sandbox.connect(id, home=home)
    stdin = None if sys.stdin is None or sys.stdin.isatty() else Input(sys.stdin.fileno())
    line = command[0] if len(command) == 1 else shlex.join(command)
    most = MAX_OUTPUT if as_json else ALL_OUTPUT
    fields = run_fields(line, timeout=timeout, cwd=cwd, user=user, max_output=most)
    if not as_json:
        sys.exit(_through(sb, fields, stdin))
    collected = Collector(None, None, most, sure=True)
    with sb.commands._link.stream("run", fields, body=stdin, timeout=None) as events:
        for kind, data in events:
            collected.take(kind, data)
        result = collected.result(events.result)
    shown = ("stdout", "stderr", "exit_code", "duration_ms", "error_class", "truncated")
    show({name: getattr(result, name) for name in shown}, True)
    sys.exit(result.exit_code)


def _interrupted(*_: object) -> NoReturn:
    """Ctrl-C, however often: leaving ends the command inside and all that it started."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.exit(130)


class Input:
    """A descriptor's bytes as they come: the command starts at once, and ends without waiting for more."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def __iter__(self) -> Iterator[bytes]:
        while data := os.read(self._descriptor, 64 << 10):
            yield data


def _through(sb: Sandbox, fields: dict[str, Any], stdin: Input | None) -> int:
    """Every byte as it comes, however many there are; the exit code."""
    streams = {"stdout": sys.stdout.buffer, "stderr": sys.stderr.buffer}
    with sb.commands._link.stream("run", fields, body=stdin, timeout=None) as events:
        for kind, data in events:
            if kind in streams:
                streams[kind].write(data)
                streams[kind].flush()
        return int(events.result["exit_code"])


@sandbox.command()
@click.argument("id")
@home_option
@guarded
def shell(id: str, home: Path | None) -> None:
    """An interactive shell with a real terminal."""
    sys.exit(attach(Sandbox.connect(id, home=home)))


@sandbox.command()
@click.argument("ids", nargs=-1)
@click.option("--all", "every", is_flag=True, help="Every sandbox of this home.")
@home_option
@guarded
def kill(ids: tuple[str, ...], every: bool, home: Path | None) -> None:
    """End sandboxes and remove them from this host. Checkpoints stay in their store."""
    if every == bool(ids):
        raise BadArgument("name sandboxes, or say --all", "`sandkeep sandbox list` shows them")
    found = Home(home)
    if every:
        purging.kill_all(found)
        return
    for id in ids:
        found.existing(id)
    for error in killing.kill_all(found, ids).values():
        raise error


@sandbox.command()
@click.argument("id")
@comment_option
@home_option
@json_option
@guarded
def snapshot(id: str, comment: str | None, home: Path | None, as_json: bool) -> None:
    """Save the state on this host; prints the snapshot's id."""
    made = Sandbox.connect(id, home=home).snapshot(comment or "")
    show(made, True) if as_json else click.echo(made.id)


@sandbox.command()
@click.argument("id")
@home_option
@json_option
@guarded
def snapshots(id: str, home: Path | None, as_json: bool) -> None:
    """The snapshots of a sandbox, oldest first."""
    columns = {
        "id": lambda s: s.id,
        "taken": lambda s: when(s.timestamp),
        "how": lambda s: s.how,
        "comment": lambda s: s.comment,
    }
    table(Sandbox.attach(id, home=home).snapshots(), columns, as_json)


@sandbox.command()
@click.argument("id")
@click.argument("to", metavar="SNAPSHOT|CHECKPOINT")
@click.option("--keep", is_flag=True, help="Start recorded background processes again.")
@home_option
@json_option
@guarded
def restore(id: str, to: str, keep: bool, home: Path | None, as_json: bool) -> None:
    """Make the sandbox be what a snapshot or checkpoint says."""
    show(Sandbox.attach(id, home=home).restore(to, keep=keep), as_json)


@sandbox.command()
@click.argument("id")
@click.option("--count", "number", type=int, default=1, show_default=True)
@click.option("--memory", is_flag=True, help="Live copies, processes and memory too (runsc).")
@home_option
@json_option
@guarded
def fork(id: str, number: int, memory: bool, home: Path | None, as_json: bool) -> None:
    """New sandboxes from this one as it is now; prints their ids."""
    found = Sandbox.connect(id, home=home).fork(number, memory=memory)
    made = [one for one in found if isinstance(one, Sandbox)]
    click.echo(json.dumps([plain(one.info()) for one in made]) if as_json else "\n".join(one.id for one in made))
    for one in found:
        if not isinstance(one, Sandbox):
            raise one


@sandbox.command()
@click.argument("id")
@comment_option
@home_option
@json_option
@guarded
def pause(id: str, comment: str | None, home: Path | None, as_json: bool) -> None:
    """Put it to sleep in its store; frees its memory and processes."""
    made = Sandbox.connect(id, home=home).pause(comment)
    if not as_json:
        for note in made.notes:
            click.echo(note, err=True)
    show(made, True) if as_json else click.echo(made.id)


@sandbox.command()
@click.argument("id")
@home_option
@json_option
@guarded
def resume(id: str, home: Path | None, as_json: bool) -> None:
    """Wake a paused sandbox and say how much came back."""
    show(Sandbox.attach(id, home=home).resume(), as_json)


@click.command()
@click.option("--yes", is_flag=True, help="Do not ask.")
@home_option
@guarded
def purge(yes: bool, home: Path | None) -> None:
    """Kill every sandbox of this home, then remove the home, its own store of checkpoints too."""
    found = Home(home)
    purging.check(found)
    if not yes:
        click.confirm(
            f"remove {found.path} with all of its sandboxes and the checkpoints in its own store?", abort=True
        )
    for name in purging.purge(found):
        click.echo(f"left: {found.path / name}, which purge does not remove", err=True)


@click.command()
@click.option("--dry-run", is_flag=True, help="Say what would go, remove nothing.")
@click.option("--cache", is_flag=True, help="Also layers that are kept only to restore checkpoints quickly.")
@click.option(
    "--check", is_flag=True, help="Remove nothing: name what is wrong with the layers here; exit code 5 if anything is."
)
@home_option
@json_option
@guarded
def gc(dry_run: bool, cache: bool, check: bool, home: Path | None, as_json: bool) -> None:
    """Finish what crashes left, drop layers that nobody uses, empty the trash."""
    if check:
        _check(Home(home), as_json)
    swept = sweep(Home(home), dry_run=dry_run, cache=cache)
    if as_json:
        show(swept, True)
    elif swept.sandboxes or swept.layers or swept.leftovers:
        gone = [count(len(swept.layers), "layer")] if swept.layers else []
        gone += [count(len(swept.sandboxes), "unfinished sandbox", "unfinished sandboxes")] if swept.sandboxes else []
        gone += [count(len(swept.leftovers), "leftover")] if swept.leftovers else []
        click.echo(f"{'would remove' if dry_run else 'removed'} {', '.join(gone)}")
    else:
        click.echo("nothing to do")


def _check(home: Home, as_json: bool) -> NoReturn:
    found = check_layers(home)
    if as_json:
        show([{"layer": one.tree.parent.name, "path": f"/{one.path}", "why": one.why} for one in found], True)
    else:
        for one in found:
            click.echo(f"{one.tree.parent.name} /{one.path}: {one.why}")
        click.echo(f"{count(len(found), 'break')} of the rules" if found else "every layer keeps the rules")
    sys.exit(5 if found else 0)
