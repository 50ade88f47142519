"""From the lines that each agent's program prints to events. Pure; unknown lines give none: the raw output is kept beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from functools import wraps
from typing import Any

from sandkeep.agents.events import Event, Parser

Row = dict[str, Any]
_PLANS = {"todowrite", "todo_write", "write_todos", "update_plan", "todo"}


def lines(line: str) -> Iterable[Event]:
    """Plain text: every line is said by the agent."""
    return [Event("message", line)]


def _json(parse: Callable[[Row], Iterable[Event]]) -> Parser:
    @wraps(parse)
    def of_line(line: str) -> list[Event]:
        try:
            row = json.loads(line)
        except ValueError:
            return []
        try:
            return list(parse(row)) if isinstance(row, dict) else []
        except (KeyError, TypeError, AttributeError):  # a line of a shape that this agent did not have before
            return []

    return of_line


def _call(name: str, id: str, given: Any) -> Event:
    return Event("plan" if name.lower() in _PLANS else "tool_call", name=name, id=id, data=given)


def _result(id: str, text: str, failed: bool, name: str = "") -> Event:
    return Event("tool_result", text, role="tool", name=name, id=id, data={"failed": failed})


def _text(content: Any) -> str:
    """The text in a content that is a text, a list of parts, or any JSON."""
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part["text"] if isinstance(part, dict) and "text" in part else _text(part) for part in content)
    return "" if content is None else json.dumps(content, ensure_ascii=False)


@_json
def claude(row: Row) -> Iterator[Event]:
    """claude and qwen: messages whose content is a list of typed blocks."""
    if row.get("type") == "result" and row.get("is_error"):
        yield Event("error", _text(row.get("result") or row.get("error") or row.get("subtype")))
    if row.get("type") not in ("assistant", "user"):
        return
    content = row["message"]["content"]
    for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        kind = block.get("type")
        if kind == "text" and row["type"] == "assistant":
            yield Event("message", block["text"])
        elif kind == "thinking":
            yield Event("thought", block["thinking"])
        elif kind == "tool_use":
            yield _call(block["name"], block["id"], block["input"])
        elif kind == "tool_result":
            yield _result(block["tool_use_id"], _text(block.get("content")), bool(block.get("is_error")))


@_json
def codex(row: Row) -> Iterator[Event]:
    """Items that start and complete."""
    kind, item = row.get("type"), row.get("item", {})
    if kind in ("error", "turn.failed"):
        yield Event("error", row.get("message") or _text(row.get("error", {}).get("message")))
    begun, done, what = kind == "item.started", kind == "item.completed", item.get("type")
    if what == "agent_message" and done:
        yield Event("message", item["text"])
    elif what == "reasoning" and done:
        yield Event("thought", item["text"])
    elif what == "command_execution" and begun:
        yield _call("shell", item["id"], {"command": item["command"]})
    elif what == "command_execution" and done:
        yield _result(item["id"], item.get("aggregated_output", ""), bool(item.get("exit_code")), "shell")
    elif what == "file_change" and done:
        yield _call("file_change", item["id"], item["changes"])
        yield _result(item["id"], item.get("status", ""), item.get("status") == "failed", "file_change")
    elif what == "mcp_tool_call" and begun:
        yield _call(f"{item.get('server')}.{item.get('tool')}", item["id"], item.get("arguments"))
    elif what == "mcp_tool_call" and done:
        yield _result(item["id"], _text(item.get("result")), item.get("status") == "failed")
    elif what == "web_search" and done:
        yield _call("web_search", item["id"], {"query": item.get("query")})
    elif what == "todo_list":
        yield Event("plan", id=item["id"], data=item["items"])
    elif what == "error" and done:
        yield Event("error", item["message"])


@_json
def gemini(row: Row) -> Iterator[Event]:
    kind = row.get("type")
    if kind == "message" and row.get("role") != "user":
        yield Event("message", row["content"], data={"delta": True} if row.get("delta") else None)
    elif kind == "tool_use":
        yield _call(row["tool_name"], row["tool_id"], row.get("parameters"))
    elif kind == "tool_result":
        said = row.get("output") if row.get("output") is not None else row.get("error")
        yield _result(row["tool_id"], _text(said), row.get("status") == "error")
    elif kind == "error" or (kind == "result" and row.get("status") == "error"):
        yield Event("error", _text(row.get("message") or row.get("error")))


@_json
def kimi(row: Row) -> Iterator[Event]:
    """Chat messages."""
    if row.get("role") == "assistant":
        for part in row["content"] if isinstance(row.get("content"), list) else []:
            if part.get("type") == "think":
                yield Event("thought", part["think"])
            elif part.get("type") == "text" and part["text"]:
                yield Event("message", part["text"])
        if isinstance(row.get("content"), str) and row["content"]:
            yield Event("message", row["content"])
        for call in row.get("tool_calls") or []:
            yield _call(call["function"]["name"], call["id"], _loaded(call["function"]["arguments"]))
    elif row.get("role") == "tool":
        yield _result(row["tool_call_id"], _text(row.get("content")), False)


@_json
def opencode(row: Row) -> Iterator[Event]:
    kind, part = row.get("type"), row.get("part", {})
    if kind in ("text", "reasoning"):
        yield Event("message" if kind == "text" else "thought", part["text"])
    elif kind == "tool_use":
        state = part["state"]
        yield _call(part["tool"], part["callID"], state.get("input"))
        failed = state.get("status") == "error"
        yield _result(part["callID"], _text(state.get("error" if failed else "output")), failed, part["tool"])
    elif kind == "error":
        yield Event("error", _text(row.get("error")))


def _loaded(text: Any) -> Any:
    try:
        return json.loads(text) if isinstance(text, str) else text
    except ValueError:
        return text
