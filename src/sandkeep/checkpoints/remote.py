"""Capturing and unpacking in another process: module-level functions whose arguments can be pickled."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sandkeep.checkpoints.capture import Source, capture
from sandkeep.checkpoints.unpack import Unpacked, unpack, unpack_attachment
from sandkeep.model import CheckpointInfo
from sandkeep.store.objects import open_objects
from sandkeep.store.repository import Repository


@dataclass(frozen=True)
class RepositorySpec:
    """How to open a repository; `options` are open_objects' own and may hold keys, so they are not shown."""

    url: str
    cache: Path
    options: Mapping[str, Any] = field(default_factory=dict, repr=False)

    def open(self, create: bool = True) -> Repository:
        return Repository.open(open_objects(self.url, **self.options), self.cache, create=create)


def capture_here(spec: RepositorySpec, source: Source, **how: Any) -> CheckpointInfo:
    with spec.open() as repo:
        return capture(repo, source, **how)


def unpack_here(spec: RepositorySpec, checkpoint: str, to: Path, **how: Any) -> Unpacked:
    with spec.open(create=False) as repo:
        return unpack(repo, checkpoint, to, **how)


def unpack_attachment_here(spec: RepositorySpec, checkpoint: str, name: str, to: Path) -> Unpacked:
    with spec.open(create=False) as repo:
        return unpack_attachment(repo, checkpoint, name, to)
