"""The pure parts of agents: plain data into command lines, lines into events, values against schemas, settings files."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.agents import AgentResponse, AgentSpec, Event, events, parsers, register, registry, types
from sandkeep.agents.events import Masker, Stream
from sandkeep.agents.schema import check_schema, problem
from sandkeep.agents.setup import conversation_place, files_below, mcp_file
from sandkeep.errors import BadArgument


def shape(found: Any) -> list[tuple[Any, ...]]:
    return [(event.kind, event.text, event.name, event.id, event.data) for event in found]


def test_the_registry_has_the_agents_and_takes_more() -> None:
    assert types()[:7] == ["shell", "claude", "codex", "gemini", "qwen", "kimi", "opencode"]
    mine = AgentSpec("mine", command=("{program}", "{prompt}"), program="my-agent")
    register(mine)
    assert registry.find("mine") is mine
    for bad in ({"name": "Bad Name"}, {"name": "x", "command": ("a", "{nothing}", "{prompt}")}, {"name": "x", "command": ("a",)},
                {"name": "x", "package": "p"}):  # fmt: skip
        with pytest.raises(BadArgument):
            AgentSpec(**bad)
    with pytest.raises(BadArgument, match="known are"):
        registry.find("nobody")


def test_command_lines() -> None:
    claude = registry.find("claude")
    assert claude.argv("hi", None, None, False) == [
        "/opt/agents/claude/bin/claude", "-p", "hi", "--output-format", "stream-json", "--verbose",
        "--dangerously-skip-permissions",
    ]  # fmt: skip
    assert claude.argv("hi", "opus", None, True)[3:5] == ["--model", "opus"]
    assert claude.argv("hi", None, None, True)[-1] == "--continue"
    codex = registry.find("codex").argv("-- {model} {continue}", "m", "http://x/v1", True)
    assert codex[-3:] == ["resume", "--last", "-- {model} {continue}"]
    assert 'base_url="http://x/v1"' in " ".join(codex)
    for name in types():
        assert "{prompt}" not in registry.find(name).argv("a prompt", "m", "http://x", True)


def test_variables_without_a_value_are_left_out_and_no_key_is_among_them() -> None:
    assert "ANTHROPIC_BASE_URL" not in registry.find("claude").environment(None, None)
    assert registry.find("claude").environment("m", "http://x")["ANTHROPIC_BASE_URL"] == "http://x"
    settings = json.loads(registry.find("opencode").environment("m", "http://x")["OPENCODE_CONFIG_CONTENT"])
    provider = settings["provider"]["sandkeep"]
    assert provider["options"] == {"baseURL": "http://x", "apiKey": "{env:OPENCODE_API_KEY}"}
    assert provider["models"] == {"m": {}}


def test_claude_lines() -> None:
    rows: list[dict[str, Any]] = [
        {"type": "system", "subtype": "init"},
        {"type": "assistant", "message": {"content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "hi"}]}},
        {"type": "assistant", "message": {"content": [{"type": "tool_use", "id": "1", "name": "Bash", "input": {"c": 1}}]}},
        {"type": "user", "message": {"content": [{"type": "tool_result", "tool_use_id": "1", "content": [{"type": "text", "text": "out"}]}]}},
        {"type": "assistant", "message": {"content": [{"type": "tool_use", "id": "2", "name": "TodoWrite", "input": {"todos": []}}]}},
        {"type": "result", "subtype": "error", "is_error": True, "result": "broke"},
    ]  # fmt: skip
    found = [event for row in rows for event in parsers.claude(json.dumps(row))]
    assert shape(found) == [
        ("thought", "hm", "", "", None), ("message", "hi", "", "", None), ("tool_call", "", "Bash", "1", {"c": 1}),
        ("tool_result", "out", "", "1", {"failed": False}), ("plan", "", "TodoWrite", "2", {"todos": []}),
        ("error", "broke", "", "", None),
    ]  # fmt: skip


def test_codex_lines() -> None:
    command = {"id": "1", "type": "command_execution", "command": "ls"}
    rows: list[dict[str, Any]] = [
        {"type": "thread.started"},
        {"type": "item.completed", "item": {"id": "0", "type": "reasoning", "text": "hm"}},
        {"type": "item.started", "item": command},
        {"type": "item.completed", "item": {**command, "aggregated_output": "f", "exit_code": 1}},
        {"type": "item.updated", "item": {"id": "2", "type": "todo_list", "items": [{"text": "a"}]}},
        {"type": "item.completed", "item": {"id": "3", "type": "agent_message", "text": "done"}},
        {"type": "turn.failed", "error": {"message": "no"}},
    ]
    found = [event for row in rows for event in parsers.codex(json.dumps(row))]
    assert shape(found) == [
        ("thought", "hm", "", "", None), ("tool_call", "", "shell", "1", {"command": "ls"}),
        ("tool_result", "f", "shell", "1", {"failed": True}), ("plan", "", "", "2", [{"text": "a"}]),
        ("message", "done", "", "", None), ("error", "no", "", "", None),
    ]  # fmt: skip


def test_gemini_kimi_and_opencode_lines() -> None:
    use = {"type": "tool_use", "tool_name": "write_file", "tool_id": "1", "parameters": {"p": 1}}
    got = {"type": "tool_result", "tool_id": "1", "status": "error", "error": {"message": "x"}}
    assert shape(parsers.gemini(json.dumps(use))) == [("tool_call", "", "write_file", "1", {"p": 1})]
    assert shape(parsers.gemini(json.dumps(got)))[0][4] == {"failed": True}
    assert parsers.gemini(json.dumps({"type": "message", "role": "user", "content": "me"})) == []
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "1", "function": {"name": "Shell", "arguments": "{}"}}],
    }
    assert shape(parsers.kimi(json.dumps(said))) == [("tool_call", "", "Shell", "1", {})]
    assert shape(parsers.kimi('{"role":"tool","tool_call_id":"1","content":"o"}'))[0][:2] == ("tool_result", "o")
    part = {"tool": "bash", "callID": "1", "state": {"input": {"c": 1}, "output": "o", "status": "completed"}}
    assert [event.kind for event in parsers.opencode(json.dumps({"type": "tool_use", "part": part}))] == [
        "tool_call",
        "tool_result",
    ]


@given(st.sampled_from([parsers.claude, parsers.codex, parsers.gemini, parsers.kimi, parsers.opencode]), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(
        ["type", "item", "message", "content", "part", "state", "role", "assistant", "tool_use", "error", "id", "text"]), inner, max_size=4),
    max_leaves=12))  # fmt: skip
def test_no_line_breaks_a_parser(parser: Any, value: Any) -> None:
    assert all(isinstance(event, Event) for event in parser(json.dumps(value)))
    assert parser("not json {") == []


def test_lines_are_joined_across_pieces_and_secrets_masked() -> None:
    told: list[tuple[str, Any]] = []
    stream = Stream(parsers.lines, Masker({"KEY": "hush-hush", "PIN": "123"}), lambda *what: told.append(what))
    for piece in ("one\ntw", "o hush-", "hush\n\n", "123 end"):
        stream.stdout(piece)
    stream.end()
    assert [event.text for event in stream.events] == ["one", "two [KEY]", "123 end"]
    assert [what for channel, what in told if channel == "stdout"] == ["one\ntw", "o hush-", "hush\n\n", "123 end"]
    event = Masker({"KEY": "hush-hush"}).event(Event("tool_call", data={"a": ["x hush-hush"], "hush-hush": 1}))
    assert event.data == {"a": ["x [KEY]"], "[KEY]": 1}


def test_events_come_back_from_their_file_and_nothing_else_does() -> None:
    kept = [Event("message", "ä\n\ud800"), Event("tool_call", name="x", id="1", data={"a": [1]})]
    data = events.pack(kept)
    assert [event.id for event in events.unpack(data)] == ["", "1"]
    assert (
        events.unpack(b'nonsense\n{"kind":"evil"}\n{"kind":"message","text":5}\n[1]\n{"more":1}\n' + data)[1] == kept[1]
    )


@pytest.mark.parametrize(
    ("schema", "good", "bad"),
    [
        ({"type": "integer"}, [1, 2.0], [True, "1", 1.5, None]),
        ({"type": ["string", "null"]}, ["a", None], [1]),
        ({"enum": [1, "a"]}, [1, "a"], [True, "b"]),
        ({"const": {"a": 1}}, [{"a": 1}], [{"a": 2}]),
        ({"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 2}, [["a"]], [[], ["a", 1], ["a", "b", "c"]]),
        ({"properties": {"a": {"minimum": 1, "maximum": 3}}, "required": ["a"], "additionalProperties": False},
         [{"a": 2}], [{}, {"a": 0}, {"a": 4}, {"a": 1, "b": 1}]),
        ({"minLength": 1, "maxLength": 2, "pattern": "^a"}, ["a", "ab"], ["", "abc", "ba"]),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, ["x", None], [1]),
    ],
)  # fmt: skip
def test_schemas(schema: dict[str, Any], good: list[Any], bad: list[Any]) -> None:
    check_schema(schema)
    assert [problem(schema, value) for value in good] == [None] * len(good)
    assert all(problem(schema, value) for value in bad)


def test_a_schema_that_would_not_be_checked_whole_is_refused() -> None:
    for schema in (
        5,
        {"oneOf": []},
        {"properties": {"a": {"format": "date"}}},
        {"items": {"$ref": "#"}},
        {"type": "text"},
        {"pattern": "("},
    ):
        with pytest.raises(BadArgument):
            check_schema(schema)
    assert (
        problem({"properties": {"a": {"items": {"type": "null"}}}}, {"a": [None, 1]})
        == "$.a[1] must be of type null, not int"
    )


def test_the_text_is_the_last_thing_said_whole() -> None:
    def said(*events: Event) -> str:
        return AgentResponse("r", "s", "t", "completed", 0, events=list(events)).text

    rows = [{"type": "message", "role": "assistant", "content": text, "delta": True} for text in ("to", "day")]
    pieces = [event for row in rows for event in parsers.gemini(json.dumps(row))]
    assert said(Event("message", "a"), Event("tool_call"), *pieces, Event("plan")) == "today"
    assert said(Event("message", "a"), Event("message", "b"), Event("message", "q", role="user")) == "b"
    assert said() == ""


def test_servers_are_added_to_settings_in_each_style() -> None:
    servers = {"db": {"command": "mcp-db", "args": ["--ro"], "env": {"A": "1"}}, "web": {"url": "http://x"}}
    merged = json.loads(
        mcp_file(registry.find("claude"), servers, b'{"theme": "dark", "mcpServers": {"old": {"command": "o"}}}')
    )
    assert merged["theme"] == "dark"
    assert set(merged["mcpServers"]) == {"old", "db", "web"}
    once = mcp_file(registry.find("codex"), servers, b'model = "m"\n')
    assert mcp_file(registry.find("codex"), servers, once) == once
    found = tomllib.loads(once.decode())
    assert found["model"] == "m"
    assert found["mcp_servers"]["db"] == servers["db"]
    assert found["mcp_servers"]["web"] == {"url": "http://x"}
    opened = json.loads(mcp_file(registry.find("opencode"), servers, None))["mcp"]
    assert opened["db"]["command"] == ["mcp-db", "--ro"]
    assert opened["web"]["type"] == "remote"
    with pytest.raises(BadArgument):
        mcp_file(registry.find("qwen"), servers, b"{broken")


def test_places(tmp_path: Path) -> None:
    assert conversation_place(".claude/projects/*/*.jsonl") == (
        "/home/user/.claude/projects", "/home/user/.claude/projects/*/*.jsonl", 2)  # fmt: skip
    assert conversation_place(".x/y.db") == ("/home/user/.x", "/home/user/.x/y.db", 1)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "f").write_bytes(b"1")
    assert files_below("/w", {"a": "x", "in/d": tmp_path / "d"}, "files") == {"/w/a": b"x", "/w/in/d/f": b"1"}
