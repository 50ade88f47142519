"""Alembic's entry: run the missing steps on the connection that `Database.open` hands over, inside its transaction."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
