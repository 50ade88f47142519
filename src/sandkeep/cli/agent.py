"""`sandkeep agent …`: run an agent with a live view, list what agents saved, read who did what."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click
from rich.text import Text

from sandkeep.agents import Agent, Event, types
from sandkeep.agents import facts as told
from sandkeep.cli.checkpoint import opened, store_options
from sandkeep.cli.output import guarded, json_option, plain, screen, show, table
from sandkeep.cli.sandbox import pairs
from sandkeep.errors import BadArgument

_STYLES = {"thought": "dim italic", "tool_call": "cyan", "tool_result": "dim", "plan": "magenta", "error": "red"}
_SIGNS = {"thought": "… ", "tool_call": "→ ", "tool_result": "← ", "plan": "☐ ", "error": "! "}
_LINES = 8


@click.group()
def agent() -> None:
    """Run coding agents, keep every step, go on from any of them."""


@agent.command()
@click.argument("type")
@click.argument("prompt")
@click.option(
    "--from", "from_checkpoint", metavar="CHECKPOINT", help="Go on from a checkpoint: an id, a name, or latest."
)
@click.option("--comment", help="Of the checkpoint.")
@click.option("--model")
@click.option("--base-url", help="Where its model is served.")
@click.option(
    "--mode", "workspace_mode", type=click.Choice(["knowledge", "swe"]), default="knowledge", show_default=True
)
@click.option("--system-prompt", help="Written into the agent's prompt file.")
@click.option(
    "--context", "contexts", multiple=True, type=click.Path(exists=True, path_type=Path), help="File or folder."
)
@click.option("--secret", "secrets", multiple=True, metavar="NAME", help="A variable of this shell, given as a secret.")
@click.option("--env", multiple=True, metavar="NAME=VALUE")
@click.option(
    "--schema", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="JSON Schema of the result."
)
@click.option("--timeout", type=float, help="Seconds.")
@click.option("--tag", help="Of the checkpoints [default: a new one].")
@click.option("--scope", type=click.Choice(["all", "workspace"]), help="What checkpoints keep [default: workspace].")
@click.option(
    "--exclude", multiple=True, metavar="PATTERN", help="Left out of checkpoints, as in a .gitignore at the root."
)
@click.option("--sandbox", "sandbox_id", help="Run in this sandbox, and leave it running.")
@click.option("--keep", is_flag=True, help="Leave the sandbox running.")
@store_options
@json_option
@guarded
def run(
    type: str, prompt: str, from_checkpoint: str | None, comment: str | None, contexts: tuple[Path, ...], secrets: tuple[str, ...],
    env: tuple[str, ...], exclude: tuple[str, ...], schema: Path | None, timeout: float | None, sandbox_id: str | None, keep: bool, url: str | None,
    endpoint: str | None, region: str | None, home: Path | None, as_json: bool, **options: Any,
) -> None:  # fmt: skip
    """Run an agent (shell: the prompt is a script) and save its state; ends with the agent's exit code.

    Its key is taken from the agent's own variable (ANTHROPIC_API_KEY, OPENAI_API_KEY …). Ctrl-C ends the run and keeps it.
    """
    missing = [name for name in secrets if name not in os.environ]
    if missing:
        raise BadArgument(f"--secret: {', '.join(missing)} is not set in this shell", "export it first")
    held = Agent(
        type, storage=opened(url, endpoint, region, home, create=True), home=home, sandbox_id=sandbox_id,
        secrets={name: os.environ[name] for name in secrets}, env=pairs(env, "env"),
        context={path.name: path for path in contexts}, exclude=list(exclude) or None, **options,
    )  # fmt: skip
    if not as_json:
        held.on("content", lambda event: draw(event) if event.role != "user" else None)
        held.on("lifecycle", _lived)
    try:
        done = held.run(
            prompt, timeout=timeout, from_checkpoint=from_checkpoint, checkpoint_comment=comment,
            schema=json.loads(schema.read_text()) if schema else None,
        )  # fmt: skip
    finally:
        if not keep and sandbox_id is None:
            held.kill()
    if as_json:
        show(done, True)
    else:
        _ended(done, keep)
    sys.exit(done.exit_code)


def _lived(what: dict[str, Any]) -> None:
    if what["event"] == "checkpoint saved":
        click.echo(f"saved {what['checkpoint']}", err=True)
    elif what["event"] == "checkpoint failed":
        click.echo(f"not saved: {what['error']}", err=True)


def _ended(done: Any, keep: bool) -> None:
    if done.status != "completed":
        click.echo(f"{done.status.replace('_', ' ')}, exit code {done.exit_code}", err=True)
    if done.output is not None:
        click.echo(json.dumps(done.output))
    if done.output_error:
        click.echo(f"no result: {done.output_error}", err=True)
    if keep:
        click.echo(f"running {done.sandbox_id}", err=True)


def draw(event: Event) -> None:
    """One event, shortened where a tool says much."""
    text = event.text
    if event.kind in ("tool_call", "plan"):
        text = f"{event.name} {json.dumps(event.data, ensure_ascii=False)}".strip()
    lines = text.splitlines() or [""]
    if event.kind != "message" and len(lines) > _LINES:
        lines = [*lines[:_LINES], f"… {len(lines) - _LINES} more lines"]
    who = "you: " if event.role == "user" else _SIGNS.get(event.kind, "")
    body = "\n".join(lines)
    if sys.stdout.isatty():
        screen.print(Text(who + body, style="bold" if event.role == "user" else _STYLES.get(event.kind, "")))
    else:
        click.echo(who + body)


@agent.command("list")
@click.option("--limit", type=int, default=100, show_default=True)
@click.option("--tag")
@store_options
@json_option
@guarded
def list_(
    limit: int,
    tag: str | None,
    url: str | None,
    endpoint: str | None,
    region: str | None,
    home: Path | None,
    as_json: bool,
) -> None:
    """What agents saved, the newest first."""

    def fact(name: str) -> Any:
        return lambda one: str((told.of(one) or {}).get(name) or "")

    columns = {
        "id": lambda one: one.id, "agent": fact("type"), "model": fact("model"), "status": fact("status"),
        "parent": lambda one: one.parent_id or "", "tag": lambda one: one.tag or "", "saved": lambda one: one.timestamp,
        "comment": lambda one: one.comment or "",
    }  # fmt: skip
    with opened(url, endpoint, region, home) as store:
        table([one for one in store.checkpoints(limit, tag) if told.of(one)], columns, as_json)


@agent.command("types")
@json_option
@guarded
def types_(as_json: bool) -> None:
    """The agents that can be run."""
    table(types(), {"agent": str}, as_json)


@agent.command()
@click.argument("checkpoint", default="latest")
@store_options
@json_option
@guarded
def log(
    checkpoint: str, url: str | None, endpoint: str | None, region: str | None, home: Path | None, as_json: bool
) -> None:
    """The lineage of a checkpoint, the oldest first: who did what."""
    with opened(url, endpoint, region, home) as store:
        steps = told.log(store, checkpoint)
    if as_json:
        click.echo(json.dumps([plain(step) for step in steps]))
        return
    for step in steps:
        about = step.agent or {}
        words = (
            step.checkpoint.id,
            step.checkpoint.timestamp,
            about.get("type"),
            about.get("model"),
            about.get("status"),
        )
        line = "  ".join(str(word) for word in (*words, step.checkpoint.comment) if word)
        screen.print(Text(line, style="bold yellow")) if sys.stdout.isatty() else click.echo(line)
        for event in step.events:
            draw(event)
