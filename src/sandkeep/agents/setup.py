"""What an agent finds when it begins: folders, prompt file, context, files, skills, MCP servers. Decides; writes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from sandkeep.agents.events import Masker
from sandkeep.agents.spec import AgentSpec
from sandkeep.errors import BadArgument
from sandkeep.model import HOME, WORKSPACE

Content = bytes | str | Path
Named = Mapping[str, Content]
MODES: dict[str, tuple[str, ...]] = {
    "knowledge": ("context", "scripts", "temp", "output"),
    "swe": ("context", "scripts", "temp", "output", "repo"),
}
TEMP = f"{WORKSPACE}/temp"
RESULT = f"{WORKSPACE}/output/result.json"
_BEGIN, _END = "# sandkeep: begin mcp servers", "# sandkeep: end mcp servers"


def check_mode(mode: str) -> str:
    if mode not in MODES:
        raise BadArgument(f"workspace_mode must be one of {', '.join(MODES)}, not {mode!r}")
    return mode


def folders(mode: str) -> list[str]:
    return [f"{WORKSPACE}/{name}" for name in MODES[mode]]


def files_below(folder: str, named: Named | None, what: str) -> dict[str, bytes]:
    """Path inside → content; a folder of the host is taken with all below it. Nothing leaves `folder`."""
    found: dict[str, bytes] = {}
    if named is not None and not isinstance(named, Mapping):
        raise BadArgument(f"{what} must be a dict of names and contents, not {type(named).__name__}")
    for name, content in (named or {}).items():
        path = PurePosixPath(name) if isinstance(name, str) and name else PurePosixPath("/")
        if path.is_absolute() or ".." in path.parts or "\0" in name:
            raise BadArgument(f"{what}: {name!r} is not a relative path", f"it is taken below {folder}")
        if isinstance(content, Path) and content.is_dir():
            for file in sorted(one for one in content.rglob("*") if one.is_file()):
                found[f"{folder}/{path}/{file.relative_to(content)}"] = _bytes(file, f"{what}: {name}")
        else:
            found[f"{folder}/{path}"] = _bytes(content, f"{what}: {name}")
    return found


def _bytes(content: Content, what: str) -> bytes:
    if isinstance(content, Path):
        try:
            return content.read_bytes()
        except OSError as error:
            raise BadArgument(f"{what} can't be read: {error}")
    if not isinstance(content, (bytes, str)):
        raise BadArgument(f"{what} must be text, bytes or a Path, not {type(content).__name__}")
    return content.encode() if isinstance(content, str) else content


def check_options(
    spec: AgentSpec, system_prompt: str | None, skills: Named | None, servers: Mapping[str, Any] | None, masker: Masker
) -> dict[str, bytes]:
    """Files of the prompt and the skills; whatever this agent has no place for is refused."""
    found: dict[str, bytes] = {}
    if system_prompt is not None:
        found[f"{WORKSPACE}/{spec.prompt_file}"] = _bytes(system_prompt, "system_prompt")
    if skills and not spec.skills:
        raise BadArgument(f"agent {spec.name} has no skills", "leave skills out")
    for name, content in (skills or {}).items():
        whole = isinstance(content, Path) and content.is_dir()
        found |= files_below(f"{HOME}/{spec.skills}", {name if whole else f"{name}/SKILL.md": content}, "skills")
    if servers and not spec.mcp:
        raise BadArgument(f"agent {spec.name} has no MCP servers", "leave mcp_servers out")
    for name, server in (servers or {}).items():
        if not isinstance(server, Mapping) or ("command" in server) == ("url" in server):
            raise BadArgument(f"mcp_servers: {name} must have either command (with args, env) or url")
        text = json.dumps(dict(server))
        if masker.text(text) != text:
            raise BadArgument(
                f"mcp_servers: {name} holds the value of a secret, and its settings are a file of the checkpoint",
                "leave it out of env: servers inherit the agent's environment, where secrets are",
            )
    return found


def mcp_file(spec: AgentSpec, servers: Mapping[str, Any], before: bytes | None) -> bytes:
    """The settings file with these servers in it, whatever else it holds left as it is."""
    assert spec.mcp is not None
    style = spec.mcp[0]
    if style == "toml":
        return _toml(servers, (before or b"").decode())
    try:
        settings = json.loads(before or b"{}")
    except ValueError as error:
        raise BadArgument(f"~/{spec.mcp[1]} is not JSON: {error}", "mend or remove it")
    if style == "opencode":
        settings.setdefault("mcp", {}).update({name: _opencode(server) for name, server in servers.items()})
    else:
        settings.setdefault("mcpServers", {}).update({name: dict(server) for name, server in servers.items()})
    return json.dumps(settings, indent=2).encode()


def _opencode(server: Mapping[str, Any]) -> dict[str, Any]:
    if "url" in server:
        return {"type": "remote", "url": server["url"], "enabled": True}
    command = [server["command"], *server.get("args", [])]
    return {"type": "local", "command": command, "environment": dict(server.get("env", {})), "enabled": True}


def _toml(servers: Mapping[str, Any], before: str) -> bytes:
    if _BEGIN in before:
        head, _, rest = before.partition(_BEGIN)
        before = head + rest.partition(_END)[2].lstrip("\n")
    lines = [_BEGIN]
    for name, server in servers.items():
        lines.append(f"[mcp_servers.{json.dumps(name)}]")
        for key in ("command", "args", "url"):
            if key in server:
                lines.append(f"{key} = {json.dumps(server[key])}")
        if server.get("env"):
            inner = ", ".join(f"{json.dumps(key)} = {json.dumps(value)}" for key, value in server["env"].items())
            lines.append(f"env = {{ {inner} }}")
    kept = before.rstrip("\n")
    return "\n".join([*([kept] if kept else []), *lines, _END, ""]).encode()


def asked(prompt: str, schema: dict[str, Any] | None) -> str:
    """The prompt with the request for structured output."""
    if schema is None:
        return prompt
    return (
        f"{prompt}\n\nWhen you are done, write your result as one JSON document to {RESULT}. "
        f"It must match this JSON Schema:\n{json.dumps(schema)}"
    )


def conversation_place(pattern: str) -> tuple[str, str, int]:
    """Folder to list, pattern of the whole path, and how deep to look."""
    parts = pattern.split("/")
    fixed = next((at for at, part in enumerate(parts) if "*" in part), len(parts) - 1)
    return "/".join([HOME, *parts[:fixed]]), f"{HOME}/{pattern}", len(parts) - fixed


def host_packages(given: str | Path | None, environment: Mapping[str, str]) -> Path | None:
    place = given if given is not None else environment.get("SANDKEEP_AGENT_PACKAGES")
    return Path(place).absolute() if place else None
