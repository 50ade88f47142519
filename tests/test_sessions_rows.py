"""Rows: created first, moved by compare-and-swap through one table, seen through a scope, found by cursor."""

from __future__ import annotations

import contextlib
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sandkeep.errors import BadArgument, DatabaseFailed, Denied, NotFound, SandboxDead, SandboxNotFound, StateConflict
from sandkeep.sessions import MOVES, Database, Hosts, Keys, Log, Scope, Session, Sessions, SessionState, Tokens
from sandkeep.sessions.records import error_record, request_of
from sandkeep.sessions.tables import audit
from sessions_kit import ANN

pytest_plugins = ["postgres", "sessions_kit"]

S = SessionState
ROAD: dict[SessionState, list[SessionState]] = {
    S.CREATING: [],
    S.RUNNING: [S.RUNNING],
    S.PAUSING: [S.RUNNING, S.PAUSING],
    S.PAUSED: [S.RUNNING, S.PAUSING, S.PAUSED],
    S.RESUMING: [S.RUNNING, S.PAUSING, S.PAUSED, S.RESUMING],
    S.ERROR: [S.ERROR],
    S.KILLED: [S.KILLED],
}


@pytest.fixture
def rows(db: Database) -> Sessions:
    return Sessions(db, Hosts(db))


def made(rows: Sessions, id: str, state: SessionState, **fields: Any) -> Session:
    session = rows.create(id, ANN, host="a", **fields)
    for to in ROAD[state]:
        session = rows.move(id, session.state, to, generation=session.generation)
    return session


def test_every_cell_of_the_table_of_moves(rows: Sessions) -> None:
    for frm, to in itertools.product(S, S):
        id = f"{frm}-{to}"
        before = made(rows, id, frm)
        if to in MOVES[frm]:
            after = rows.move(id, frm, to, generation=before.generation)
            assert (after.state, after.generation) == (to, before.generation + 1)
        else:
            with pytest.raises(StateConflict):
                rows.move(id, frm, to, generation=before.generation)
            assert rows.get(id) == before


def test_the_table_says_what_the_design_says() -> None:
    wanted = {
        "CREATING": "RUNNING KILLED ERROR",
        "RUNNING": "PAUSING KILLED ERROR",
        "PAUSING": "PAUSED RUNNING KILLED ERROR",
        "PAUSED": "RESUMING KILLED ERROR",
        "RESUMING": "RUNNING PAUSED KILLED ERROR",
        "ERROR": "RESUMING KILLED",
        "KILLED": "",
    }
    assert {str(frm): set(map(str, to)) for frm, to in MOVES.items()} == {k: set(v.split()) for k, v in wanted.items()}


def test_a_request_is_had_by_one_session_at_a_time(rows: Sessions) -> None:
    request = request_of(ANN, "key")
    assert (
        len({request, request_of(Scope("ann", "p"), "key"), request_of(Scope("bob"), "key"), request_of(ANN, "k")}) == 4
    )
    assert rows.by_request(request) is None
    won: list[str] = []

    def race(n: int) -> None:
        with contextlib.suppress(StateConflict):
            won.append(rows.create(f"race-{n}", ANN, host="a", request=request).id)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(race, range(8)))
    (id,) = won
    assert [one.id for one in rows.find(ANN).sessions] == [id]
    for number, end in enumerate((S.ERROR, S.KILLED)):
        session = rows.by_request(request)
        assert session is not None
        with pytest.raises(StateConflict):
            rows.create("other", ANN, host="a", request=request)
        rows.move(session.id, S.CREATING, end, generation=1)
        assert rows.by_request(request) is None
        rows.create(f"next-{number}", ANN, host="a", request=request)
    rows.forget_request("next-1")
    assert rows.by_request(request) is None


def test_a_killed_session_never_runs_again(rows: Sessions) -> None:
    dead = made(rows, "x", S.KILLED)
    for to in S:
        with pytest.raises(StateConflict, match="has ended"):
            rows.move("x", S.KILLED, to, generation=dead.generation)
    assert not rows.touch("x")
    assert rows.get("x").state is S.KILLED


