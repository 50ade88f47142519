"""The REST API and its WebSockets, a router for each noun."""

from sandkeep.server.rest import checkpoints, commands, files, link, live, ports, sandboxes, server, state, storage

ROUTERS = [
    server.router, sandboxes.router, state.router, commands.router, files.router, checkpoints.router, storage.router,
    live.router, link.router, ports.router,
]  # fmt: skip
