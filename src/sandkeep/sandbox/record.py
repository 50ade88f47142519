"""What a sandbox is, on disk: `record.json`. Whoever changes it holds the sandbox's lock."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

from sandkeep.model import Limits, Mount, State
from sandkeep.sandbox.home import read_json, write_json


@dataclass
class Record:
    id: str
    runtime: str
    base: str
    stack: list[str] = field(default_factory=list)  # layer ids, top first
    top: int = 0  # number of the writable top
    copied: list[str] = field(
        default_factory=list
    )  # the stack that shows what the last copy of the top saw; empty: never copied
    state: State = State.CREATING
    limits: Limits = field(default_factory=Limits)
    network: Literal["none", "host"] = "none"
    mounts: list[Mount] = field(default_factory=list)
    hostname: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    forked_from: str | None = None
    created: float = field(default_factory=time.time)
    store: str | None = None  # address of the store its checkpoints go to; None is the home's own
    store_options: dict[str, Any] = field(default_factory=dict)
    parent: str | None = None  # checkpoint that the next one descends from
    parent_stack: list[str] = field(default_factory=list)  # the layers which that checkpoint stands for
    paused: dict[str, Any] | None = None  # how it sleeps: checkpoint, memory image
    notes: list[str] = field(default_factory=list)

    def shown(self) -> list[str]:
        """The layers under what changed since the last save."""
        return list(self.copied or self.stack)

    def used_layers(self) -> set[str]:
        return {*self.stack, *self.copied, *self.parent_stack}

    def save(self, folder: Path, *, durable: bool = True) -> None:
        write_json(folder / "record.json", dataclasses.asdict(self), durable=durable)

    @classmethod
    def load(cls, folder: Path) -> Record:
        data = cast("dict[str, Any]", read_json(folder / "record.json"))
        data["state"] = State(data["state"])
        data["limits"] = Limits(**data["limits"])
        data["mounts"] = [Mount(**mount) for mount in data["mounts"]]
        return cls(**data)
