"""`sandkeep demo`: the main job on the embedded default, each step with its time. Leaves nothing behind."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from typing import TypeVar

import click

from sandkeep.cli.output import guarded
from sandkeep.model import WORKSPACE
from sandkeep.runtime.base import remove
from sandkeep.runtime.elevate import elevated
from sandkeep.sandbox import Sandbox
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.sweeping import gc

T = TypeVar("T")


def step(words: str, act: Callable[[], T], say: Callable[[T], str] = lambda _: "") -> T:
    begun = time.perf_counter()
    result = act()
    took = (time.perf_counter() - begun) * 1000
    click.echo(f"  {took:8.1f} ms  {words}{say(result)}")
    return result


def expect(truth: bool, what: str) -> None:
    if not truth:
        raise AssertionError(f"demo: {what} does not hold")


@click.command()
@click.option("--runtime", default="auto", show_default=True, type=click.Choice(["auto", "runc", "crun", "runsc"]))
@guarded
def demo(runtime: str) -> None:
    """Run, snapshot, rewind, fork, checkpoint, kill and restore a sandbox, in a home of its own."""
    home = tempfile.mkdtemp(prefix="sandkeep-demo-")
    try:
        click.echo("Sandkeep demo: one sandbox, saved, rewound, forked, killed and brought back")
        _show(home, runtime)
        gc(Home(home), cache=True)
    finally:
        elevated(remove, home)  # an ordinary user's sandboxes leave files of subordinate ids
    click.echo("done: nothing was lost, nothing is left")


def _show(home: str, runtime: str) -> None:
    sb = step(
        "create a sandbox", lambda: Sandbox(home=home, runtime=runtime), lambda s: f" {s.id} on {s.info().runtime}"
    )
    try:
        step(
            "run a command",
            lambda: sb.commands.run("echo 'draft v1' > report.txt; export STEP=1; cat report.txt"),
            _said,
        )
        saved = step("snapshot", lambda: sb.snapshot("before the refactor"), lambda s: f" {s.id} ({s.how})")
        step("change everything", lambda: sb.commands.run("echo ruined > report.txt; export STEP=2; rm -rf /etc/hosts"))
        step("rewind", lambda: sb.restore(saved))
        back = step("look again", lambda: sb.commands.run("cat report.txt; echo STEP=$STEP; ls /etc/hosts"), _said)
        expect(back.stdout == "draft v1\nSTEP=1\n/etc/hosts\n", "the rewind")
        other = step("fork", sb.fork, lambda f: f" {f.id}")
        try:
            step(
                "write in the fork",
                lambda: other.commands.run("echo 'from the fork' >> report.txt; wc -l < report.txt"),
                _said,
            )
            expect(sb.files.read(f"{WORKSPACE}/report.txt") == b"draft v1\n", "independence of the fork")
        finally:
            step("kill the fork", other.kill)
        kept = step("checkpoint into the store", lambda: sb.checkpoint("demo"), lambda c: f" {c.id}")
    finally:
        step("kill the sandbox", sb.kill)
    again = step("restore it from the store", lambda: Sandbox(home=home, runtime=runtime, from_checkpoint=kept.id))
    try:
        last = step("and go on", lambda: again.commands.run("cat report.txt; echo STEP=$STEP"), _said)
        expect(last.stdout == "draft v1\nSTEP=1\n", "the restore")
    finally:
        step("kill it", again.kill)


def _said(result: object) -> str:
    return ": " + getattr(result, "stdout", "").strip().replace("\n", " · ")
