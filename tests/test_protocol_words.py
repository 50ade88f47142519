"""The protocol's pure parts: what messages mean, and output that is never cut, lost, doubled or unbounded."""

from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sandkeep.errors import BadArgument
from sandkeep.server.protocol import messages
from sandkeep.server.protocol.door import Redacted
from sandkeep.server.protocol.messages import (
    Checkpoint,
    Execute,
    KillProcess,
    Malformed,
    Options,
    Reconnect,
    Status,
    Stdin,
)
from sandkeep.server.protocol.output import LARGEST_EVENT, MOST_KEPT, MOST_WAITING, Output


def drain(output: Output) -> list[tuple[str, str]]:
    found = []
    while (piece := output.next()) is not None:
        found.append(piece)
        output.done()
    return found


def test_statuses_are_the_protocols() -> None:
    assert len(Status) == 34
    assert all(one.value == f"SANDBOX_{one.name}" for one in Status)


def test_events_have_these_keys_and_no_others() -> None:
    assert messages.status(Status.RUNNING) == {"event": "status_update", "status": "SANDBOX_RUNNING"}
    assert messages.error("x") == {"event": "error", "message": "x"}
    assert messages.identity("i", "t") == {"event": "sandbox_id", "sandbox_id": "i", "sandbox_token": "t"}
    assert messages.output("stderr", "x") == {"event": "stderr", "data": "x"}


@pytest.mark.parametrize("text", [None, "", "{", "[]", "1", "null", '"x"', "[" * 100_000])
def test_what_is_not_one_object_is_malformed(text: str | None) -> None:
    with pytest.raises(Malformed):
        messages.parse(text)


def test_requests_in_their_order() -> None:
    assert messages.request({"action": "checkpoint", "language": "bash", "code": "x"}) == Checkpoint()
    assert messages.request({"action": "kill_process", "event": "stdin"}) == KillProcess()
    assert messages.request({"event": "stdin"}) == Stdin(None)
    assert messages.request({"action": "dance"}) == Execute(None, None)
    assert messages.request({"event": "stdout", "data": "x"}) == Execute(None, None)
    assert messages.request({"action": "reconnect"}) == Reconnect(None)
    assert messages.request({"action": "reconnect", "received": {"stdout": 3}}) == Reconnect({"stdout": 3, "stderr": 0})
    assert messages.request({"action": "reconnect", "received": {"stdout": -1}}) == Reconnect(None)


def test_options_have_defaults_and_are_checked() -> None:
    assert Options.read({}) == Options(300, False, False, False, None)
    assert Options.read({"idle_timeout": None}).idle_timeout == 0
    assert Options.read({"later": 1}) == Options()
    assert Options.of(Options(enable_checkpoint=True).metadata()) == Options(enable_checkpoint=True)
    assert Options.of({}) is None
    for bad in (
        {"idle_timeout": "3"}, {"idle_timeout": -1}, {"idle_timeout": True}, {"idle_timeout": float("nan")},
        {"enable_checkpoint": 1}, {"filesystem_snapshot_name": 3},
    ):  # fmt: skip
        with pytest.raises(BadArgument):
            Options.read(bad)


def test_only_who_says_how_long_may_lose_what_was_not_saved() -> None:
    for sleeps, said in (
        (True, {}),
        (True, {"idle_timeout": 5, "enable_checkpoint": True}),
        (False, {"idle_timeout": 5}),
    ):
        options = Options.read(said)
        assert options.sleeps is sleeps
        assert Options.of(options.metadata()) == options
    assert Options.of({messages.METADATA: {"idle_timeout": 300}}) == Options(idle_ends=True), (
        "as made by an older server"
    )


@pytest.mark.parametrize("name", ["", "..//x", "a/b", "x" * 81, "é", "a b", "x\n"])
def test_names_of_snapshots_are_plain(name: str) -> None:
    with pytest.raises(BadArgument):
        messages.check_snapshot(name)


@given(st.text(), st.data())
def test_text_arrives_as_it_was_whatever_the_reads(text: str, data: st.DataObject) -> None:
    raw, output, at = text.encode("utf-8", "replace"), Output(), 0
    while at < len(raw):
        step = data.draw(st.integers(1, len(raw) - at))
        output.take("stdout", raw[at : at + step])
        if data.draw(st.booleans()):
            output.flush()
        at += step
    output.end()
    assert "".join(piece for _, piece in drain(output)) == raw.decode()
    assert output.sent["stdout"] == len(raw)


def test_bytes_that_are_no_text_become_marks_not_silence() -> None:
    output = Output()
    output.take("stdout", b"a\xff\xfeb\xc3")
    output.end()
    assert "".join(text for _, text in drain(output)) == "a��b�"


def test_a_line_is_one_event_and_the_streams_keep_their_order() -> None:
    output = Output()
    output.take("stdout", b"hello")
    assert output.next() is None
    output.take("stdout", b"\n")
    output.take("stderr", b"oh")
    output.take("stdout", b"more\n")
    assert drain(output) == [("stdout", "hello\n"), ("stderr", "oh"), ("stdout", "more\n")]


def test_events_and_waiting_output_are_bounded() -> None:
    output = Output()
    for _ in range(40):
        output.take("stdout", b"x" * LARGEST_EVENT)
    assert output.full
    assert all(len(text) < 3 * LARGEST_EVENT for _, text in drain(output))
    assert not output.full
    assert MOST_WAITING <= MOST_KEPT


@given(
    st.lists(st.tuples(st.sampled_from(["stdout", "stderr"]), st.text(min_size=1, max_size=5)), max_size=20), st.data()
)
def test_what_did_not_arrive_is_sent_again_and_nothing_else(pieces: list[tuple[str, str]], data: st.DataObject) -> None:
    output = Output()
    for stream, text in pieces:
        output.take(stream, text.encode("utf-8", "replace"))
        output.flush()
    sent = drain(output)
    arrived = data.draw(st.integers(0, len(sent)))
    received = {"stdout": 0, "stderr": 0}
    for stream, text in sent[:arrived]:
        received[stream] += len(text.encode())
    assert output.rewind(received)
    assert drain(output) == sent[arrived:]
    assert not output.rewind({"stdout": 10**9, "stderr": 0})


def test_what_is_no_longer_kept_is_not_made_up() -> None:
    output = Output()
    for _ in range(MOST_KEPT // LARGEST_EVENT + 10):
        output.take("stdout", b"x" * LARGEST_EVENT)
        drain(output)
    before = output.sent["stdout"]
    assert not output.rewind({"stdout": 0, "stderr": 0})
    assert output.sent["stdout"] == before
    assert output.next() is None


def test_logs_do_not_show_tokens() -> None:
    record = logging.LogRecord(
        "uvicorn.error",
        logging.INFO,
        "",
        0,
        '%s - "WebSocket %s"',
        ("x", "/attach/a?sandbox_token=SECRET&api_key=KEY"),
        None,
    )
    assert Redacted().filter(record)
    assert record.getMessage() == 'x - "WebSocket /attach/a?sandbox_token=…&api_key=…"'
