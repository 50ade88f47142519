"""Sessions: the server's record of its sandboxes. Who owns one, is it idle, where does it sleep; pause, wake, expire.

Rows live in a database (SQLite or PostgreSQL); no web framework and no sandbox code here: the server hands in a
`Sandboxes`. docs/design.md, section 12.
"""

from sandkeep.sessions.database import Database
from sandkeep.sessions.decisions import Reality
from sandkeep.sessions.hosts import Hosts
from sandkeep.sessions.keeper import Keeper, Sandboxes, Slept
from sandkeep.sessions.keys import Keys, Tokens
from sandkeep.sessions.log import Log
from sandkeep.sessions.records import AuditEntry, Event, Key, Page, Scope, Server, Session
from sandkeep.sessions.sessions import Sessions
from sandkeep.sessions.states import MOVES, SessionState
from sandkeep.sessions.storage import Storage, Stored
from sandkeep.sessions.sweeper import Sweeper

__all__ = [
    "MOVES",
    "AuditEntry",
    "Database",
    "Event",
    "Hosts",
    "Keeper",
    "Key",
    "Keys",
    "Log",
    "Page",
    "Reality",
    "Sandboxes",
    "Scope",
    "Server",
    "Session",
    "SessionState",
    "Sessions",
    "Slept",
    "Storage",
    "Stored",
    "Sweeper",
    "Tokens",
]
