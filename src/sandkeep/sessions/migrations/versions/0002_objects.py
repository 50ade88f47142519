"""The index of what clients keep under /storage."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

Name = sa.String(900).with_variant(sa.String(900, collation="C"), "postgresql")


def upgrade() -> None:
    op.create_table(
        "objects",
        sa.Column("place", sa.String(32), nullable=False),
        sa.Column("owner", sa.String(200), nullable=False),
        sa.Column("project", sa.String(200), nullable=False),
        sa.Column("name", Name),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("place", name="pk_objects"),
        sa.UniqueConstraint("owner", "project", "name", name="uq_objects_owner_project_name"),
    )
    unseen = sa.text("name IS NULL")
    op.create_index("ix_objects_at", "objects", ["at"], sqlite_where=unseen, postgresql_where=unseen)
