"""An agent as plain data: what it is called, how it is installed, started, continued, configured and understood."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from sandkeep.agents.events import Parser
from sandkeep.agents.parsers import lines
from sandkeep.errors import BadArgument

_NAME = re.compile(r"[a-z][a-z0-9_-]{0,40}")
_HOLE = re.compile(r"\{([a-z_]+)\}")
HOLES = {"prompt", "model", "base_url", "program", "continue"}
TRUSTED = {
    "NODE_EXTRA_CA_CERTS": "/etc/ssl/certs/ca-certificates.crt"
}  # node has a list of its own; use the system's too
Scope = Literal["all", "workspace"]
McpStyle = Literal["claude", "json", "toml", "opencode"]


@dataclass(frozen=True)
class AgentSpec:
    """Words may have holes: {program} {prompt} {model} {base_url}. A group of words, or a variable, whose hole has nothing
    to fill it is left out. {continue} stands for `resume` where a conversation goes on, else for nothing."""

    name: str
    command: Sequence[str | tuple[str, ...]] = ("{prompt}",)
    resume: Sequence[str] = ()
    conversation: str = (
        ""  # below the home folder: a file that matches it means that there is a conversation to continue
    )
    script: bool = False  # the prompt is a script for the shell session, not words for a model
    package: str = ""
    version: str = ""
    install: str = "npm install -g --no-audit --no-fund --loglevel=error --prefix {into} {package}@{version}"
    program: str = ""  # below where it is installed, or a name on the PATH
    state: Sequence[str] = ()  # the agent's own folders below home
    scope: Scope = "all"  # what its checkpoints keep, unless the Agent says otherwise
    settings: Mapping[str, str] = field(default_factory=dict)  # files below home that it needs, written where missing
    private: Sequence[str] = ()  # files below home that may hold a key: never in a checkpoint
    key: str = ""  # the variable of its key; "" needs none
    env: Mapping[str, str] = field(default_factory=dict)
    default_base_url: str = ""
    prompt_file: str = "AGENTS.md"
    skills: str = ""  # folder below home
    mcp: tuple[McpStyle, str] | None = None  # style, and file below home
    network: Literal["none", "host"] = "host"
    parser: Parser = lines

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise BadArgument(f"{self.name!r} is not an agent's name", "small letters, digits, - and _")
        words = [word for group in self.command for word in ((group,) if isinstance(group, str) else group)]
        unknown = {hole for word in (*words, *self.env.values()) for hole in _HOLE.findall(word)} - HOLES
        if unknown:
            raise BadArgument(f"agent {self.name}: nothing fills {sorted(unknown)}", f"holes are {sorted(HOLES)}")
        if "{prompt}" not in words:
            raise BadArgument(f"agent {self.name}: the command has no word '{{prompt}}'")
        if self.package and not (self.version and self.program):
            raise BadArgument(f"agent {self.name}: a package needs its version and its program")

    @property
    def into(self) -> str:
        """Where it is installed inside the sandbox."""
        return f"/opt/agents/{self.name}"

    def argv(self, prompt: str, model: str | None, base_url: str | None, continuing: bool) -> list[str]:
        program = f"{self.into}/{self.program}" if self.package else self.program
        values = {"prompt": prompt, "model": model, "base_url": base_url or self.default_base_url, "program": program}
        found: list[str] = []
        for group in self.command:
            if group == "{continue}":
                found += self.resume if continuing else ()
                continue
            words = [_filled(word, values) for word in ((group,) if isinstance(group, str) else group)]
            found += [word for word in words if word is not None] if None not in words else []
        return found

    def environment(self, model: str | None, base_url: str | None) -> dict[str, str]:
        values = {"model": model, "base_url": base_url or self.default_base_url}
        filled = {name: _filled(value, values) for name, value in self.env.items()}
        return {name: value for name, value in filled.items() if value is not None}


def _filled(word: str, values: Mapping[str, str | None]) -> str | None:
    """In one pass, so that what fills a hole is never looked at for holes."""
    if any(hole in values and not values[hole] for hole in _HOLE.findall(word)):
        return None
    return _HOLE.sub(lambda hole: str(values.get(hole[1], hole[0])), word)
