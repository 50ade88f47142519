"""A stand-in for a model's server, on loopback: enough of four wire protocols that the real agents finish a turn.

Anthropic Messages (claude), OpenAI Chat Completions (qwen, kimi, opencode), OpenAI Responses (codex), Gemini (gemini).
It keeps no state: prompts carry orders, and the answer is worked out from the conversation that the agent sends.

    [[do write /path :: content]]    a call of the agent's tool that writes a file, or of its shell
    [[do shell :: command]]          a call of the agent's shell
    [[memo text]]                    something to remember
    [[ask]]                          nothing, but a turn that counts

Orders of the last turn become tool calls, one an answer; then comes "STUB turns=N memo=a|b", counted over the whole
conversation: only an agent that kept its conversation sends the older turns again.
"""

from __future__ import annotations

import gzip
import json
import re
import threading
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import zstandard

ORDER = re.compile(r"\[\[(do|memo|ask)\b\s*(.*?)\]\]", re.DOTALL)
WRITERS = ("write", "write_file", "writefile")
SHELLS = ("bash", "run_shell_command", "shell", "exec_command", "shell_command")
PATHS = {"file_path", "filepath", "path", "absolute_path"}
CONTENTS = {"content", "contents"}
COMMANDS = {"command", "cmd"}


@dataclass
class Talk:
    """A conversation, whatever its protocol: what was asked so far, and what of the last turn is done."""

    turns: int = 0
    memos: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    done: int = 0

    def said(self, text: str) -> None:
        found = ORDER.findall(text)
        if found:
            self.turns += 1
            self.memos += [what.strip() for kind, what in found if kind == "memo"]
            self.orders = [what for kind, what in found if kind == "do"]
            self.done = 0

    def returned(self) -> None:
        self.done += 1

    @property
    def next(self) -> str | None:
        return self.orders[self.done] if self.done < len(self.orders) else None

    @property
    def answer(self) -> str:
        return f"STUB turns={self.turns} memo={'|'.join(self.memos)}"


def command_of(order: str) -> str:
    head, _, rest = order.partition("::")
    words = head.split()
    return f"printf %s '{rest.strip()}' > '{words[1]}'" if words[0] == "write" else rest.strip()


def tool_call(order: str, tools: dict[str, dict[str, Any]]) -> tuple[str, dict[str, Any]] | None:
    """One of the tools that the agent offers, with its arguments."""
    head, _, rest = order.partition("::")
    words = head.split()
    if words[0] == "write":
        name = next((tool for tool in tools if tool.lower() in WRITERS), None)
        if name:
            fields = tools[name].get("properties", {})
            given = {key: words[1] for key in fields if key.lower() in PATHS}
            given |= {key: rest.strip() for key in fields if key.lower() in CONTENTS}
            return name, filled(given, tools[name])
    name = next((tool for tool in tools if tool.lower() in SHELLS), None)
    if name is None:
        return None
    fields, line = tools[name].get("properties", {}), command_of(order)
    given = {
        key: ["bash", "-c", line] if schema.get("type") == "array" else line
        for key, schema in fields.items()
        if key.lower() in COMMANDS
    }
    return name, filled(given, tools[name])


def filled(given: dict[str, Any], schema: dict[str, Any]) -> dict[str, Any]:
    """With a plain value for every other field that must be there."""
    plain: dict[str, Any] = {"boolean": False, "integer": 1, "number": 1, "array": [], "object": {}}
    for name in schema.get("required", []):
        kind = str(schema.get("properties", {}).get(name, {}).get("type", "string")).lower()
        given.setdefault(name, plain.get(kind, "stub"))
    return given


def text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in content or [] if isinstance(part, dict))


def new(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex[:16]}"


# one function a protocol: the request's body in, the events of the answer out


