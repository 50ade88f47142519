"""Figures of a sandbox as E2B tells them: taken when asked for, each with the share of its processors since the one before."""

from __future__ import annotations

import os
import time
from collections import deque
from typing import Any

from sandkeep.server.e2b.forms import stamp
from sandkeep.server.services import Services
from sandkeep.sessions import Session, SessionState

_KEPT = 720


def memory_of(session: Session) -> int:
    return int(
        session.config.get("limits", {}).get("memory") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )


def cpus_of(session: Session) -> int:
    return max(1, round(session.config.get("limits", {}).get("cpus") or os.cpu_count() or 1))


class Meter:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._kept: dict[str, deque[dict[str, Any]]] = {}
        self._last: dict[str, tuple[float, float]] = {}

    async def read(self, session: Session, start: float | None, end: float | None) -> list[dict[str, Any]]:
        """What is kept of that time, and the figures of now. A sleeping one uses nothing."""
        kept = self._kept.setdefault(session.id, deque(maxlen=_KEPT))
        if session.state is SessionState.RUNNING and (end is None or end >= time.time() - 1):
            kept.append(await self._now(session))
        return [
            one for one in kept if (start or 0) <= one["timestampUnix"] and (end is None or one["timestampUnix"] <= end)
        ]

    async def now(self, session: Session) -> dict[str, Any]:
        """The figures of now in envd's words."""
        told = (await self.read(session, None, None))[-1]
        return {
            "ts": told["timestampUnix"], "cpu_count": told["cpuCount"], "cpu_used_pct": told["cpuUsedPct"], "mem_total": told["memTotal"],
            "mem_used": told["memUsed"], "mem_cache": told["memCache"], "disk_used": told["diskUsed"], "disk_total": told["diskTotal"],
        }  # fmt: skip

    def forget(self, id: str) -> None:
        self._kept.pop(id, None)
        self._last.pop(id, None)

    async def _now(self, session: Session) -> dict[str, Any]:
        used = await (await self._services.hands.handle(session)).usage()
        at = time.time()
        before, spent = self._last.get(session.id, (session.created, 0.0))
        self._last[session.id] = (at, used["cpu_seconds"])
        share = max(0.0, used["cpu_seconds"] - spent) / max(at - before, 0.001) / cpus_of(session) * 100
        own = int(used["pss_bytes"])
        return {
            "timestamp": stamp(at), "timestampUnix": int(at), "cpuCount": cpus_of(session), "cpuUsedPct": round(share, 2),
            "memUsed": own, "memTotal": memory_of(session), "memCache": max(0, int(used["memory_bytes"]) - own),
            "diskUsed": used["disk_total"] - used["disk_free"], "diskTotal": used["disk_total"],
        }  # fmt: skip
