"""Two tenants try to reach each other by every path; a key of one project tries to leave it; nobody gets in without a key."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from websockets.exceptions import InvalidStatus

from sandkeep.errors import BadArgument, SandboxNotFound
from sandkeep.server.settings import Settings
from sandkeep.server.spaces import Spaces, folder_of
from serving import Served, connect, made, ran, served, told  # noqa: F401
from waiting import PATIENCE


@dataclass
class Estate:
    """What one tenant has."""

    api: httpx.Client
    key: str
    user: str
    sandbox: str
    snapshot: str
    checkpoint: str
    pid: int


@pytest.fixture(scope="module")
def ann(served: Served) -> Iterator[Estate]:  # noqa: F811
    user = uuid.uuid4().hex
    key = served.key(user, "garden")
    api = served.api(key)
    id = made(api, env={"DIARY": "ann's"})
    ran(api, id, "echo private > diary")
    snapshot = api.post(f"/sandboxes/{id}/snapshot").json()["id"]
    checkpoint = api.post(f"/sandboxes/{id}/checkpoints", json={"tag": "mine"}).json()["id"]
    pid = api.post(f"/sandboxes/{id}/commands", json={"command": "sleep 100000", "background": True}).json()["pid"]
    yield Estate(api, key, user, id, snapshot, checkpoint, pid)
    api.delete(f"/sandboxes/{id}")


@pytest.fixture(scope="module", params=["another user", "the same user's other project"])
def thief(request: pytest.FixtureRequest, served: Served, ann: Estate) -> httpx.Client:  # noqa: F811
    return served.api(served.key(uuid.uuid4().hex if request.param == "another user" else ann.user, "yard"))


def calls_on(ann: Estate) -> list[tuple[str, str, dict[str, object]]]:
    """Every call with a sandbox in its path."""
    base = f"/sandboxes/{ann.sandbox}"
    command = f"{base}/commands/{ann.pid}"
    return [
        ("GET", base, {}), ("PATCH", base, {"json": {"auto_pause_timeout": 1}}), ("DELETE", base, {}),
        ("POST", f"{base}/pause", {}), ("POST", f"{base}/resume", {}), ("POST", f"{base}/activity", {}), ("POST", f"{base}/fork", {}),
        ("POST", f"{base}/snapshot", {}), ("GET", f"{base}/snapshots", {}), ("DELETE", f"{base}/snapshots/{ann.snapshot}", {}),
        ("POST", f"{base}/restore", {"json": {"to": ann.snapshot}}), ("POST", f"{base}/checkpoints", {}),
        ("GET", f"{base}/env", {}), ("PUT", f"{base}/env", {"json": {"A": "b"}}), ("DELETE", f"{base}/env/DIARY", {}),
        ("GET", f"{base}/history", {}), ("DELETE", f"{base}/history", {}), ("GET", f"{base}/workflow", {}),
        ("PUT", f"{base}/workflow", {"json": {"variables": {}}}), ("PATCH", f"{base}/workflow", {"json": {"variables": {}}}),
        ("DELETE", f"{base}/workflow/x", {}), ("GET", f"{base}/ports", {}), ("GET", f"{base}/usage", {}), ("GET", f"{base}/events", {}),
        ("GET", f"{base}/state", {}), ("PUT", f"{base}/state", {"content": b"x"}),
        ("GET", f"{base}/commands", {}), ("POST", f"{base}/commands", {"json": {"command": "id"}}),
        ("POST", f"{base}/commands?stream=sse", {"json": {"command": "id"}}), ("GET", command, {}), ("GET", f"{command}/output", {}),
        ("GET", f"{command}/wait", {}), ("POST", f"{command}/stdin", {"content": b"x"}), ("POST", f"{command}/signal", {}),
        ("GET", f"{base}/files?path=diary", {}), ("PUT", f"{base}/files?path=diary", {"content": b"x"}),
        ("DELETE", f"{base}/files?path=diary", {}), ("GET", f"{base}/files/list?path=.", {}), ("GET", f"{base}/files/stat?path=diary", {}),
        ("POST", f"{base}/files/mkdir", {"json": {"path": "x"}}), ("POST", f"{base}/files/move", {"json": {"source": "diary", "target": "x"}}),
        ("PUT", f"{base}/egress", {"json": {}}), ("DELETE", f"{base}/egress", {}),
        ("GET", f"{base}/ports/80/", {}), ("POST", f"{base}/ports/80/x", {"content": b"x"}),
    ]  # fmt: skip


def test_the_table_of_calls_is_whole(served: Served, ann: Estate) -> None:  # noqa: F811
    """A new route with a sandbox in its path has to be added there."""
    paths = httpx.get(f"{served.url}/openapi.json", trust_env=False, timeout=PATIENCE).json()["paths"]
    known = {
        (method.upper(), path)
        for path, methods in paths.items()
        if path.startswith("/sandboxes/{id}")
        for method in methods
    }
    names = {
        ann.sandbox: "{id}",
        f"commands/{ann.pid}": "commands/{pid}",
        ann.snapshot: "{snapshot}",
        "DIARY": "{name}",
        "workflow/x": "workflow/{key}",
    }
    tried = set()
    for method, path, _ in calls_on(ann):
        for value, name in names.items():
            path = path.replace(value, name)
        tried.add((method, path.partition("?")[0]))
    assert known - tried == set()


def test_no_call_on_another_tenants_sandbox_finds_it(thief: httpx.Client, ann: Estate) -> None:
    for method, path, options in calls_on(ann):
        answer = thief.request(method, path, **options)  # type: ignore[arg-type]
        assert (answer.status_code, answer.json()["code"]) == (404, "SANDBOX_NOT_FOUND"), (method, path)
    assert ran(ann.api, ann.sandbox, "cat diary; echo $DIARY")["stdout"] == "private\nann's\n"
    assert ann.api.get(f"/sandboxes/{ann.sandbox}/commands/{ann.pid}").json()["running"]


def test_no_websocket_opens_on_another_tenants_sandbox(thief: httpx.Client, ann: Estate, served: Served) -> None:  # noqa: F811
    for path in ("link", "terminal", f"terminal?pid={ann.pid}", "commands/ws", "ports/80/", "ports/80"):
        with pytest.raises(InvalidStatus) as refused:
            connect(
                f"{served.url.replace('http', 'ws')}/sandboxes/{ann.sandbox}/{path}",
                additional_headers={"Authorization": thief.headers["Authorization"]},
            )  # fmt: skip
        assert refused.value.response.status_code == 404
        assert json.loads(refused.value.response.body)["code"] == "SANDBOX_NOT_FOUND"


def test_another_tenants_checkpoints_are_not_there(thief: httpx.Client, ann: Estate) -> None:
    assert thief.get("/checkpoints").json()["checkpoints"] == []
    assert thief.get("/checkpoints/tree").json()["checkpoints"] == []
    id = ann.checkpoint
    for path in (
        id,
        f"{id}/ls",
        f"{id}/files?path=/etc/passwd",
        f"{id}/extract",
        f"diff?a={id}&b={id}",
        id[:10],
        "latest",
    ):
        told(thief.get(f"/checkpoints/{path}"), 404, "CHECKPOINT_NOT_FOUND")
    told(thief.post("/sandboxes", json={"from_checkpoint": id}), 404, "CHECKPOINT_NOT_FOUND")
    own = made(thief)
    told(thief.post(f"/sandboxes/{own}/restore", json={"to": id}), 404, "CHECKPOINT_NOT_FOUND")
    told(thief.post(f"/sandboxes/{own}/restore", json={"to": ann.snapshot}), 404, "SNAPSHOT_NOT_FOUND")
    told(
        thief.post(f"/sandboxes/{own}/restore", json={"to": f"sn_../../{ann.sandbox}/snapshots/{ann.snapshot}"}),
        404,
        "SNAPSHOT_NOT_FOUND",
    )
    thief.delete(f"/sandboxes/{own}")


def test_a_project_key_stays_in_its_project(thief: httpx.Client, ann: Estate) -> None:
    assert all(one["project"] == "yard" for one in thief.get("/sandboxes").json()["sandboxes"])
    assert thief.get("/sandboxes", params={"project": "garden"}).json()["sandboxes"] == []
    told(thief.post("/sandboxes", json={"project": "garden"}), 403, "DENIED")
    told(thief.get("/checkpoints", params={"project": "garden"}), 403, "DENIED")


def test_a_users_key_without_a_project_sees_all_of_the_users_projects(ann: Estate, served: Served) -> None:  # noqa: F811
    whole = served.api(served.key(ann.user))
    assert ann.sandbox in [one["id"] for one in whole.get("/sandboxes").json()["sandboxes"]]
    assert ann.checkpoint in [one["id"] for one in whole.get("/checkpoints").json()["checkpoints"]]
    assert whole.get(f"/checkpoints/{ann.checkpoint}").json()["tag"] == "mine"


def test_storage_is_each_tenants_own(thief: httpx.Client, ann: Estate) -> None:
    import hashlib

    digest = {"Content-SHA256": hashlib.sha256(b"ann's").hexdigest()}
    ann.api.put("/storage/some/object", content=b"ann's", headers=digest).raise_for_status()
    assert thief.get("/storage").json()["objects"] == []
    told(thief.get("/storage/some/object"), 404, "NOT_FOUND")
    assert thief.head("/storage/some/object").status_code == 404
    thief.post("/storage", json={"delete": ["some/object"]}).raise_for_status()
    for path in (
        "/storage/..%2f..%2fx",
        "/storage/a/../../x",
        "/storage/%2e%2e/x",
        "/storage//etc/passwd",
        "/storage/a%00b",
    ):
        assert thief.get(path).status_code in (400, 404)
        assert thief.put(path, content=b"ann's", headers=digest).status_code in (400, 404, 405)
    told(thief.get("/storage", params={"prefix": "../"}), 400, "BAD_ARGUMENT")
    assert ann.api.get("/storage/some/object").content == b"ann's"


def test_without_a_valid_key_there_is_nothing(ann: Estate, served: Served) -> None:  # noqa: F811
    for headers in (
        {},
        {"Authorization": "Bearer sk_wrong"},
        {"X-API-Key": ""},
        {"Authorization": f"Basic {ann.key}"},
        {"X-API-Key": ann.key + "x"},
    ):
        for path in (
            "/sandboxes",
            f"/sandboxes/{ann.sandbox}",
            "/checkpoints",
            "/storage",
            f"/sandboxes/{ann.sandbox}/ports/80/",
        ):
            answer = httpx.get(served.url + path, headers=headers, trust_env=False, timeout=PATIENCE)
            told(answer, 401, "DENIED")
            assert answer.headers["WWW-Authenticate"] == "Bearer"
    told(
        httpx.get(f"{served.url}/sandboxes?api_key={ann.key}", trust_env=False, timeout=PATIENCE), 401, "DENIED"
    )  # only WebSockets take it there
    assert (
        httpx.get(
            f"{served.url}/sandboxes", headers={"X-API-Key": ann.key}, trust_env=False, timeout=PATIENCE
        ).status_code
        == 200
    )


@pytest.mark.parametrize(
    "pair", [("Ä", "ä"), ("A", "a"), ("a.b", "a-b"), ("a", "a "), ("", "-"), ("x" * 50, "x" * 51), ("_", "-")]
)
def test_tenants_whose_names_look_alike_share_no_folder(pair: tuple[str, str], tmp_path: Path) -> None:
    folders = {folder_of(name).casefold() for name in (*pair, None)}
    assert len(folders) == 3, "also where the file system does not tell cases apart"
    spaces = Spaces(Settings(home=tmp_path))
    for open_space in (spaces._url, lambda kind, user, project: spaces._url(kind, "ann", user)):
        assert len({open_space("checkpoints", name, None) for name in pair}) == 2
    assert all(re.fullmatch(r"[A-Za-z0-9-]+", folder_of(name)) for name in pair)


def test_a_revoked_key_is_refused_at_once(served: Served) -> None:  # noqa: F811
    from sandkeep.sessions import Database, Keys

    key = served.key()
    api = served.api(key)
    assert api.get("/sandboxes").status_code == 200
    database = Database(served.database)
    try:
        keys = Keys(database)
        keys.revoke(keys.check(key).id)
    finally:
        database.close()
    told(api.get("/sandboxes"), 401, "DENIED")


def test_the_link_lets_only_a_users_requests_through(ann: Estate, served: Served) -> None:  # noqa: F811
    headers = {"Authorization": f"Bearer {ann.key}"}
    with connect(
        f"{served.url.replace('http', 'ws')}/sandboxes/{ann.sandbox}/link", additional_headers=headers
    ) as socket:
        for op in (
            "secrets_get",
            "secrets_set",
            "sleep",
            "shutdown",
            "stop_all",
            "hold",
            "reseed",
            "connect",
            "kill_all",
            "nonsense",
            None,
            [1],
        ):
            socket.send(json.dumps({"op": op}))
            said = json.loads(socket.recv(PATIENCE))
            assert (said["ok"], said["code"]) == (False, "DENIED"), op
        for fields in ({"env": {}}, {"cwd": "/tmp", "history": []}, {}):
            socket.send(json.dumps({"op": "session_set", **fields}))
            assert json.loads(socket.recv(PATIENCE))["code"] == "DENIED"
        socket.send(json.dumps({"op": "env_get"}))
        assert json.loads(socket.recv(PATIENCE))["env"]["DIARY"] == "ann's"
        socket.send(b"\x03data without a request")
        assert json.loads(socket.recv(PATIENCE))["error"]["code"] == "BAD_ARGUMENT"


def test_the_python_client_finds_no_others_sandbox(ann: Estate, served: Served) -> None:  # noqa: F811
    remote = served.remote()
    with pytest.raises(SandboxNotFound):
        remote.Sandbox.connect(ann.sandbox)
    with pytest.raises(SandboxNotFound):
        remote.Sandbox._of(ann.sandbox).commands.run("id")
    with pytest.raises(BadArgument):
        remote.Sandbox.attach(f"../sandboxes/{ann.sandbox}")
    assert remote.Sandbox.list() == []
