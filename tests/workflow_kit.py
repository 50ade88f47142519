"""What the tests of workflow state share.

(PYTEST_DONT_REWRITE, as in `serving`.)
"""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where managers keep their sessions."""
    return tmp_path / "sessions"
