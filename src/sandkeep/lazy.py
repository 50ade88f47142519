"""Names of a package that are imported when they are first asked for: whoever needs one module does not wait for all."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazily(package: dict[str, Any], homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's `__getattr__`; `homes` says which module of the package has which names, separated by spaces."""
    home = {name: module for module, names in homes.items() for name in names.split()}

    def find(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        package[name] = found = getattr(importlib.import_module(f"{package['__name__']}.{home[name]}"), name)
        return found

    return find
