"""For the tests with E2B's own SDKs: programs in `e2b_programs/`, run by an SDK's interpreter against a real server."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from serving import Served

ROOT = Path(__file__).parents[1]
SDKS = ROOT / ".build" / "e2b"
PROGRAMS = Path(__file__).parent / "e2b_programs"
PATIENCE = 170.0


def environment(served: Served, key: str, **more: str) -> dict[str, str]:
    """What an E2B program is told, and nothing of what this machine may say about another server."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("E2B_")}
    address = {"E2B_API_URL": served.url, "E2B_SANDBOX_URL": served.url, "E2B_API_KEY": key}
    return {**kept, **address, "E2B_VALIDATE_API_KEY": "false", "NO_PROXY": "*", "no_proxy": "*", **more}


def run(served: Served, sdk: str, program: str, *words: str, key: str | None = None, **more: str) -> str:
    """What the program printed; it must end well."""
    folder = SDKS / sdk
    assert (folder / "ready").exists(), "E2B's SDKs are missing: run tools/e2b.sh"
    argv = ["node"] if program.endswith(".mjs") else [str(folder / "bin" / "python")]
    done = subprocess.run(
        [*argv, str(PROGRAMS / program), *words], cwd=folder, env=environment(served, key or served.key(), **more),
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{program} with {sdk}:\n{done.stdout}\n{done.stderr}\nserver:\n{served.log()[-3000:]}"
    return done.stdout
