"""What a user says about an agent, checked whole before anything happens."""

from __future__ import annotations

import os
import secrets as random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sandkeep.agents import registry, setup
from sandkeep.agents.events import Masker
from sandkeep.agents.setup import Named
from sandkeep.agents.spec import AgentSpec, Scope
from sandkeep.checkpoints.catalog import Store
from sandkeep.checkpoints.filters import KEY_FILES, Filter
from sandkeep.checkpoints.records import check_words
from sandkeep.errors import BadArgument
from sandkeep.model import HOME, WORKSPACE, Limits, Mount
from sandkeep.sandbox.home import Home
from sandkeep.sandbox.lifecycle import check_variables

Storage = Store | str | Path | Mapping[str, Any] | Literal[False] | None
MOST_PROMPT = 120_000  # bytes; one word of a command line can't be longer than 128 KiB


@dataclass
class Options:
    type: str = "shell"
    storage: Storage = None
    api_key: str | None = field(default=None, repr=False)
    base_url: str | None = None
    model: str | None = None
    workspace_mode: str = "knowledge"
    system_prompt: str | None = None
    context: Named | None = None
    files: Named | None = None
    mcp_servers: Mapping[str, Any] | None = None
    skills: Named | None = None
    secrets: dict[str, str] | None = field(default=None, repr=False)
    env: dict[str, str] | None = None
    sandbox_id: str | None = None
    tag: str | None = None
    keep_failed: bool = True
    scope: Scope | None = None
    exclude: Sequence[str] | None = None
    network: Literal["none", "host"] | None = None
    runtime: str = "auto"
    limits: Limits | None = None
    mounts: list[Mount] | None = None
    packages: str | Path | None = None
    home: str | Path | None = None

    def __post_init__(self) -> None:
        self.spec: AgentSpec = registry.find(self.type)
        self.place = Home(self.home)
        setup.check_mode(self.workspace_mode)
        check_words(self.tag, None, None, {"name": "", "fingerprint": ""})
        self.tag = self.tag or f"{self.type}-{random.token_hex(6)}"
        self.kept: dict[str, Any] = self._kept()
        self.all_secrets = self._secrets()
        self.masker = Masker(self.all_secrets)
        self.prepared = {
            **setup.check_options(self.spec, self.system_prompt, self.skills, self.mcp_servers, self.masker),
            **setup.files_below(f"{WORKSPACE}/context", self.context, "context"),
            **setup.files_below(WORKSPACE, self.files, "files"),
        }
        self.host_packages = setup.host_packages(self.packages, os.environ)

    def _kept(self) -> dict[str, Any]:
        """What is kept in checkpoints of runs; keys in clear never are."""
        scope = self.spec.scope if self.scope is None else self.scope
        Filter(scope, self.exclude)
        self._check_state(Filter(scope, []))
        if scope == "workspace" and self.exclude is None:
            return {"scope": scope, "exclude": None}
        return {"scope": scope, "exclude": [*(self.exclude or ()), *KEY_FILES]}

    def _check_state(self, rules: Filter) -> None:
        own = (*self.spec.state, *([self.spec.conversation.split("*")[0].strip("/")] if self.spec.conversation else []))
        lost = [name for name in own if rules.leaves_out(f"{HOME}/{name}".strip("/").encode(), folder=True)]
        if lost:
            raise BadArgument(
                f"scope 'workspace' leaves out what agent {self.type} keeps in ~/{lost[0]}",
                "use scope='all', with exclude",
            )

    def _secrets(self) -> dict[str, str]:
        found = check_variables("secrets", self.secrets)
        key = self.spec.key
        if self.api_key is not None and not key:
            raise BadArgument(f"agent {self.type} takes no api_key", "give what its commands need in secrets")
        if key and key not in found:
            value = self.api_key or os.environ.get(key)
            if not value:
                raise BadArgument(f"agent {self.type} needs a key", f"give api_key, or set {key}")
            found |= check_variables("api_key", {key: value})
        return found

    def open_store(self) -> Store | None:
        """None where storage is off."""
        if self.storage is False:
            return None
        if isinstance(self.storage, Store):
            return self.storage
        if isinstance(self.storage, Mapping):
            return Store(**self.storage, home=self.place.path)
        return Store(self.storage, home=self.place.path)

    def sandbox(self) -> dict[str, Any]:
        about = {"agent": {"type": self.type, "workspace_mode": self.workspace_mode}}
        return {
            "runtime": self.runtime, "env": self.env, "secrets": self.all_secrets, "limits": self.limits, "mounts": self.mounts,
            "network": self.network or self.spec.network, "metadata": about,
        }  # fmt: skip

    def mcp_path(self) -> str | None:
        return f"{HOME}/{self.spec.mcp[1]}" if self.mcp_servers and self.spec.mcp else None


def check_prompt(prompt: str) -> str:
    if not isinstance(prompt, str) or not prompt.strip() or "\0" in prompt:
        raise BadArgument("a prompt is a text that is not empty, without NUL")
    if len(prompt.encode(errors="replace")) > MOST_PROMPT:
        raise BadArgument(
            f"the prompt is longer than {MOST_PROMPT} bytes", "put the long part into a file: context={'notes.md': …}"
        )
    return prompt
