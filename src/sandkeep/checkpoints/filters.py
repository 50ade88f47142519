"""Which paths a checkpoint keeps: the scope, and gitignore patterns. Decides; reads nothing."""

from __future__ import annotations

import os
from collections.abc import Sequence

from pathspec import GitIgnoreSpec

from sandkeep.errors import BadArgument
from sandkeep.model import HOME, WORKSPACE

AGENT_FOLDERS = (
    ".claude", ".codex", ".gemini", ".qwen", ".kimi", ".kimi-code",
    ".local/share/opencode", ".config/opencode", ".local/state/opencode", ".sandkeep/events",
)  # fmt: skip
AGENT_FILES = (".claude.json",)
KEY_FILES = tuple(
    f"{HOME}/{name}"
    for name in (
        ".claude/.credentials.json", ".codex/auth.json", ".gemini/oauth_creds.json", ".qwen/oauth_creds.json",
        ".kimi-code/config.toml", ".local/share/opencode/auth.json",
    )
)  # where agents keep keys in clear  # fmt: skip
DEFAULT_EXCLUDE = (
    *(f"{WORKSPACE}/**/{name}" for name in ("node_modules/", "__pycache__/", "*.pyc")),
    *(f"{WORKSPACE}/{name}" for name in (".cache/", ".npm/", ".pip/", "temp/")),
    *KEY_FILES,
)
_ENVIRONMENTS = (b"venv", b".venv")


class Filter:
    """`scope` all or workspace; `exclude` None for the scope's own patterns, or patterns from the sandbox's root."""

    def __init__(self, scope: str = "all", exclude: Sequence[str] | None = None) -> None:
        if scope not in ("all", "workspace"):
            raise BadArgument(f"scope must be 'all' or 'workspace', not {scope!r}")
        if isinstance(exclude, str):
            raise BadArgument("exclude is a list of patterns", f"write [{exclude!r}]")
        if not all(isinstance(pattern, str) and _is_text(pattern) for pattern in exclude or ()):
            raise BadArgument("exclude has a pattern that is no text", "write '*' or '?' for what can't be written")
        self.scope = scope
        self.exclude = None if exclude is None else list(exclude)
        own = exclude is None and scope == "workspace"
        patterns = DEFAULT_EXCLUDE if own else tuple(exclude or ())
        try:
            self._spec = GitIgnoreSpec.from_lines(map(_one_line, patterns)) if patterns else None
        except (ValueError, TypeError) as error:
            raise BadArgument(
                f"exclude has a bad pattern: {error}", "write gitignore patterns, anchored at the root: '/tmp/'"
            )
        self._environments = own
        kept = [WORKSPACE, *(f"{HOME}/{name}" for name in (*AGENT_FOLDERS, *AGENT_FILES))]
        self._kept = [os.fsencode(path.strip("/")) for path in kept] if scope == "workspace" else []
        self.idle = not self._kept and self._spec is None

    def leaves_out(self, path: bytes, folder: bool) -> bool:
        """Whether `path` (relative to the root) and all below it is left out."""
        if self._kept and not any(_meets(path, kept, folder) for kept in self._kept):
            return True
        if self._spec is None:
            return False
        return self._spec.match_file(_one_line(os.fsdecode(path)) + ("/" if folder else ""))

    def leads(self, path: bytes) -> bool:
        """Whether something that the scope keeps lies below `path`."""
        return any(kept.startswith(path + b"/") for kept in self._kept)

    def may_be_environment(self, name: bytes) -> bool:
        """A folder that is left out if, and only if, it holds a pyvenv.cfg."""
        return self._environments and name in _ENVIRONMENTS


def _one_line(text: str) -> str:
    """pathspec's expressions take the end of a line for the end of a name: `*.log` would match "x.log\\n"."""
    return text.replace("\n", "\udc0a")


def _is_text(pattern: str) -> bool:
    return pattern.encode(errors="ignore").decode() == pattern


def _meets(path: bytes, kept: bytes, folder: bool) -> bool:
    return path == kept or path.startswith(kept + b"/") or (folder and kept.startswith(path + b"/"))
