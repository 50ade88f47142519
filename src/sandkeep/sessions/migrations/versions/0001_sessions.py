"""The first shape: sessions, servers, uses, keys, tokens, audit, events; audit rows can't be changed or removed."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

Serial = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def upgrade() -> None:
    op.create_table(
        "sessions",
        sa.Column("id", sa.String(128), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("project", sa.String(200)),
        sa.Column("metadata", sa.JSON(), nullable=False),
        sa.Column("config", sa.JSON(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("host", sa.String(200)),
        sa.Column("checkpoint", sa.String(200)),
        sa.Column("store", sa.String(2000)),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("updated", sa.Double(), nullable=False),
        sa.Column("last_activity", sa.Double(), nullable=False),
        sa.Column("auto_pause_timeout", sa.Double(), nullable=False),
        sa.Column("paused_expiry", sa.Double(), nullable=False),
        sa.Column("paused_at", sa.Double()),
        sa.Column("warned_at", sa.Double()),
        sa.Column("failures", sa.Integer(), nullable=False),
        sa.Column("next_try", sa.Double(), nullable=False),
        sa.Column("last_error", sa.JSON()),
        sa.Column("removed", sa.Boolean(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_sessions"),
    )
    op.create_index("ix_sessions_owner_created_id", "sessions", ["owner", "created", "id"])
    op.create_index("ix_sessions_created_id", "sessions", ["created", "id"])
    op.create_index("ix_sessions_state_host", "sessions", ["state", "host"])
    op.create_table(
        "servers",
        sa.Column("host", sa.String(200), nullable=False),
        sa.Column("incarnation", sa.String(64), nullable=False),
        sa.Column("address", sa.String(2000)),
        sa.Column("started", sa.Double(), nullable=False),
        sa.Column("heartbeat", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("host", name="pk_servers"),
    )
    op.create_table(
        "uses",
        sa.Column("sandbox", sa.String(128), nullable=False),
        sa.Column("host", sa.String(200), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("sandbox", "host", name="pk_uses"),
        sa.ForeignKeyConstraint(["sandbox"], ["sessions.id"], name="fk_uses_sandbox"),
    )
    op.create_index("ix_uses_host", "uses", ["host"])
    op.create_table(
        "keys",
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("prefix", sa.String(16), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("user", sa.String(200), nullable=False),
        sa.Column("project", sa.String(200)),
        sa.Column("created", sa.Double(), nullable=False),
        sa.Column("last_used", sa.Double()),
        sa.Column("revoked", sa.Double()),
        sa.PrimaryKeyConstraint("id", name="pk_keys"),
        sa.UniqueConstraint("sha256", name="uq_keys_sha256"),
    )
    op.create_index("ix_keys_prefix", "keys", ["prefix"])
    op.create_table(
        "tokens",
        sa.Column("sandbox", sa.String(128), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("sandbox", "sha256", name="pk_tokens"),
        sa.ForeignKeyConstraint(["sandbox"], ["sessions.id"], name="fk_tokens_sandbox"),
    )
    op.create_table(
        "audit",
        sa.Column("id", Serial, autoincrement=True, nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("action", sa.String(100), nullable=False),
        sa.Column("sandbox", sa.String(128)),
        sa.Column("outcome", sa.String(100), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_audit"),
    )
    op.create_index("ix_audit_who_id", "audit", ["who", "id"])
    op.create_index("ix_audit_sandbox", "audit", ["sandbox"])
    op.create_table(
        "events",
        sa.Column("id", Serial, autoincrement=True, nullable=False),
        sa.Column("sandbox", sa.String(128), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.String(100), nullable=False),
        sa.Column("detail", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("id", name="pk_events"),
        sa.ForeignKeyConstraint(["sandbox"], ["sessions.id"], name="fk_events_sandbox"),
    )
    op.create_index("ix_events_sandbox_id", "events", ["sandbox", "id"])
    _append_only("audit")


def _append_only(table: str) -> None:
    if op.get_bind().dialect.name == "sqlite":
        for verb in ("UPDATE", "DELETE"):
            op.execute(
                f"CREATE TRIGGER {table}_no_{verb.lower()} BEFORE {verb} ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )
        return
    op.execute(
        f"CREATE FUNCTION {table}_append_only() RETURNS trigger LANGUAGE plpgsql AS "
        f"$$ BEGIN RAISE EXCEPTION '{table} is append-only'; END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON {table} "
        f"FOR EACH STATEMENT EXECUTE FUNCTION {table}_append_only()"
    )
