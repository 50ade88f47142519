"""The protocol's flows on one server: order of events, error texts, close codes, as its facts give them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import random
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus

from protocol_kit import Client, S, Server, attach, connect, create, dial, error, eventually, run, server, text

__all__ = ["server"]
DONE = S("EXECUTION_DONE")


def test_create_says_these_events(server: Server) -> None:
    async def work() -> None:
        client = Client(await connect(f"{server.ws}/create"))
        await client.say()
        heard = [await client.hear() for _ in range(3)]
        assert heard == [
            *S("CREATING"),
            {"event": "sandbox_id", "sandbox_id": client.id, "sandbox_token": client.token},
            *S("RUNNING"),
        ]
        assert len(client.token) >= 32
        await client.close()

    run(work())


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"enable_sandbox_handoff": True}, "Sandbox handoff requires checkpointing to be enabled."),
        (
            {"enable_idle_timeout_auto_checkpoint": True},
            "Idle timeout auto checkpoint requires checkpointing to be enabled.",
        ),
        ({"filesystem_snapshot_name": "none"}, "Filesystem snapshot not found at"),
        ({"filesystem_snapshot_name": "../../etc"}, "Filesystem snapshot not found at"),
        ({"idle_timeout": "soon"}, "idle_timeout must be a number"),
    ],
)
def test_create_is_refused(server: Server, options: dict[str, Any], why: str) -> None:
    async def work() -> None:
        client = Client(await connect(f"{server.ws}/create"))
        await client.say(**options)
        heard, code = await client.rest()
        assert heard[:2] == S("CREATING", "CREATION_ERROR")
        assert why in heard[2]["message"]
        assert len(heard) == 3
        assert code == 4000

    run(work())


def test_executions(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.say(language="python", code="import os; print('hi', os.getcwd(), os.getuid())")
        assert [await client.hear() for _ in range(3)] == [
            *S("EXECUTION_RUNNING"), {"event": "stdout", "data": "hi / 0\n"}, *DONE,
        ]  # fmt: skip
        await client.execute("bash", "echo out; echo err >&2; exit 3")
        heard = await client.until("EXECUTION_DONE")
        assert text(heard, "stdout") == "out\n"
        assert text(heard, "stderr") == "err\n"
        assert await client.run("export X=1; cd /tmp") == ""
        assert await client.run('echo "[$X]"; pwd; test -t 0 || echo no tty') == "[]\n/\nno tty\n"
        assert "line 1: `echo ('" in await client.run("echo (")
        huge = f"print({'x' * 300_000!r} == 'x' * 300000)"
        assert await client.run(huge, "python") == "True\n"
        assert "code" not in await client.run("ls -A /tmp")
        await client.close()

    run(work())


def test_output_is_whole(server: Server) -> None:
    """Multi-byte characters on every boundary, bytes that are no text, and more than any buffer holds."""

    async def work() -> None:
        client = await create(server)
        heard = await client.run("import sys; sys.stdout.write('a' + '漢é😀' * 200_000)", "python")
        assert heard == "a" + "漢é😀" * 200_000
        assert await client.run(r"printf 'a\377b\n'") == "a�b\n"
        both = await client.run("for i in $(seq 20000); do echo $i; done")
        assert both == "".join(f"{i}\n" for i in range(1, 20001))
        await client.close()

    run(work())


def test_a_second_execution_is_refused_and_the_first_goes_on(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.execute("bash", "read x; echo got $x")
        await client.say(language="bash", code="echo no")
        assert [await client.hear(), await client.hear()] == [
            *S("EXECUTION_ERROR"), error("An execution is already in progress."),
        ]  # fmt: skip
        await client.say(event="stdin", data="it\n")
        assert await client.until("EXECUTION_DONE") == [{"event": "stdout", "data": "got it\n"}, *DONE]
        await client.close()

    run(work())


@pytest.mark.parametrize(
    ("message", "status", "why"),
    [
        (
            {"language": "ruby", "code": "1"},
            "EXECUTION_UNSUPPORTED_LANGUAGE_ERROR",
            "Unsupported language: 'ruby'. Supported languages are: python, bash",
        ),
        ({"action": "dance"}, "EXECUTION_UNSUPPORTED_LANGUAGE_ERROR", "Unsupported language: 'None'."),
        ({}, "EXECUTION_UNSUPPORTED_LANGUAGE_ERROR", "Unsupported language: 'None'."),
        (
            {"language": "python"},
            "EXECUTION_ERROR",
            "Invalid message format. 'language' and 'code' fields are required.",
        ),
        ({"language": "bash", "code": "a\0b"}, "EXECUTION_ERROR", ""),
        ({"event": "stdin", "data": "x"}, "EXECUTION_ERROR", "No process is running in the sandbox."),
        ({"event": "stdin"}, "STDIN_ERROR", "Invalid stdin message format. 'data' field is required."),
        ({"language": ["x"], "code": {}}, "EXECUTION_UNSUPPORTED_LANGUAGE_ERROR", "Unsupported language"),
    ],
)
def test_bad_requests_leave_the_session_whole(server: Server, message: dict[str, Any], status: str, why: str) -> None:
    async def work() -> None:
        client = await create(server)
        await client.say(**message)
        assert await client.hear() == S(status)[0]
        told = await client.hear()
        assert told["event"] == "error"
        assert told["message"].startswith(why)
        assert await client.run("echo fine") == "fine\n"
        await client.close()

    run(work())


def test_input(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.execute("python", "import sys\nfor line in sys.stdin: print(line.strip()[::-1], flush=True)")
        for word in ("abc", "äöü"):
            await client.say(event="stdin", data=word + "\n")
            assert await client.hear() == {"event": "stdout", "data": word[::-1] + "\n"}
        await client.say(action="kill_process")
        await client.until("EXECUTION_DONE")
        await client.say(event="stdin", data="late\n")
        assert await client.run("echo after") == "after\n"
        # Many pieces at once arrive in order, more than a pipe holds.
        pieces = [f"{number:09d}\n" * 900 for number in range(100)]
        await client.execute("bash", "head -c 900000 | md5sum")
        for piece in pieces:
            await client.say(event="stdin", data=piece)
        assert (
            text(await client.until("EXECUTION_DONE")).split()[0] == hashlib.md5("".join(pieces).encode()).hexdigest()
        )
        await client.close()

    run(work())


def test_kill_process_ends_the_whole_tree(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.say(action="kill_process")
        assert await client.hear() == S("EXECUTION_FORCE_KILLED")[0]
        await client.execute("bash", "(setsid sleep 98765 &) ; sleep 98765 & sleep 98765")
        await client.say(action="kill_process")
        assert [await client.hear(), await client.hear()] == S("EXECUTION_FORCE_KILLED", "EXECUTION_DONE")
        left = await client.run("cat /proc/[0-9]*/cmdline 2>/dev/null | tr '\\0' ' '; true")
        assert "sleep" not in left
        await client.close()

    run(work())


def test_kill_sandbox(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.execute("bash", "sleep 1000")
        await client.say(action="kill_sandbox")
        assert await client.rest() == (S("KILLING", "DELETING", "DELETED", "KILLED"), 1000)
        again = await dial(server, client.id, client.token)
        assert await again.rest() == (S("NOT_FOUND"), 1011)

    run(work())


def test_checkpoint_refusals(server: Server) -> None:
    async def work() -> None:
        plain = await create(server)
        await plain.say(action="checkpoint")
        heard, code = await plain.rest()
        assert heard[:2] == S("CHECKPOINTING", "CHECKPOINT_ERROR")
        assert heard[2]["message"].startswith(f"Failed to checkpoint sandbox ID: {plain.id}")
        assert code == 4000
        plain = await attach(server, plain.id, plain.token)
        assert await plain.run("echo alive") == "alive\n"
        await plain.close()
        client = await create(server, enable_checkpoint=True)
        await client.execute("bash", "read x; echo $x")
        await client.say(action="checkpoint")
        assert [await client.hear() for _ in range(3)] == [
            *S("CHECKPOINTING", "EXECUTION_IN_PROGRESS_ERROR"),
            error("Cannot checkpoint while an execution is in progress."),
        ]
        await client.say(event="stdin", data="on\n")
        assert text(await client.until("EXECUTION_DONE")) == "on\n"
        await client.close()

    run(work())


def test_checkpoint_and_restore(server: Server) -> None:
    async def work() -> None:
        client = await create(server, enable_checkpoint=True, idle_timeout=77)
        await client.run("echo kept > /root/file")
        await client.say(action="checkpoint")
        assert await client.rest() == (S("CHECKPOINTING", "DELETING", "DELETED", "CHECKPOINTED"), 1000)
        client = await dial(server, client.id, client.token)
        assert [await client.hear(), await client.hear()] == S("RESTORING", "RUNNING")
        assert await client.run("cat /root/file") == "kept\n"
        await client.say(action="kill_sandbox")
        await client.rest()

    run(work())


def test_snapshots_of_the_filesystem(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.run("echo first > /root/file")
        await client.say(action="snapshot_filesystem", name="mine")
        assert await client.until("FILESYSTEM_SNAPSHOT_CREATED") == S(
            "FILESYSTEM_SNAPSHOT_CREATING", "FILESYSTEM_SNAPSHOT_CREATED"
        )
        await client.run("echo second > /root/file")
        other = await create(server, filesystem_snapshot_name="mine")
        assert await other.run("cat /root/file") == "first\n"
        await other.close()
        for name in ("", "../x", "a b"):
            await client.say(action="snapshot_filesystem", name=name)
            heard = [await client.hear() for _ in range(3)]
            assert heard[:2] == S("FILESYSTEM_SNAPSHOT_CREATING", "FILESYSTEM_SNAPSHOT_ERROR")
        assert await client.run("echo on") == "on\n"
        await client.say(action="snapshot_filesystem")
        heard, code = await client.rest()
        assert heard[:2] == S("FILESYSTEM_SNAPSHOT_CREATING", "ERROR")
        assert code == 4000

    run(work())


def test_attach_refusals(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        unknown = await dial(server, "sb-000000000000", client.token)
        assert await unknown.rest() == (S("NOT_FOUND"), 1011)
        strange = await dial(server, "..%00..", client.token)
        assert await strange.rest() == (S("NOT_FOUND"), 1011)
        for token, why in (("0" * 32, "Invalid sandbox token."), ("", "Sandbox token is missing.")):
            wrong = await dial(server, client.id, token)
            assert await wrong.rest() == ([*S("PERMISSION_DENIAL_ERROR"), error(why)], 4000)
        with pytest.raises(InvalidStatus) as refused:
            await connect(f"{server.ws}/attach/{client.id}")
        assert refused.value.response.status_code == 403
        second = await dial(server, client.id, client.token)
        assert await second.rest() == (S("IN_USE"), 1011)
        assert await client.run("echo mine") == "mine\n"
        await client.close()
        client = await dial(server, client.id, client.token)
        assert await client.hear() == S("RUNNING")[0]
        await client.close()

    run(work())


def test_a_wrong_token_wakes_nothing(server: Server) -> None:
    async def work() -> None:
        client = await create(server, enable_checkpoint=True)
        await client.say(action="checkpoint")
        await client.rest()
        wrong = await dial(server, client.id, "f" * 32)
        assert await wrong.rest() == ([*S("PERMISSION_DENIAL_ERROR"), error("Invalid sandbox token.")], 4000)
        assert f"{client.id}   paused" in json.loads(server.call("GET", "/list")[1])["containers"]

    run(work())


@pytest.mark.parametrize("frame", ["{", "[]", "17", b"{}", "x" * 70_000])
def test_malformed_input_drops_the_socket_and_not_the_sandbox(server: Server, frame: str | bytes) -> None:
    async def work() -> None:
        client = await create(server)
        await client.socket.send(frame)
        with pytest.raises(ConnectionClosed):
            await client.socket.recv()
        assert client.socket.close_code == 1006
        client = await attach(server, client.id, client.token)
        assert await client.run("echo alive") == "alive\n"
        await client.close()
        first = await connect(f"{server.ws}/create")
        await first.send(frame)
        with pytest.raises(ConnectionClosed):
            await first.recv()
        assert first.close_code == 1006

    run(work())


def test_tokens_are_neither_inside_nor_in_a_log(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.close()
        client = await attach(server, client.id, client.token)
        script = f"grep -rls {client.token} /root /home /tmp /etc /run /var /.sandkeep 2>/dev/null; env; cat /proc/*/environ | tr '\\0' '\\n'"
        heard = await client.run(script.replace(client.token, client.token[:8] + "''" + client.token[8:]))
        assert client.token not in heard
        assert client.token not in server.log.read_text()
        await client.close()

    run(work())


def test_an_idle_sandbox_ends_and_a_used_one_does_not(server: Server) -> None:
    async def work() -> None:
        client = await create(server, idle_timeout=6)
        assert await client.run("sleep 8; echo slept", "bash") == "slept\n"
        assert await client.run("echo still here") == "still here\n"
        assert await client.hear() == S("DELETING")[0]
        assert await client.hear() == S("DELETED")[0]
        await client.say(language="bash", code="echo no")
        assert await client.hear() == S("EXECUTION_ERROR")[0]
        assert (await client.hear())["message"].startswith(
            "Cannot execute code in a sandbox that is not in the RUNNING state"
        )
        again = await dial(server, client.id, client.token)
        assert await again.rest() == (S("NOT_FOUND"), 1011)
        await client.close()

    run(work())


def test_an_idle_sandbox_is_saved_where_that_was_asked_for(server: Server) -> None:
    async def work() -> None:
        options = {"idle_timeout": 6, "enable_checkpoint": True, "enable_idle_timeout_auto_checkpoint": True}
        client = await create(server, **options)
        await client.run("echo kept > /root/file")
        assert await client.until("DELETED") == S("DELETING", "DELETED")
        await client.close()
        client = await dial(server, client.id, client.token)
        assert [await client.hear(), await client.hear()] == S("RESTORING", "RUNNING")
        assert await client.run("cat /root/file") == "kept\n"
        await client.say(action="kill_sandbox")
        await client.rest()

    run(work())


def test_an_idle_sandbox_that_may_be_checkpointed_sleeps_with_what_was_never_saved(server: Server) -> None:
    async def work() -> None:
        client = await create(server, idle_timeout=4, enable_checkpoint=True)
        await client.run("echo kept > /root/file")
        assert await client.until("DELETED") == S("DELETING", "DELETED")
        await client.close()
        client = await dial(server, client.id, client.token)
        assert [await client.hear(), await client.hear()] == S("RESTORING", "RUNNING")
        assert await client.run("cat /root/file") == "kept\n"
        await client.say(action="kill_sandbox")
        await client.rest()

    run(work())


def test_a_forsaken_execution_that_waits_does_not_hold_its_sandbox_for_ever(server: Server) -> None:
    async def work() -> None:
        client = await create(server, idle_timeout=6)
        await client.execute("bash", "read x")
        await client.close()

        async def gone() -> bool:
            return client.id not in json.loads(server.call("GET", "/list")[1])["containers"]

        await eventually(gone)

    run(work())


def test_killed_by_another_door_the_client_is_told(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        status, _ = await asyncio.to_thread(server.call, "DELETE", f"/containers/{client.id}")
        assert status == 200
        assert await client.until("DELETED") == S("DELETING", "DELETED")
        await client.say(action="kill_sandbox")
        assert await client.rest() == (S("KILLING", "DELETING", "DELETED", "KILLED"), 1000)

    run(work())


def test_any_object_is_survived(server: Server) -> None:
    """Whatever a client says, the answers are events, and the sandbox goes on."""
    values = [None, True, -1, 1e308, "x", "bash", "stdin", "reconnect", [], {}, {"stdout": 1}, "\ud800", "\0"]

    async def work() -> None:
        client = await create(server)
        chance = random.Random(7)
        for _ in range(300):
            keys = chance.sample(
                ["action", "event", "language", "code", "data", "name", "received"], chance.randint(0, 4)
            )
            message = {key: chance.choice(values) for key in keys}
            await client.socket.send(json.dumps(message))
        await client.say(action="kill_process")
        await client.until("EXECUTION_FORCE_KILLED")
        await client.close()
        client = await attach(server, client.id, client.token)

        async def works() -> bool:
            await client.say(action="kill_process")
            await client.until("EXECUTION_FORCE_KILLED")
            await client.say(language="bash", code="echo fine")
            while (event := await client.hear()).get("status") not in (
                "SANDBOX_EXECUTION_RUNNING",
                "SANDBOX_EXECUTION_ERROR",
            ):
                pass
            return event["status"] == "SANDBOX_EXECUTION_RUNNING"

        await eventually(works)
        assert text(await client.until("EXECUTION_DONE")).endswith("fine\n")
        await client.close()

    run(work())
