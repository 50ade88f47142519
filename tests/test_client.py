"""What only the client over the wire has: addresses and keys, connections that break, streams that are left, many threads."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sandkeep
from sandkeep.errors import BadArgument, Denied, HostGone, SandboxDead, ServerUnreachable
from serving import Served, fixed_port, served, serving  # noqa: F401
from waiting import PATIENCE, until


def test_address_and_key_come_from_arguments_or_the_environment(
    served: Served,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SANDKEEP_API_URL", "SANDKEEP_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    for url, key in ((None, "sk_x"), ("http://x", None), ("ftp://x", "sk_x")):
        with pytest.raises(BadArgument):
            sandkeep.connect(url, api_key=key)
    monkeypatch.setenv("SANDKEEP_API_URL", served.url + "/")
    monkeypatch.setenv("SANDKEEP_API_KEY", served.key())
    with sandkeep.connect() as remote, remote.Sandbox() as sandbox:
        assert sandbox.commands.run("echo hi").stdout == "hi\n"
    with sandkeep.connect(api_key="sk_wrong") as remote:
        with pytest.raises(Denied):
            remote.Sandbox()
        with pytest.raises(Denied):
            remote.Sandbox._of("sb-000000000000").commands.run("id")
    with sandkeep.connect("http://127.0.0.1:1", api_key="sk_x") as remote:
        with pytest.raises(ServerUnreachable):
            remote.Sandbox()
        with pytest.raises(ServerUnreachable):
            remote.Sandbox._of("sb-000000000000").commands.run("id")


def test_a_handle_goes_on_when_the_server_was_started_anew(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--runtime", "runc", port=fixed_port()) as server:
        key = server.key()
        sandbox = server.remote(key).Sandbox()
        process = sandbox.commands.run("i=0; while true; do i=$((i+1)); echo $i; sleep 0.05; done", background=True)
        output = iter(process.output())
        next(output)
        server.kill()
        with pytest.raises(ServerUnreachable):
            list(output)
        server.start()
        assert sandbox.commands.run("echo again").stdout == "again\n"
        assert next(iter(sandbox.commands.connect(process.pid).output()))[1].startswith(b"1\n")


def test_a_sandbox_whose_host_is_gone_goes_on_when_told_to(tmp_path: Path) -> None:
    """Its server left, it did not sleep; another server on the same database and store is all that is there now."""
    shared = ("--runtime", "runc", "--store", str(tmp_path / "store"))
    database = f"sqlite:///{tmp_path}/sessions.db"
    with serving(tmp_path / "a", *shared, database=database) as first:
        key = first.key()
        one, two = (first.remote(key).Sandbox(auto_pause_timeout=0) for _ in range(2))
        for sandbox in (one, two):
            sandbox.commands.run("echo saved > f; export WORD=kept")
            sandbox.checkpoint("the last")
            sandbox.commands.run("echo later > later")
        assert first.stop() == 0
        with serving(tmp_path / "b", *shared, database=database) as second:
            sandbox = second.remote(key).Sandbox.attach(one.id)
            with pytest.raises(HostGone):
                sandbox.commands.run("id")
            with pytest.raises(HostGone) as gone:
                sandbox.resume()
            assert "fail_over" in gone.value.remedy
            assert sandbox.resume(fail_over=True).level == "files"
            assert sandbox.commands.run("cat f; echo $WORD; ls").stdout == "saved\nkept\nf\n"

            async def back() -> None:
                async with sandkeep.connect(second.url, api_key=key) as server:
                    sandbox = await server.AsyncSandbox.attach(two.id)
                    report = await sandbox.resume(fail_over=True)
                    assert report == sandbox.restore_report
                    assert (await sandbox.commands.run("ls")).stdout == "f\n"
                    await sandbox.close()

            asyncio.run(back())


def test_a_body_that_takes_its_time_is_no_silence(served: Served) -> None:  # noqa: F811
    def slowly() -> Iterator[bytes]:
        for _ in range(4):
            time.sleep(0.6)
            yield b"x"

    fields = {"path": "/tmp/slow"}
    remote = served.remote()
    with remote.Sandbox() as sandbox:
        with sandbox.files._link.stream("file_write", fields, body=slowly(), timeout=1.0) as events:
            assert list(events) == []
        assert sandbox.files.read("/tmp/slow") == b"xxxx"

        async def awaited() -> None:
            again = await remote.AsyncSandbox.attach(sandbox.id)
            async with again.files._link.stream("file_write", fields, body=slowly_awaited(), timeout=1.0) as events:
                assert [event async for event in events] == []
            await again.close()
            await remote.aclose()

        async def slowly_awaited() -> AsyncIterator[bytes]:
            for _ in range(4):
                await asyncio.sleep(0.6)
                yield b"y"

        asyncio.run(awaited())
        assert sandbox.files.read("/tmp/slow") == b"yyyy"


def test_a_stream_that_is_left_early_leaves_the_process_and_the_link_well(served: Served) -> None:  # noqa: F811
    remote = served.remote()
    with remote.Sandbox() as sandbox:
        process = sandbox.commands.run("yes", background=True)
        for _ in range(3):
            output = process.output()
            next(iter(output))
            output.close()
        assert process.info().running
        process.kill()
        assert sandbox.commands.run("echo well").stdout == "well\n"


def test_threads_share_a_handle(served: Served) -> None:  # noqa: F811
    with served.remote().Sandbox() as sandbox, ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: sandbox.commands.run(f"echo {n}").stdout, range(40)))
        assert found == [f"{n}\n" for n in range(40)]
        sandbox.close()


def test_a_cancelled_call_ends_its_command_and_does_not_spoil_the_next(served: Served) -> None:  # noqa: F811
    async def cancelling() -> None:
        async with served.remote() as remote, remote.AsyncSandbox() as sandbox:

            async def running(count: int) -> None:
                async with asyncio.timeout(PATIENCE):
                    while len([one for one in await sandbox.commands.list() if one.running]) != count:
                        await asyncio.sleep(0.05)

            for _ in range(3):
                call = asyncio.create_task(sandbox.commands.run("sleep 1000"))
                await running(1)
                call.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await call
                await running(0)
            assert (await sandbox.commands.run("echo well")).stdout == "well\n"

    asyncio.run(cancelling())


def test_one_remote_serves_several_event_loops(served: Served) -> None:  # noqa: F811
    remote = served.remote()
    id = remote.Sandbox().id

    async def use() -> None:
        sandbox = await remote.AsyncSandbox.attach(id)
        assert (await sandbox.commands.run("echo hi")).stdout == "hi\n"
        await sandbox.close()
        await remote.aclose()

    asyncio.run(use())
    asyncio.run(use())


def test_a_killed_sandbox_is_dead_to_its_handles(served: Served) -> None:  # noqa: F811
    remote = served.remote()
    sandbox = remote.Sandbox()
    other = remote.Sandbox.attach(sandbox.id)
    other.commands.run("true")
    sandbox.kill()
    with pytest.raises((SandboxDead, sandkeep.SandkeepError)) as refused:
        other.commands.run("true")
    assert refused.value.code in ("SANDBOX_NOT_FOUND", "SANDBOX_DEAD")
    other.close()


def test_a_slow_reader_holds_back_the_writer_and_not_the_servers_memory(tmp_path: Path) -> None:
    with serving(tmp_path / "home", "--runtime", "runc") as server:
        sandbox = server.remote().Sandbox()
        assert server.process is not None
        status = Path(f"/proc/{server.process.pid}/status")

        def memory() -> int:
            return int(next(line for line in status.read_text().splitlines() if line.startswith("VmRSS")).split()[1])

        sandbox.commands.run("truncate -s 2G large")
        streams = [iter(sandbox.files.read_stream("large")) for _ in range(8)]
        for stream in streams:
            next(stream)
        before = memory()
        until(
            lambda: all(sandbox.commands.run("true").exit_code == 0 for _ in range(20)), "the server answers meanwhile"
        )
        assert memory() - before < 64 << 10
        for stream in streams:
            stream.close()  # type: ignore[attr-defined]
