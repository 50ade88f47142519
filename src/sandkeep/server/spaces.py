"""A space is what one user and project keep on this server: a store of checkpoints, and objects for clients without a bucket.

Spaces share nothing, not even equal content: what one holds can't be felt from another.
"""

from __future__ import annotations

import hashlib
import re
import threading

from sandkeep.checkpoints.catalog import Store
from sandkeep.server.settings import Settings
from sandkeep.store.objects import Objects, open_objects


def folder_of(name: str | None) -> str:
    """A name for a folder: readable, and different for different names. `_` is for none."""
    if name is None:
        return "_"
    readable = re.sub(r"[^A-Za-z0-9]+", "-", name)[:40].strip("-")
    return f"{readable}-{hashlib.sha256(name.encode()).hexdigest()[:24]}".lstrip("-")


class Spaces:
    """Blocking; safe for threads."""

    def __init__(self, settings: Settings) -> None:
        self.home = settings.home
        self._settings = settings
        self._lock = threading.Lock()
        self._stores: dict[tuple[str, str | None], Store] = {}
        self._objects: dict[tuple[str, str | None], Objects] = {}

    def store(self, owner: str, project: str | None) -> Store:
        """Where the sandboxes of this space sleep and are checkpointed."""
        with self._lock:
            found = self._stores.get((owner, project))
            if found is None:
                url, options = self._url("checkpoints", owner, project), self._settings.store_options
                found = Store(
                    url, home=self._settings.home, region=options.get("region"), endpoint=options.get("endpoint")
                )
                self._stores[owner, project] = found
            return found

    def objects(self, owner: str, project: str | None) -> Objects:
        """What a client keeps here with `Store("sandkeep://")`; the server never opens it as a store."""
        with self._lock:
            found = self._objects.get((owner, project))
            if found is None:
                found = open_objects(self._url("storage", owner, project), **self._settings.store_options)
                self._objects[owner, project] = found
            return found

    def close(self) -> None:
        with self._lock:
            for store in self._stores.values():
                store.close()
            self._stores.clear()
            self._objects.clear()

    def _url(self, kind: str, owner: str, project: str | None) -> str:
        return f"{self._settings.store.rstrip('/')}/{kind}/{folder_of(owner)}/{folder_of(project)}"
