"""An E2B program, asynchronous: what differs from the synchronous one by nature, and many things at once."""

import asyncio

import e2b
from e2b import AsyncSandbox, CommandExitException, FilesystemEventType


async def raised(kind, call):
    try:
        await call
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was expected")


async def commands(sbx):
    heard = []

    async def hear(text):
        heard.append(text)

    done = await sbx.commands.run("echo one; echo two >&2; exit 0", on_stdout=hear)
    assert (done.stdout, done.stderr, "".join(heard)) == ("one\n", "two\n", "one\n")
    failed = await raised(CommandExitException, sbx.commands.run("exit 7"))
    assert failed.exit_code == 7
    several = await asyncio.gather(*(sbx.commands.run(f"sleep 0.1; echo {n}") for n in range(8)))
    assert [one.stdout for one in several] == [f"{n}\n" for n in range(8)]
    handle = await sbx.commands.run("cat", background=True, stdin=True)
    await sbx.commands.send_stdin(handle.pid, "line\n")
    await handle.kill()
    if "stream_input" in dir(sbx.commands):
        handle = await sbx.commands.run("cat", background=True, stdin=True)
        words = sbx.commands.stream_input(handle.pid)
        for n in range(20):
            await words.send(f"{n}\n")
        await words.close()
        await sbx.commands.close_stdin(handle.pid)
        assert (await handle.wait()).stdout.split() == [str(n) for n in range(20)]
    left = await sbx.commands.run("sleep 300", background=True)
    await left.disconnect()
    assert left.pid in [one.pid for one in await sbx.commands.list()]
    assert await sbx.commands.kill(left.pid)


async def files(sbx):
    await sbx.files.write("a/b", b"\x00\xff" * 100_000)
    assert bytes(await sbx.files.read("a/b", format="bytes")) == b"\x00\xff" * 100_000
    await asyncio.gather(*(sbx.files.write(f"many/{n}", str(n)) for n in range(10)))
    assert len(await sbx.files.list("many")) == 10
    seen = asyncio.Queue()
    watch = await sbx.files.watch_dir("a", on_event=seen.put)
    await sbx.files.write("a/c", "new")
    async with asyncio.timeout(60):
        found = [await seen.get() for _ in range(3)]
    assert [one.type for one in found] == [
        FilesystemEventType.CREATE,
        FilesystemEventType.CHMOD,
        FilesystemEventType.WRITE,
    ]
    assert {one.name for one in found} == {"c"}
    await sbx.commands.run("chmod 600 a/c")
    async with asyncio.timeout(60):
        assert (await seen.get()).type is FilesystemEventType.CHMOD
    await watch.stop()


async def terminal(sbx):
    shown = []
    pty = await sbx.pty.create(e2b.PtySize(rows=24, cols=80), on_data=shown.append)
    await sbx.pty.send_stdin(pty.pid, b"echo $((6*7)); exit\n")
    await pty.wait()
    assert b"42\r\n" in b"".join(shown)


async def copies(sbx):
    taken = await sbx.create_snapshot()
    fresh, twins = await asyncio.gather(AsyncSandbox.create(taken.snapshot_id, timeout=120), sbx.fork(timeout=120))
    for one in (fresh, *twins):
        assert await one.files.read("many/3") == "3"
        assert await one.kill()
    assert await AsyncSandbox.delete_snapshot(taken.snapshot_id)
    assert await until_some(sbx.get_metrics)


async def until_some(ask):
    async with asyncio.timeout(60):
        while not (found := await ask()):
            await asyncio.sleep(0.05)
        return found


async def life(sbx):
    await sbx.pause()
    assert not await sbx.is_running()
    again = await AsyncSandbox.connect(sbx.sandbox_id, timeout=300)
    assert (await again.files.read("many/3")) == "3"
    handle = await sbx.commands.run("sleep 300", background=True, timeout=0)
    assert await sbx.kill()
    error = await raised(e2b.SandboxException, handle.wait())
    assert "killed" in str(error) or "not found" in str(error), error


async def main():
    sbx = await AsyncSandbox.create(timeout=300)
    try:
        for part in (commands, files, terminal, copies, life):
            await part(sbx)
    finally:
        await sbx.kill()


asyncio.run(main())
