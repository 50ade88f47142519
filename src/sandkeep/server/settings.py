"""What a server is told when it starts. Plain values with defaults; nothing is read from elsewhere later."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from sandkeep.errors import BadArgument
from sandkeep.sandbox.home import default_home
from sandkeep.sessions.records import AUTO_PAUSE, PAUSED_EXPIRY


@dataclass(frozen=True)
class Settings:
    home: Path = field(default_factory=default_home)
    database: str = ""  # empty: SQLite in the home folder
    store: str = ""  # empty: a folder in the home folder; else a folder or s3://bucket/prefix
    store_options: dict[str, str] = field(default_factory=dict)  # region, endpoint; keys come from AWS variables
    host: str = "127.0.0.1"
    port: int = 8700
    host_id: str = field(default_factory=socket.gethostname)  # this machine among the servers of one database
    address: str = ""  # how other servers reach this one; empty: host and port, or nothing where it listens everywhere
    runtime: str = "auto"
    bases: dict[str, str] = field(default_factory=dict)  # name → folder or tar; "host" is always there
    host_network: bool = False  # whether clients may ask for network="host"
    egress: bool = True  # whether sandboxes may have a way out, by rules
    egress_private: tuple[
        str, ...
    ] = ()  # networks that are not the internet's and may be reached that way all the same
    auto_pause: float = AUTO_PAUSE
    paused_expiry: float = PAUSED_EXPIRY
    sweep_interval: float = 5.0
    drain_seconds: float = 60.0
    grace_seconds: float = 5.0  # for requests under way when the server is told to stop
    rate: float = 1000.0  # requests per second of one key; 0 is no limit
    burst: float = 2000.0
    max_body: int = 8 << 20
    max_upload: int = 16 << 30
    max_output: int = 16 << 20  # of each stream of a command answered as JSON
    storage_quota: int = 0  # bytes a user and project may keep under /storage; 0 is no limit
    cors_origins: tuple[str, ...] = ()
    websocket_protocol: bool = True
    e2b: bool = True  # whether E2B's SDKs are served

    def __post_init__(self) -> None:
        object.__setattr__(self, "home", Path(self.home).absolute())
        if not self.database:
            object.__setattr__(self, "database", f"sqlite:///{self.home}/sessions.db")
        if not self.store:
            object.__setattr__(self, "store", str(self.home / "served"))
        if self.address and urlsplit(self.address).scheme not in ("http", "https"):
            raise BadArgument(f"address {self.address!r} is not a URL", "write http://host:port")
        if not self.address and self.port and self.host not in ("0.0.0.0", "::", ""):
            object.__setattr__(self, "address", f"http://{self.shown_host}:{self.port}")
        for name in ("rate", "burst", "max_body", "max_upload", "max_output", "storage_quota", "drain_seconds"):
            if getattr(self, name) < 0:
                raise BadArgument(f"{name} can't be below zero")
        if self.rate and self.burst < 1:
            raise BadArgument("burst must be at least 1", "set rate to 0 for no limit")

    @property
    def shown_host(self) -> str:
        return f"[{self.host}]" if ":" in self.host else self.host

    @property
    def loopback(self) -> bool:
        return self.host in ("127.0.0.1", "::1", "localhost")
