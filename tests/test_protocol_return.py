"""Clients that go and come back: exactly-once output, memory across checkpoints, handoffs, servers that die."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from postgres import Postgres
from protocol_kit import Client, S, Server, attach, clean, create, dial, eventually, run, server, text

__all__ = ["server"]
pytest_plugins = ["postgres"]
COUNT = "i=0; while [ $i -lt {n} ]; do i=$((i+1)); echo $i; {wait}; done"


def lines(n: int) -> str:
    return "".join(f"{i}\n" for i in range(1, n + 1))


@pytest.fixture(scope="module")
def memory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with clean(tmp_path_factory.mktemp("protocol"), "--runtime", "runsc") as found:
        yield found


async def reconnect(server: Server, client: Client, **more: object) -> Client:
    """As the original clients do: at once, before RUNNING arrives."""
    fresh = await dial(server, client.id, client.token)
    await fresh.say(action="reconnect", **more)
    assert await fresh.hear() == S("RUNNING")[0]
    return fresh


def test_output_goes_on_where_it_was_left(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.execute("bash", "echo one; read x; echo two; echo three; read x; echo four")
        assert await client.hear() == {"event": "stdout", "data": "one\n"}
        await client.close()
        client = await reconnect(server, client)
        assert await client.hear() == S("EXECUTION_RUNNING")[0]
        await client.say(event="stdin", data="\n")
        await client.close()
        client = await reconnect(server, client)
        assert await client.hear() == S("EXECUTION_RUNNING")[0]
        await client.say(event="stdin", data="\n")
        heard = await client.until("EXECUTION_DONE")
        assert text(heard).endswith("four\n")
        assert len(text(heard).splitlines()) == len(set(text(heard).splitlines()))
        await client.close()

    run(work())


def test_finished_and_unread_output_waits(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.execute("bash", "read x; seq 100000")
        await client.say(event="stdin", data="\n")
        client.vanish()
        client = await reconnect(server, client, received={"stdout": 0, "stderr": 0})
        assert await client.hear() == S("EXECUTION_RUNNING")[0]
        assert text(await client.until("EXECUTION_DONE")) == lines(100_000)
        await client.say(action="reconnect")
        assert await client.hear() == S("EXECUTION_DONE")[0]
        assert await client.run("echo next") == "next\n"
        await client.close()

    run(work())


def test_nothing_ever_ran(server: Server) -> None:
    async def work() -> None:
        client = await reconnect(server, await _left(server))
        assert await client.hear() == S("EXECUTION_DONE")[0]
        assert await client.run("echo next") == "next\n"
        await client.close()

    run(work())


async def _left(server: Server) -> Client:
    client = await create(server)
    await client.close()
    return client


def test_a_client_that_counts_gets_everything_once_however_it_goes(server: Server) -> None:
    """Sockets are torn without a word in the middle of a flood; nothing is lost and nothing comes twice."""

    async def work() -> None:
        client = await create(server)
        await client.execute("bash", COUNT.format(n=30_000, wait=":"))
        got = ""
        for round in range(6):
            for _ in range(20 * round + 1):
                event = await client.hear()
                if event == S("EXECUTION_DONE")[0]:
                    break
                got += event.get("data", "")
            client.vanish()
            client = await reconnect(server, client, received={"stdout": len(got), "stderr": 0})
            assert (await client.hear())["status"] in ("SANDBOX_EXECUTION_RUNNING", "SANDBOX_EXECUTION_DONE")
            if got == lines(30_000):
                break
        else:
            got += text(await client.until("EXECUTION_DONE"))
        assert got == lines(30_000)
        await client.close()

    run(work())


def test_a_slow_reader_stops_the_process_and_not_the_server(server: Server) -> None:
    async def work() -> None:
        client = await create(server)
        await client.execute("bash", "head -c 60000000 /dev/zero | tr '\\0' x; echo end")
        await client.close()
        other = await create(server)
        assert await other.run("echo quick") == "quick\n"
        await other.close()
        rss = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096
        client = await reconnect(server, client, received={"stdout": 0, "stderr": 0})
        heard = text(await client.until("EXECUTION_DONE"))
        assert len(heard) == 60_000_004
        assert heard.endswith("xend\n")
        grown = int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096 - rss
        assert grown < 60_000_000
        await client.close()

    run(work())


def test_processes_survive_a_checkpoint(memory: Server) -> None:
    async def work() -> None:
        client = await create(memory, enable_checkpoint=True)
        await client.run(
            "nohup sh -c 'i=0; while :; do i=$((i+1)); echo $i > /tmp/count; sleep 0.05; done' >/dev/null 2>&1 &"
        )
        before = int(await client.run("sleep 0.5; cat /tmp/count"))
        await client.say(action="checkpoint")
        assert await client.rest() == (S("CHECKPOINTING", "DELETING", "DELETED", "CHECKPOINTED"), 1000)
        client = await attach(memory, client.id, client.token)

        async def counted() -> bool:
            return int(await client.run("sleep 0.2; cat /tmp/count") or 0) > before + 5

        await eventually(counted)
        await client.say(action="kill_sandbox")
        await client.rest()

    run(work())


def test_an_execution_sleeps_and_wakes_with_its_sandbox(memory: Server) -> None:
    """Forsaken, idle, saved with its memory; the client comes back to the same process."""

    async def work() -> None:
        options = {"idle_timeout": 4, "enable_checkpoint": True, "enable_idle_timeout_auto_checkpoint": True}
        client = await create(memory, **options)
        await client.execute("python", "import os\nx = os.urandom(8).hex()\nprint(x)\ninput()\nprint(x)")
        first = (await client.hear())["data"]
        await client.close()

        async def asleep() -> bool:
            listed = json.loads((await asyncio.to_thread(memory.call, "GET", "/list"))[1])["containers"]
            return f"{client.id}   paused" in listed

        await eventually(asleep)
        client = await dial(memory, client.id, client.token)
        await client.say(action="reconnect")
        assert [await client.hear() for _ in range(3)] == S("RESTORING", "RUNNING", "EXECUTION_RUNNING")
        await client.say(event="stdin", data="\n")
        assert text(await client.until("EXECUTION_DONE")) == first
        await client.say(action="kill_sandbox")
        await client.rest()

    run(work())


@pytest.mark.parametrize("kind", ["server", "memory"])
def test_handoff_on_one_server(kind: str, request: pytest.FixtureRequest) -> None:
    """The old client is told, its socket stays open; the work goes on and the new client has it."""
    server: Server = request.getfixturevalue(kind)

    async def work() -> None:
        one = await create(server, enable_checkpoint=True, enable_sandbox_handoff=True)
        await one.execute("bash", "echo begun; read x; echo $x")
        await one.hear()
        two = await dial(server, one.id, one.token)
        assert await two.until("RUNNING") == S("RESTORING", "LOCK_ACQUIRING", "LOCK_ACQUIRED", "RUNNING")
        assert await one.until("CHECKPOINTED") == S(
            "LOCK_RELEASE_REQUESTED", "CHECKPOINTING", "DELETING", "LOCK_RELEASING", "LOCK_RELEASED", "DELETED", "CHECKPOINTED",
        )  # fmt: skip
        await one.say(language="bash", code="echo no")
        assert await one.hear() == S("EXECUTION_ERROR")[0]
        await one.hear()
        await one.say(action="kill_sandbox")
        assert await one.until("KILL_ERROR") == S("KILLING", "KILL_ERROR")
        await two.say(action="reconnect")
        assert await two.hear() == S("EXECUTION_RUNNING")[0]
        await two.say(event="stdin", data="handed\n")
        assert text(await two.until("EXECUTION_DONE")) == "handed\n"
        await two.say(action="kill_sandbox")
        assert await two.rest() == (
            S("KILLING", "DELETING", "LOCK_RELEASING", "LOCK_RELEASED", "DELETED", "KILLED"), 1000,
        )  # fmt: skip

    run(work())


def test_create_with_handoff(server: Server) -> None:
    async def work() -> None:
        client = await create_raw(server)
        heard = await client.until("RUNNING")
        assert [one.get("status", one["event"]) for one in heard] == [
            "SANDBOX_CREATING", "SANDBOX_LOCK_ACQUIRING", "SANDBOX_LOCK_ACQUIRED", "sandbox_id", "SANDBOX_RUNNING",
        ]  # fmt: skip
        await client.say(action="checkpoint")
        assert await client.rest() == (
            S("CHECKPOINTING", "DELETING", "LOCK_RELEASING", "LOCK_RELEASED", "DELETED", "CHECKPOINTED"), 1000,
        )  # fmt: skip
        client = await dial(server, client.id, client.token)
        assert await client.until("RUNNING") == S("RESTORING", "LOCK_ACQUIRING", "LOCK_ACQUIRED", "RUNNING")
        await client.close()

    run(work())


async def create_raw(server: Server) -> Client:
    from protocol_kit import connect

    client = Client(await connect(f"{server.ws}/create"))
    await client.say(enable_checkpoint=True, enable_sandbox_handoff=True)
    return client


def test_handoff_between_two_servers(postgres: Postgres, tmp_path: Path) -> None:
    shared = ["--database", postgres.url(postgres.create()), "--store", str(tmp_path / "store"), "--runtime", "runc"]
    with clean(tmp_path, *shared, "--host-id", "a") as a:
        (tmp_path / "b").mkdir()
        with clean(tmp_path / "b", *shared, "--host-id", "b") as b:

            async def work() -> None:
                one = await create(a, enable_checkpoint=True, enable_sandbox_handoff=True)
                await one.run("echo kept > /root/file")
                await one.execute("bash", "sleep 1000")
                two = await dial(b, one.id, one.token)
                assert await two.until("RUNNING") == S("RESTORING", "LOCK_ACQUIRING", "LOCK_ACQUIRED", "RUNNING")
                assert await one.until("CHECKPOINTED") == S(
                    "LOCK_RELEASE_REQUESTED", "CHECKPOINTING", "EXECUTION_FORCE_KILLED", "EXECUTION_DONE", "DELETING",
                    "LOCK_RELEASING", "LOCK_RELEASED", "DELETED", "CHECKPOINTED",
                )  # fmt: skip
                assert await two.run("cat /root/file") == "kept\n"
                await one.say(language="bash", code="echo no")
                assert await one.hear() == S("EXECUTION_ERROR")[0]
                plain = await create(a)
                elsewhere = await dial(b, plain.id, plain.token)
                assert await elsewhere.rest() == (S("IN_USE"), 1011)
                await plain.close()
                await two.say(action="kill_sandbox")
                await two.rest()

            run(work())


def test_a_server_that_dies_loses_nothing(tmp_path: Path) -> None:
    """kill -9; the next server has the same sandbox, the same token, and the execution goes on."""
    with clean(tmp_path, "--runtime", "runc") as server:

        async def before() -> Client:
            client = await create(server)
            await client.execute("bash", "echo one; read x; echo $x; sleep 0.1; echo end")
            assert await client.hear() == {"event": "stdout", "data": "one\n"}
            return client

        client = run(before())
        server.stop(signal.SIGKILL)
        server.start()

        async def after() -> None:
            again = await reconnect(server, client, received={"stdout": 4, "stderr": 0})
            assert await again.hear() == S("EXECUTION_RUNNING")[0]
            await again.say(event="stdin", data="two\n")
            assert text(await again.until("EXECUTION_DONE")) == "two\nend\n"
            await again.say(action="kill_sandbox")
            await again.rest()

        run(after())
