"""What the documents say of the tests is so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
NAMED = re.compile(r"`(?:([a-z0-9_]+)::)?(?:…)?([a-z0-9_]*?)(?:…)?`")


def rows() -> list[tuple[str, str]]:
    """(file, part of a test's name) of every test that docs/faults.md names; of a file's second one only the name stands there."""
    found = []
    for line in (ROOT / "docs/faults.md").read_text().splitlines():
        file = ""
        for part in re.findall(r"`[^`]*`", line.rpartition(" | ")[2]) if line.startswith("| ") else []:
            match = NAMED.fullmatch(part)
            if match and (match[1] or (file and part.startswith("`…"))):
                file = match[1] or file
                found.append((file, match[2]))
    return found


@pytest.mark.parametrize(("file", "name"), rows())
def test_each_fault_names_a_test_that_is_there(file: str, name: str) -> None:
    text = (ROOT / "tests" / f"test_{file}.py").read_text()
    assert any(name in test for test in re.findall(r"^(?:async )?def test_(\w+)", text, re.M)), f"{file}: no {name}"


def test_all_rows_are_read() -> None:
    assert len(rows()) > 40