def test_a_stale_mover_changes_nothing(rows: Sessions) -> None:
    seen = made(rows, "x", S.RUNNING)
    rows.touch("x")
    with pytest.raises(StateConflict):
        rows.move("x", S.RUNNING, S.PAUSING, generation=seen.generation, last_activity=seen.last_activity)
    with pytest.raises(StateConflict):
        rows.move("x", S.RUNNING, S.PAUSING, generation=seen.generation - 1)
    with pytest.raises(StateConflict):
        rows.move("x", S.PAUSED, S.RESUMING, generation=seen.generation)
    with pytest.raises(SandboxNotFound):
        rows.move("nobody", S.RUNNING, S.PAUSING, generation=1)
    with pytest.raises(BadArgument):
        rows.move("x", S.RUNNING, S.PAUSING, generation=seen.generation, owner="eve")
    now = rows.get("x")
    assert (now.state, now.generation) == (S.RUNNING, seen.generation)


def test_of_many_movers_at_once_one_wins(rows: Sessions) -> None:
    seen = made(rows, "x", S.RUNNING)
    ready = threading.Barrier(8)

    def go(_: int) -> bool:
        ready.wait(60)
        try:
            rows.move("x", S.RUNNING, S.PAUSING, generation=seen.generation, last_activity=seen.last_activity)
        except StateConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(go, range(8))) == 1
    assert rows.get("x").generation == seen.generation + 1


def test_policy_and_id_survive_every_cycle(rows: Sessions) -> None:
    first = made(
        rows,
        "x",
        S.RUNNING,
        auto_pause_timeout=77,
        paused_expiry=88,
        metadata={"k": [1]},
        config={"c": None},
        project="p",
    )
    session = first
    for _ in range(3):
        for to in (S.PAUSING, S.PAUSED, S.RESUMING, S.RUNNING):
            session = rows.move("x", session.state, to, generation=session.generation, host="b", checkpoint="c")
    for name in ("id", "owner", "project", "metadata", "config", "auto_pause_timeout", "paused_expiry", "created"):
        assert getattr(session, name) == getattr(first, name)
    assert session.generation == first.generation + 12


def test_defaults_are_ten_minutes_and_thirty_days(rows: Sessions) -> None:
    session = rows.create("x", ANN, host="a")
    assert (session.auto_pause_timeout, session.paused_expiry, session.state) == (600, 30 * 86400, S.CREATING)


def test_update_changes_only_what_is_given(rows: Sessions) -> None:
    made(rows, "x", S.RUNNING, metadata={"a": 1}, auto_pause_timeout=5)
    changed = rows.update("x", auto_pause_timeout=0)
    assert (changed.auto_pause_timeout, changed.metadata, changed.paused_expiry) == (0, {"a": 1}, 30 * 86400)
    made(rows, "dead", S.KILLED)
    with pytest.raises(StateConflict):
        rows.update("dead", auto_pause_timeout=1)
    with pytest.raises(SandboxNotFound):
        rows.update("nobody", metadata={})


BAD: list[dict[str, Any]] = [
    {"id": ""},
    {"id": "../x"},
    {"id": "x\0"},
    {"id": "x" * 129},
    {"scope": Scope("")},
    {"scope": Scope("a\nb")},
    {"project": "p" * 201},
    {"metadata": {"n": float("nan")}},
    {"metadata": {1: 2}},
    {"metadata": {"t": (1,)}},
    {"metadata": {"big": "x" * 300_000}},
    {"config": ["no"]},
    {"auto_pause_timeout": -1},
    {"auto_pause_timeout": float("inf")},
    {"paused_expiry": "soon"},
]


def test_bad_input_is_refused_and_leaves_no_row(rows: Sessions) -> None:
    for bad in BAD:
        with pytest.raises(BadArgument):
            rows.create(**{"id": "x", "scope": ANN, "host": "a", **bad})
    assert rows.find().sessions == []


