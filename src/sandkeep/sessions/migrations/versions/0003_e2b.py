"""The table of E2B's sandboxes. Earlier servers made it beside these migrations: then it is there, in this shape."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    if sa.inspect(op.get_bind()).has_table("e2b"):
        return
    op.create_table(
        "e2b",
        sa.Column("sandbox", sa.String(128), nullable=False),
        sa.Column("token", sa.String(64), nullable=False),
        sa.Column("traffic", sa.String(64)),
        sa.Column("generation", sa.BigInteger(), nullable=False),
        sa.Column("deadline", sa.Double()),
        sa.Column("timeout", sa.Double(), nullable=False),
        sa.Column("policy", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("sandbox", name="pk_e2b"),
    )
