"""Who may come in, and the protocol's HTTP calls."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator

import pytest
from websockets.exceptions import InvalidStatus

from protocol_kit import Client, S, Server, attach, clean, connect, create, dial, error, run, server

__all__ = ["server"]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that listens on every address."""
    with clean(tmp_path_factory.mktemp("protocol"), "--runtime", "runc", "--host", "0.0.0.0") as found:
        found.http = found.http.replace("0.0.0.0", "127.0.0.1")
        found.ws = found.ws.replace("0.0.0.0", "127.0.0.1")
        yield found


async def refused(url: str, **options: object) -> int:
    with pytest.raises(InvalidStatus) as found:
        await connect(url, **options)
    return found.value.response.status_code


def test_signs_of_life(server: Server) -> None:
    assert server.call("GET", "/") == (200, b'{"message":"Server is running"}')
    assert server.call("GET", "/status") == (200, b'{"status":"ok"}')


def test_one_off_code(server: Server) -> None:
    code = b"import sys; print('out'); print('err', file=sys.stderr); print('\xc3\xa9')"
    status, said = server.call("POST", "/execute", code, Content_Type="text/plain")
    assert status == 200
    assert sorted(said.decode().split()) == ["err", "out", "é"]
    assert server.call("POST", "/execute?language=bash", b"echo $((6*7))")[1] == b"42\n"
    assert server.call("POST", "/execute?language=ruby", b"1")[0] == 422
    assert server.call("GET", "/list")[1] == b'{"containers":"ID   STATUS   HOST\\n"}'


def test_containers(server: Server) -> None:
    async def work() -> str:
        client = await create(server)
        await client.run("echo kept > /root/file")
        await client.close()
        assert client.id in json.loads((await asyncio.to_thread(server.call, "GET", "/list"))[1])["containers"]
        assert (await asyncio.to_thread(server.call, "POST", f"/containers/{client.id}/suspend"))[0] == 200
        assert (await asyncio.to_thread(server.call, "POST", f"/containers/{client.id}/resume"))[0] == 200
        client = await attach(server, client.id, client.token)
        assert await client.run("cat /root/file") == "kept\n"
        await client.close()
        return client.id

    id = run(work())
    assert server.call("DELETE", f"/containers/{id}")[0] == 200
    status, said = server.call("DELETE", f"/containers/{id}")
    assert status == 500
    assert list(json.loads(said)) == ["detail"]


def test_beyond_loopback_a_key_is_wanted(public: Server) -> None:
    async def work() -> None:
        assert await refused(f"{public.ws}/create") == 401
        assert await refused(f"{public.ws}/create?api_key=sk_wrong") == 401
        for url, headers in (
            (f"{public.ws}/create?api_key={public.key}", {}),
            (f"{public.ws}/create", {"X-API-Key": public.key}),
            (f"{public.ws}/create", {"Authorization": f"Bearer {public.key}"}),
        ):
            client = Client(await connect(url, additional_headers=headers))
            await client.say()
            await client.until("RUNNING")
            await client.close()
        client = await attach(public, client.id, client.token)
        await client.say(action="kill_sandbox")
        await client.rest()

    run(work())
    assert public.key not in public.log.read_text().replace(f"shown once: {public.key}", "")
    for method, path in (("POST", "/execute"), ("GET", "/list"), ("DELETE", "/containers/sb-000000000000")):
        assert public.call(method, path, b"" if method == "POST" else None)[0] == 401
    assert public.call("POST", "/execute?language=bash", b"echo hi", X_API_Key=public.key) == (200, b"hi\n")


def test_web_pages_and_proxies_are_not_this_machine(server: Server) -> None:
    async def work() -> None:
        for headers in ({"Origin": "https://evil.example"}, {"Origin": "null"}, {"X-Forwarded-For": "1.2.3.4"}):
            assert await refused(f"{server.ws}/create", additional_headers=headers) == 401
        page = Client(await connect(f"{server.ws}/create", additional_headers={"Origin": "http://localhost:3000"}))
        await page.say()
        await page.until("RUNNING")
        await page.close()

    run(work())
    assert server.call("POST", "/execute", b"1", Origin="https://evil.example")[0] == 401
    assert server.call("GET", "/list", Host="evil.example")[0] == 401


def test_tenants_do_not_meet(public: Server) -> None:
    """A sandbox of one user is neither listed for, nor reached by, another; names of snapshots are each user's own."""
    words = [sys.executable, "-m", "sandkeep", "key", "create", "--user", "bob", "--json", "--home", str(public.home)]
    bob = json.loads(subprocess.run(words, check=True, capture_output=True).stdout)["key"]

    async def call(method: str, path: str) -> tuple[int, bytes]:
        return await asyncio.to_thread(public.call, method, path, X_API_Key=bob)

    async def work() -> None:
        client = Client(await connect(f"{public.ws}/create?api_key={public.key}"))
        await client.say()
        await client.until("RUNNING")
        await client.say(action="snapshot_filesystem", name="hers")
        await client.until("FILESYSTEM_SNAPSHOT_CREATED")
        assert client.id not in json.loads((await call("GET", "/list"))[1])["containers"]
        for method, verb in (("POST", "/suspend"), ("POST", "/resume"), ("DELETE", "")):
            status, said = await call(method, f"/containers/{client.id}{verb}")
            assert status == 500
            assert "no sandbox" in json.loads(said)["detail"]
        other = Client(await connect(f"{public.ws}/create?api_key={bob}"))
        await other.say(filesystem_snapshot_name="hers")
        heard, code = await other.rest()
        assert "Filesystem snapshot not found" in heard[-1]["message"]
        assert code == 4000
        other = Client(await connect(f"{public.ws}/create?api_key={bob}"))
        await other.say()
        await other.until("RUNNING")
        crossed = await dial(public, client.id, other.token)
        assert await crossed.rest() == ([*S("PERMISSION_DENIAL_ERROR"), error("Invalid sandbox token.")], 4000)
        assert await client.run("echo mine") == "mine\n"

    run(work())


def test_the_protocol_can_be_left_out(tmp_path_factory: pytest.TempPathFactory) -> None:
    with clean(tmp_path_factory.mktemp("protocol"), "--no-websocket-protocol") as server:
        assert server.call("GET", "/status")[0] == 404
        assert run(refused(f"{server.ws}/create")) == 403
