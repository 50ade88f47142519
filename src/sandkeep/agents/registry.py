"""The agents that are known, and `register` for your own. Plain data; versions are those that the tests ran."""

from __future__ import annotations

import json

from sandkeep.agents import parsers
from sandkeep.agents.spec import TRUSTED, AgentSpec
from sandkeep.errors import BadArgument

_COMMON = {**TRUSTED, "CI": "1", "NO_COLOR": "1"}
_OPENCODE = {
    "provider": {
        "sandkeep": {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": "{base_url}", "apiKey": "{env:OPENCODE_API_KEY}"},
            "models": {"{model}": {}},
        }
    }
}
_CODEX = (
    'model_providers.sandkeep={name="sandkeep",base_url="{base_url}",env_key="OPENAI_API_KEY",wire_api="responses"}'
)

_BUILT_IN = (
    AgentSpec("shell", script=True, scope="workspace", network="none", prompt_file="AGENTS.md"),
    AgentSpec(
        "claude", scope="workspace",
        package="@anthropic-ai/claude-code", version="2.1.197", program="bin/claude",
        command=("{program}", "-p", "{prompt}", ("--model", "{model}"), "--output-format", "stream-json", "--verbose",
                 "--dangerously-skip-permissions", "{continue}"),
        resume=("--continue",), conversation=".claude/projects/*/*.jsonl",
        state=(".claude", ".claude.json"), private=(".claude/.credentials.json",), key="ANTHROPIC_API_KEY",
        env={**_COMMON, "ANTHROPIC_BASE_URL": "{base_url}", "IS_SANDBOX": "1", "DISABLE_AUTOUPDATER": "1",
             "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"},
        prompt_file="CLAUDE.md", skills=".claude/skills", mcp=("claude", ".claude.json"), parser=parsers.claude,
    ),
    AgentSpec(
        "codex", scope="workspace",
        package="@openai/codex", version="0.166.0", program="bin/codex",
        command=("{program}", "exec", ("--model", "{model}"), "--dangerously-bypass-approvals-and-sandbox",
                 "--skip-git-repo-check", "--json", "-c", "model_provider=sandkeep", "-c", _CODEX, "{continue}", "{prompt}"),
        resume=("resume", "--last"), conversation=".codex/sessions/*/*/*/rollout-*.jsonl",
        state=(".codex",), private=(".codex/auth.json",), key="OPENAI_API_KEY", default_base_url="https://api.openai.com/v1",
        env=_COMMON, skills=".codex/skills", mcp=("toml", ".codex/config.toml"), parser=parsers.codex,
    ),
    AgentSpec(
        "gemini", scope="workspace",
        package="@google/gemini-cli", version="0.61.0", program="bin/gemini",
        command=("{program}", "--prompt", "{prompt}", ("--model", "{model}"), "--yolo", "--output-format", "stream-json",
                 "{continue}"),
        resume=("--resume", "latest"), conversation=".gemini/tmp/*/chats/*",
        settings={".gemini/settings.json": '{"security": {"auth": {"selectedType": "gemini-api-key"}}}'},
        state=(".gemini",), private=(".gemini/oauth_creds.json",), key="GEMINI_API_KEY",
        env={**_COMMON, "GOOGLE_GEMINI_BASE_URL": "{base_url}", "GEMINI_CLI_TRUST_WORKSPACE": "true"},
        prompt_file="GEMINI.md", skills=".gemini/skills", mcp=("json", ".gemini/settings.json"), parser=parsers.gemini,
    ),
    AgentSpec(
        "qwen", scope="workspace",
        package="@qwen-code/qwen-code", version="0.15.10", program="bin/qwen",
        command=("{program}", "{prompt}", "--auth-type", "openai", ("--model", "{model}"), "--yolo", "--output-format",
                 "stream-json", "{continue}"),
        resume=("--continue",), conversation=".qwen/projects/*/chats/*.jsonl",
        state=(".qwen",), private=(".qwen/oauth_creds.json",), key="OPENAI_API_KEY",
        env={**_COMMON, "OPENAI_BASE_URL": "{base_url}"},
        prompt_file="QWEN.md", skills=".qwen/skills", mcp=("json", ".qwen/settings.json"), parser=parsers.claude,
    ),
    AgentSpec(
        "kimi", scope="workspace",
        package="@moonshot-ai/kimi-code", version="2.1.0", program="bin/kimi",
        install="npm install -g --no-audit --no-fund --loglevel=error --prefix {into} node@22.23.3 {package}@{version}",
        command=("/opt/agents/kimi/bin/node", "{program}", "-p", "{prompt}", "--output-format", "stream-json", "{continue}"),
        resume=("--continue",), conversation=".kimi-code/sessions/*/*",
        state=(".kimi-code",), private=(".kimi-code/config.toml",), key="KIMI_MODEL_API_KEY",
        env={**_COMMON, "KIMI_MODEL_BASE_URL": "{base_url}", "KIMI_MODEL_NAME": "{model}", "KIMI_MODEL_PROVIDER_TYPE": "openai"},
        skills=".kimi-code/skills", mcp=("json", ".kimi-code/mcp.json"), parser=parsers.kimi,
    ),
    AgentSpec(
        "opencode", scope="workspace",
        package="opencode-ai", version="1.18.33", program="bin/opencode",
        command=("{program}", "run", ("--model", "sandkeep/{model}"), "--format", "json", "{continue}", "{prompt}"),
        resume=("--continue",), conversation=".local/share/opencode/opencode.db",
        state=(".local/share/opencode", ".config/opencode", ".local/state/opencode"),
        private=(".local/share/opencode/auth.json",), key="OPENCODE_API_KEY", default_base_url="https://api.openai.com/v1",
        env={**_COMMON, "OPENCODE_PERMISSION": '{"*": "allow", "external_directory": "allow"}', "OPENCODE_CONFIG_CONTENT": json.dumps(_OPENCODE),
             "OPENCODE_DISABLE_AUTOUPDATE": "1"},
        skills=".config/opencode/skill", mcp=("opencode", ".config/opencode/opencode.json"), parser=parsers.opencode,
    ),
)  # fmt: skip
_known: dict[str, AgentSpec] = {spec.name: spec for spec in _BUILT_IN}


def register(spec: AgentSpec) -> None:
    """Add an agent, or put another in the place of one of the same name."""
    if not isinstance(spec, AgentSpec):
        raise BadArgument(f"{spec!r} is not an AgentSpec")
    _known[spec.name] = spec


def find(type: str) -> AgentSpec:
    if type not in _known:
        raise BadArgument(f"there is no agent {type!r}", f"known are {', '.join(_known)}; register your own")
    return _known[type]


def types() -> list[str]:
    return list(_known)
