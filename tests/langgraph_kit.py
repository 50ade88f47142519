"""What the tests of the LangGraph saver share.

(PYTEST_DONT_REWRITE, as in `serving`.)
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from langgraph.checkpoint.base import empty_checkpoint

from sandkeep.langgraph import CheckpointSaver


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[CheckpointSaver]:
    with CheckpointSaver(tmp_path / "threads") as made:
        yield made


def at(thread: str, id: str | None = None, namespace: str = "") -> Any:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, **({"checkpoint_id": id} if id else {})}}


def put(
    saver: CheckpointSaver,
    thread: str,
    values: dict[str, Any] | None = None,
    parent: str | None = None,
    id: str = "",
    **about: Any,
) -> Any:
    """A checkpoint whose channels are all at version 1, as the crudest caller would write it."""
    checkpoint = empty_checkpoint()
    checkpoint["id"] = id or checkpoint["id"]
    checkpoint["channel_values"] = values or {}
    checkpoint["channel_versions"] = dict.fromkeys(values or {}, 1)
    return saver.put(
        at(thread, parent), checkpoint, {"source": "loop", "step": 0, **about}, checkpoint["channel_versions"]
    )  # type: ignore[typeddict-item]