def messages(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    talk = Talk()
    for message in body.get("messages", []):
        parts = message.get("content")
        parts = [{"type": "text", "text": parts}] if isinstance(parts, str) else parts
        if message.get("role") == "user":
            results = [part for part in parts if part.get("type") == "tool_result"]
            for _ in results:
                talk.returned()
            if not results:
                talk.said(text_of(parts))
    tools = {tool.get("name", ""): tool.get("input_schema") or {} for tool in body.get("tools", [])}
    call = tool_call(talk.next, tools) if talk.next else None
    if call:
        block: dict[str, Any] = {"type": "tool_use", "id": new("toolu"), "name": call[0], "input": {}}
        delta = {"type": "input_json_delta", "partial_json": json.dumps(call[1])}
    else:
        block, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": talk.answer}
    usage = {"input_tokens": 1, "output_tokens": 1}
    whole = {"id": new("msg"), "type": "message", "role": "assistant", "model": body.get("model"), "content": [],
             "stop_reason": None, "stop_sequence": None, "usage": usage}  # fmt: skip
    ended = {"stop_reason": "tool_use" if call else "end_turn", "stop_sequence": None}
    if not body.get("stream"):
        full = {**block, **({"input": call[1]} if call else {"text": talk.answer})}
        yield "", {**whole, **ended, "content": [full]}
        return
    yield "message_start", {"message": whole}
    yield "content_block_start", {"index": 0, "content_block": block}
    yield "content_block_delta", {"index": 0, "delta": delta}
    yield "content_block_stop", {"index": 0}
    yield "message_delta", {"delta": ended, "usage": usage}
    yield "message_stop", {}


def chat(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    talk = Talk()
    for message in body.get("messages", []):
        if message.get("role") == "user":
            talk.said(text_of(message.get("content")))
        elif message.get("role") == "tool":
            talk.returned()
    tools = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in body.get("tools") or []}
    call = tool_call(talk.next, tools) if talk.next else None
    said: dict[str, Any] = {"role": "assistant", "content": talk.answer}
    if call:
        function = {"name": call[0], "arguments": json.dumps(call[1])}
        said = {"role": "assistant", "content": None,
                "tool_calls": [{"index": 0, "id": new("call"), "type": "function", "function": function}]}  # fmt: skip
    why = "tool_calls" if call else "stop"
    usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
    head = {"id": new("chat"), "created": 1, "model": body.get("model")}
    if not body.get("stream"):
        choice = {"index": 0, "message": said, "finish_reason": why}
        yield "", {**head, "object": "chat.completion", "usage": usage, "choices": [choice]}
        return
    head["object"] = "chat.completion.chunk"
    yield "", {**head, "choices": [{"index": 0, "delta": said, "finish_reason": None}]}
    yield "", {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": why}]}
    yield "", {**head, "choices": [], "usage": usage}


def responses(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    talk, given = Talk(), body.get("input", [])
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind = item.get("type", "message")
        if kind in ("function_call_output", "custom_tool_call_output"):
            talk.returned()
        elif kind == "message" and item.get("role") == "user":
            talk.said(text_of(item.get("content")))
    offered = body.get("tools") or []
    tools = {tool["name"]: tool.get("parameters") or {} for tool in offered if tool.get("type") == "function"}
    call = tool_call(talk.next, tools) if talk.next else None
    if call:
        item = {"type": "function_call", "id": new("fc"), "call_id": new("call"), "name": call[0],
                "arguments": json.dumps(call[1]), "status": "completed"}  # fmt: skip
    elif talk.next and any(tool.get("type") == "custom" and tool.get("name") == "exec" for tool in offered):
        program = f"const r = await tools.exec_command({{cmd: {json.dumps(command_of(talk.next))}}}); text(JSON.stringify(r));"
        item = {"type": "custom_tool_call", "id": new("ctc"), "call_id": new("call"), "name": "exec", "input": program,
                "status": "completed"}  # fmt: skip
    else:
        item = {"type": "message", "id": new("msg"), "role": "assistant", "status": "completed",
                "content": [{"type": "output_text", "text": talk.answer, "annotations": []}]}  # fmt: skip
    whole = {"id": new("resp"), "object": "response", "created_at": 1, "model": body.get("model"), "output": []}
    usage = {"input_tokens": 1, "input_tokens_details": {"cached_tokens": 0}, "output_tokens": 1,
             "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 2}  # fmt: skip
    done = {**whole, "status": "completed", "output": [item], "usage": usage}
    if not body.get("stream"):
        yield "", done
        return
    yield "response.created", {"response": {**whole, "status": "in_progress"}}
    yield "response.output_item.added", {"output_index": 0, "item": item}
    yield "response.output_item.done", {"output_index": 0, "item": item}
    yield "response.completed", {"response": done}


def gemini(body: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    talk = Talk()
    for content in body.get("contents", []):
        parts = content.get("parts", [])
        results = [part for part in parts if "functionResponse" in part]
        for _ in results:
            talk.returned()
        if content.get("role") == "user" and not results:
            talk.said(text_of(parts))
    tools = {
        one["name"]: one.get("parametersJsonSchema") or one.get("parameters") or {}
        for tool in body.get("tools") or []
        for one in tool.get("functionDeclarations", [])
    }
    call = tool_call(talk.next, tools) if talk.next else None
    part: dict[str, Any] = {"functionCall": {"name": call[0], "args": call[1]}} if call else {"text": talk.answer}
    settings = body.get("generationConfig") or {}
    if not tools and settings.get("responseMimeType") == "application/json":
        schema = settings.get("responseJsonSchema") or settings.get("responseSchema") or {}
        part = {"text": json.dumps(filled({}, schema))}
    usage = {"promptTokenCount": 1, "candidatesTokenCount": 1, "totalTokenCount": 2}
    candidate = {"index": 0, "finishReason": "STOP", "content": {"role": "model", "parts": [part]}}
    yield "", {"candidates": [candidate], "usageMetadata": usage}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Stub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._whole({})

    def do_GET(self) -> None:
        model = {"id": "stub", "object": "model", "created": 0, "owned_by": "stub"}
        self._whole({"object": "list", "data": [model], "models": []})

    def do_POST(self) -> None:
        body = self._body()
        path = self.path.partition("?")[0]
        self.server.seen.append((path, dict(self.headers.items())))
        try:
            if path.endswith("/messages"):
                self._answer(messages(body), body.get("stream", False), named=True)
            elif path.endswith("/chat/completions"):
                self._answer(chat(body), body.get("stream", False), last="data: [DONE]\n\n")
            elif path.endswith("/responses"):
                self._answer(responses(body), body.get("stream", False), named=True)
            elif "enerateContent" in path:
                self._answer(gemini(body), ":stream" in path)
            else:
                self._whole({"input_tokens": 1, "totalTokens": 1})
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def _body(self) -> dict[str, Any]:
        if self.headers.get("transfer-encoding", "").lower() == "chunked":
            data = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        else:
            data = self.rfile.read(int(self.headers.get("content-length") or 0))
        packed = self.headers.get("content-encoding", "").lower()
        if packed == "gzip":
            data = gzip.decompress(data)
        elif packed == "zstd":
            data = zstandard.ZstdDecompressor().decompressobj().decompress(data)
        found = json.loads(data or b"{}")
        return found if isinstance(found, dict) else {}

    def _answer(
        self, events: Iterable[tuple[str, dict[str, Any]]], stream: bool, named: bool = False, last: str = ""
    ) -> None:
        if not stream:
            self._whole(next(iter(events))[1])
            return
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("connection", "close")
        self.end_headers()
        for kind, data in events:
            head = f"event: {kind}\n" if named else ""
            shown = {"type": kind, **data} if named else data
            self.wfile.write(f"{head}data: {json.dumps(shown)}\n\n".encode())
        self.wfile.write(last.encode())
        self.close_connection = True

    def _whole(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


class Stub(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[tuple[str, dict[str, str]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
