"""The REST API and its WebSockets, a router for each noun."""

from sandkeep.server.rest import commands, sandboxes, server

ROUTERS = [server.router, sandboxes.router, commands.router]
