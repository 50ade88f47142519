"""The server: sandboxes for many users over REST and WebSocket. Everything goes through `services`; nothing below imports this."""

from sandkeep.server.app import create_app
from sandkeep.server.settings import Settings

__all__ = ["Settings", "create_app"]
