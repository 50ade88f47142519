"""Deadlines of E2B's sandboxes, on both databases."""

from __future__ import annotations

import threading

import pytest
from sqlalchemy import text

from sandkeep.server.e2b.rows import LEAST_AFTER_WAKING, Row, Rows
from sandkeep.sessions import Database, Hosts, Scope, SessionState
from sandkeep.sessions.sessions import Sessions

pytest_plugins = ["postgres", "sessions_kit"]
HOST, SCOPE = "here", Scope("someone")
_S = SessionState


class Ground:
    def __init__(self, database: Database) -> None:
        self.db = database
        self.sessions = Sessions(database, Hosts(database))
        self.rows = Rows(database)

    def running(self, id: str, timeout: float = 600, **config: str) -> Row:
        session = self.sessions.create(id, SCOPE, host=HOST, config=dict(config))
        self.sessions.move(id, _S.CREATING, _S.RUNNING, generation=session.generation)
        return self.rows.add(id, "t" * 48, None, timeout, {"on_timeout": "kill"})

    def move(self, id: str, *states: SessionState) -> int:
        for to in states:
            session = self.sessions.get(id)
            self.sessions.move(id, session.state, to, generation=session.generation)
        return self.sessions.get(id).generation

    def now(self, id: str) -> Row:
        found = self.rows.get(id)
        assert found is not None
        return found


@pytest.fixture
def ground(db: Database) -> Ground:
    return Ground(db)


def test_a_row_takes_the_idle_time_out_away(ground: Ground) -> None:
    row = ground.running("sb-1")
    assert ground.sessions.get("sb-1").auto_pause_timeout == 0
    assert row.generation == ground.sessions.get("sb-1").generation
    assert ground.rows.tokens() == {"sb-1": "t" * 48}


def test_extending_never_shortens(ground: Ground) -> None:
    row = ground.running("sb-1")
    assert ground.rows.extend("sb-1", row.generation, 5)
    assert ground.now("sb-1").deadline == row.deadline
    assert ground.rows.extend("sb-1", row.generation, 6000)
    later = ground.now("sb-1").deadline
    assert later is not None
    assert row.deadline is not None
    assert later > row.deadline
    assert not ground.rows.extend("sb-1", row.generation + 1, 6000)
    ground.rows.live_until("sb-1", row.generation, 5)
    assert (ground.now("sb-1").deadline or 0) < row.deadline


def test_what_is_due_can_be_claimed_once(ground: Ground) -> None:
    ground.running("sb-1", timeout=0)
    ground.running("sb-2")
    due, wait, dead = ground.rows.tend(HOST)
    assert [row.sandbox for row in due] == ["sb-1"]
    assert wait is not None
    assert 0 < wait <= 600
    assert dead == set()
    assert ground.rows.tend("elsewhere")[0] == []
    won: list[bool] = []
    racers = [threading.Thread(target=lambda: won.append(ground.rows.claim(due[0]))) for _ in range(4)]
    for one in racers:
        one.start()
    for one in racers:
        one.join()
    assert sorted(won) == [False, False, False, True]
    assert not ground.rows.extend("sb-1", due[0].generation, 600)
    assert ground.rows.tend(HOST)[0] == []
    ground.rows.begin(HOST, 60)
    assert [row.sandbox for row in ground.rows.tend(HOST)[0]] == ["sb-1"]


def test_who_lives_on_is_not_claimed(ground: Ground) -> None:
    ground.running("sb-1", timeout=0)
    due = ground.rows.tend(HOST)[0]
    assert ground.rows.extend("sb-1", due[0].generation, 600)
    assert not ground.rows.claim(due[0])


def test_a_deadline_ends_with_sleep_and_waking_gives_a_new_one(ground: Ground) -> None:
    row = ground.running("sb-1", timeout=0)
    ground.move("sb-1", _S.PAUSING, _S.PAUSED)
    assert ground.rows.tend(HOST)[0] == []
    generation = ground.move("sb-1", _S.RESUMING, _S.RUNNING)
    due, wait, _ = ground.rows.tend(HOST)
    assert due == []
    assert wait is not None
    assert LEAST_AFTER_WAKING - 60 < wait <= LEAST_AFTER_WAKING
    assert ground.now("sb-1").generation == generation > row.generation


def test_the_dead_are_told_once_and_forgotten(ground: Ground) -> None:
    ground.running("sb-1")
    ground.move("sb-1", _S.KILLED)
    assert ground.rows.tokens() == {}
    for host in ("elsewhere", HOST):  # whoever deletes the row, each forgets what it knew
        assert ground.rows.tend(host, {"sb-1"})[2] == {"sb-1"}
    assert ground.rows.tend(HOST)[2] == set()
    assert ground.rows.get("sb-1") is None


def test_forks_that_a_crash_left_without_a_row_fall_asleep(ground: Ground) -> None:
    ground.running("sb-1")
    for id, config in (("sb-2", {"forked_from": "sb-1"}), ("sb-3", {})):
        ground.sessions.create(id, SCOPE, host=HOST, config=config, auto_pause_timeout=0)
    ground.rows.begin(HOST, 60)
    assert ground.sessions.get("sb-2").auto_pause_timeout == 60
    assert ground.sessions.get("sb-3").auto_pause_timeout == 0
    assert ground.sessions.get("sb-1").auto_pause_timeout == 0


def test_a_table_that_an_earlier_server_made_is_taken_over(db: Database) -> None:
    row = Ground(db).running("sb-1")
    with db.write() as connection:
        connection.execute(text("DROP TABLE requests"))
        connection.execute(text("UPDATE alembic_version SET version_num = '0002'"))
    db.open()
    assert Rows(db).get("sb-1") == row
