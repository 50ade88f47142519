"""The agents' own programs, offline against the stand-in model: a tool call, a checkpoint, a kill, the same conversation again
in a fresh sandbox, and a branch. claude, qwen and codex; with SANDKEEP_TEST_AGENTS=all the others too."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agents_kit import PACKAGES, holds, home_at
from model_stub import Stub, stub
from sandkeep.agents import Agent
from sandkeep.model import WORKSPACE

KEY = "sk-stand-in-9f8e7d6c5b4a39281706f5e4d3c2b1a0"
FIRST = ["claude", "qwen", "codex"]
OTHERS = ["gemini", "kimi", "opencode"] if os.environ.get("SANDKEEP_TEST_AGENTS") == "all" else []


@pytest.fixture
def model() -> Iterator[Stub]:
    with stub() as server:
        yield server


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [*FIRST, *OTHERS])
def test_an_agent_goes_on_with_its_conversation_in_a_fresh_sandbox(kind: str, model: Stub, tmp_path: Path) -> None:
    assert (PACKAGES / kind / "package").exists(), f"{kind} is not here: tools/agents.sh {kind}"
    store = tmp_path / "store"
    base_url = model.url if kind in ("claude", "gemini") else f"{model.url}/v1"
    common: dict[str, Any] = {
        "storage": store, "api_key": KEY, "base_url": base_url, "model": "stub-model", "packages": PACKAGES,
        "system_prompt": "You are tested.",
    }  # fmt: skip
    with home_at(tmp_path / "home") as home:
        agent = Agent(kind, home=home, **common)
        wrote = agent.run(
            f"[[do write {WORKSPACE}/report.txt :: Draft v1]] [[do shell :: cat /proc/[0-9]*/cmdline > argv.txt]] [[memo amber]]",
            timeout=300,
        )
        assert wrote.status == "completed", f"{wrote.stdout[-3000:]}\n{wrote.stderr[-3000:]}"
        assert wrote.text == "STUB turns=1 memo=amber"
        kinds = [event.kind for event in wrote.events]
        assert kinds[0] == "message"
        assert wrote.events[0].role == "user"
        assert kinds.count("tool_call") == kinds.count("tool_result") == 2
        assert "message" in kinds[1:]
        assert wrote.checkpoint is not None, wrote.checkpoint_error
        second = agent.run("[[ask]] [[memo birch]]", timeout=300)
        assert second.text == "STUB turns=2 memo=amber|birch"
        agent.kill()

        with Agent(kind, home=home, **common) as branch:
            other = branch.run("[[ask]] [[memo cedar]]", from_checkpoint=wrote.checkpoint.id, timeout=300)
            assert other.text == "STUB turns=2 memo=amber|cedar"
            assert other.checkpoint.parent_id == second.checkpoint.parent_id == wrote.checkpoint.id
            assert [step.agent["run_id"] for step in branch.log(second.checkpoint.id) if step.agent] == [
                wrote.run_id,
                second.run_id,
            ]

    if kind not in ("claude", "codex"):  # their programs are hundreds of MB; one that travels is enough
        with home_at(tmp_path / "elsewhere") as home, Agent(kind, home=home, **common) as moved:
            last = moved.run(
                "[[do shell :: cat report.txt]] [[memo fir]]", from_checkpoint=second.checkpoint.id, timeout=300
            )
            assert last.text == "STUB turns=3 memo=amber|birch|fir"
            assert [event.text for event in last.events if event.kind == "tool_result" and "Draft v1" in event.text]

    assert any(KEY in str(headers.values()) for _, headers in model.seen), "the model never got the key"
    assert not holds(store, KEY.encode(), KEY[-20:].encode())