def test_an_id_is_taken_once(rows: Sessions) -> None:
    first = rows.create("x", ANN, host="a")
    with pytest.raises(StateConflict):
        rows.create("x", Scope("bob"), host="b")
    assert rows.get("x") == first


def test_pages_are_newest_first_and_complete(rows: Sessions) -> None:
    for n in range(25):
        rows.create(f"s{n:02}", ANN, host="a")
    seen: list[str] = []
    cursor = None
    while True:
        page = rows.find(ANN, cursor=cursor, limit=7)
        seen += [session.id for session in page.sessions]
        if seen and cursor is None:
            rows.create("later", ANN, host="a")
        cursor = page.cursor
        if cursor is None:
            break
    assert seen == [f"s{n:02}" for n in reversed(range(25))]
    for bad in ("", "x", "bm90anNvbg==", "WzEsIngiXQ==", "é"):
        with pytest.raises(BadArgument):
            rows.find(ANN, cursor=bad)
    for limit in (0, 1001):
        with pytest.raises(BadArgument):
            rows.find(ANN, limit=limit)


def test_find_by_project_state_and_host(rows: Sessions) -> None:
    made(rows, "run", S.RUNNING, project="p")
    made(rows, "sleep", S.PAUSED, project="p")
    made(rows, "dead", S.KILLED, project="p")
    made(rows, "other", S.RUNNING, project="q")

    def ids(**wanted: Any) -> list[str]:
        return [session.id for session in rows.find(**wanted).sessions]

    assert ids(project="p") == ["sleep", "run"]
    assert ids(states=frozenset({S.RUNNING})) == ["other", "run"]
    assert ids(states=frozenset({S.KILLED})) == ["dead"]
    assert ids(host="b") == []


def test_a_key_sees_only_its_own(rows: Sessions) -> None:
    rows.create("a-p", ANN, host="a", project="p")
    rows.create("a-q", ANN, host="a", project="q")
    rows.create("a-none", ANN, host="a")
    rows.create("b-p", Scope("bob"), host="a", project="p")

    def seen(scope: Scope | None) -> set[str]:
        return {session.id for session in rows.find(scope).sessions}

    assert seen(ANN) == {"a-p", "a-q", "a-none"}
    assert seen(Scope("ann", "p")) == {"a-p"}
    assert seen(Scope("bob")) == {"b-p"}
    assert seen(Scope("eve")) == set()
    assert seen(None) == {"a-p", "a-q", "a-none", "b-p"}
    for scope in (Scope("bob"), Scope("ann", "q"), Scope("ann'--"), Scope("eve")):
        with pytest.raises(SandboxNotFound):
            rows.get("a-p", scope)
    with pytest.raises(SandboxNotFound) as hidden:
        rows.get("b-p", ANN)
    with pytest.raises(SandboxNotFound) as missing:
        rows.get("b-x", ANN)
    assert str(hidden.value).replace("b-p", "b-x") == str(missing.value)


def test_a_project_key_creates_only_in_its_project(rows: Sessions) -> None:
    assert rows.create("x", Scope("ann", "p"), host="a").project == "p"
    with pytest.raises(Denied):
        rows.create("y", Scope("ann", "p"), host="a", project="q")
    with pytest.raises(SandboxNotFound):
        rows.get("y")


