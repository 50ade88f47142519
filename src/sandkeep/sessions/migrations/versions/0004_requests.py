"""The keys by which clients name their creates (Idempotency-Key), and the sandbox that each has made."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "requests",
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("sandbox", sa.String(128), nullable=False),
        sa.PrimaryKeyConstraint("sha256", name="pk_requests"),
        sa.ForeignKeyConstraint(["sandbox"], ["sessions.id"], name="fk_requests_sandbox"),
    )
    op.create_index("ix_requests_sandbox", "requests", ["sandbox"])