def test_keys_are_hashed_scoped_and_revocable(db: Database) -> None:
    keys = Keys(db)
    key, secret = keys.create("ann", "p")
    other, second = keys.create("bob")
    assert secret.startswith("sk_")
    assert secret != second
    assert keys.check(secret).scope == Scope("ann", "p")
    assert keys.check(second).scope == Scope("bob")
    used = keys.check(secret).last_used
    assert used is not None
    assert keys.check(secret).last_used == used
    for wrong in (
        "",
        "sk_",
        secret[:-1],
        secret + "x",
        secret.upper(),
        secret[:11] + second[11:],
        "sk_\0",
        "sk_é",
        "\ud800",
    ):
        with pytest.raises(Denied):
            keys.check(wrong)
    keys.revoke(key.id)
    with pytest.raises(Denied):
        keys.check(secret)
    assert keys.check(second).id == other.id
    assert [one.revoked is None for one in keys.all("ann")] == [False]
    with pytest.raises(NotFound):
        keys.revoke("nothing")
    with db.read() as connection:
        kept = str(connection.exec_driver_sql("SELECT * FROM keys").all())
    assert secret[11:] not in kept
    assert second[11:] not in kept


def test_tokens_open_one_sandbox(rows: Sessions, db: Database) -> None:
    rows.create("x", ANN, host="a")
    rows.create("y", ANN, host="a")
    tokens = Tokens(db)
    token = tokens.issue("x")
    tokens.check("x", token)
    for id, wrong in (("y", token), ("x", token[:-1]), ("x", ""), ("nobody", token)):
        with pytest.raises(Denied):
            tokens.check(id, wrong)
    with pytest.raises(SandboxNotFound):
        tokens.issue("nobody")
    tokens.revoke("x")
    with pytest.raises(Denied):
        tokens.check("x", token)


@pytest.mark.parametrize("state", [S.CREATING, S.RUNNING, S.PAUSED])
def test_what_is_killed_has_no_tokens(rows: Sessions, db: Database, state: SessionState) -> None:
    session, tokens = made(rows, "x", state), Tokens(db)
    made(rows, "y", state)
    for id in ("x", "x", "y"):
        tokens.issue(id)
    rows.move("x", state, S.KILLED, generation=session.generation)
    with db.read() as connection:
        assert connection.exec_driver_sql("SELECT sandbox FROM tokens").scalars().all() == ["y"]


def test_the_audit_log_can_only_grow(db: Database) -> None:
    log = Log(db)
    for n in range(5):
        log.audit("ann", "create", "ok", f"s{n}", size=n)
    log.audit("bob", "kill", "DENIED", "s1")
    for statement in (audit.update().values(who="eve"), audit.delete()):
        with pytest.raises(Exception, match="append-only") as refused, db.write() as connection:
            connection.execute(statement)
        assert refused.type is not StateConflict
    assert [entry.sandbox for entry in log.audited(who="ann")] == ["s4", "s3", "s2", "s1", "s0"]
    page = log.audited(limit=2)
    assert [entry.who for entry in page] == ["bob", "ann"]
    assert log.audited(before=page[-1].id, limit=1)[0].detail == {"size": 3}
    assert [entry.action for entry in log.audited(sandbox="s1")] == ["kill", "create"]


def test_events_are_read_in_order_from_where_one_was(rows: Sessions, db: Database) -> None:
    rows.create("x", ANN, host="a")
    log = Log(db)
    for n in range(3):
        log.event("x", "note", n=n)
    first = log.events("x", limit=1)
    assert [event.detail["n"] for event in first] == [0]
    assert [event.detail["n"] for event in log.events("x", after=first[0].id)] == [1, 2]
    with pytest.raises(SandboxNotFound):
        log.event("nobody", "note")


def test_a_failure_comes_back_as_it_was_raised(rows: Sessions) -> None:
    session = made(rows, "x", S.RUNNING)
    said = SandboxDead("gone", "look", at=float("nan"), path=object)
    failed = rows.move("x", S.RUNNING, S.ERROR, generation=session.generation, last_error=error_record(said))
    assert isinstance(failed.error, SandboxDead)
    assert (failed.error.message, failed.error.remedy) == ("gone", "look")
    assert rows.get("x") == failed


def test_what_the_database_refuses_is_typed(db: Database) -> None:
    with pytest.raises(DatabaseFailed), db.read() as connection:
        connection.exec_driver_sql("SELECT * FROM nothing_here")
    assert db.now() > 0
