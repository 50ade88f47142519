"""Structured output: the part of JSON Schema that is checked here. A keyword that is not is refused, never passed over."""

from __future__ import annotations

import re
from typing import Any

from sandkeep.errors import BadArgument

_TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None),
}  # fmt: skip
_SILENT = {"$schema", "$id", "title", "description", "default", "examples"}
_CHECKED = {
    "type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "minLength",
    "maxLength", "pattern", "minimum", "maximum", "anyOf",
}  # fmt: skip


def check_schema(schema: Any, at: str = "schema") -> dict[str, Any]:
    """The schema, if all of it is understood."""
    if not isinstance(schema, dict):
        raise BadArgument(f"{at} must be a JSON Schema object, not {schema!r}")
    unknown = set(schema) - _SILENT - _CHECKED
    if unknown:
        raise BadArgument(f"{at} uses {sorted(unknown)}, which is not checked here", f"use {sorted(_CHECKED)}")
    kinds = schema.get("type", [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind not in _TYPES:
            raise BadArgument(f"{at}.type {kind!r} is not a type of JSON Schema")
    if "pattern" in schema:
        try:
            re.compile(schema["pattern"])
        except (re.error, TypeError) as error:
            raise BadArgument(f"{at}.pattern is not a regular expression: {error}")
    for name, inner in schema.get("properties", {}).items():
        check_schema(inner, f"{at}.properties.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema and not isinstance(schema[name], bool):
            check_schema(schema[name], f"{at}.{name}")
    for number, inner in enumerate(schema.get("anyOf", [])):
        check_schema(inner, f"{at}.anyOf[{number}]")
    return schema


def problem(schema: Any, value: Any, at: str = "$") -> str | None:
    """What is wrong with the value, with its place; None if nothing is."""
    if isinstance(schema, bool):
        return None if schema else f"{at} must not be there"
    return next((found for check in (_value, _object, _array) if (found := check(schema, value, at))), None)


def _value(schema: dict[str, Any], value: Any, at: str) -> str | None:
    kinds = schema.get("type")
    if kinds is not None and not any(_is(value, kind) for kind in (kinds if isinstance(kinds, list) else [kinds])):
        return f"{at} must be of type {kinds}, not {type(value).__name__}"
    if "enum" in schema and not any(_same(value, one) for one in schema["enum"]):
        return f"{at} must be one of {schema['enum']}"
    if "const" in schema and not _same(value, schema["const"]):
        return f"{at} must be {schema['const']!r}"
    if "anyOf" in schema and all(problem(inner, value, at) for inner in schema["anyOf"]):
        return f"{at} fits none of anyOf"
    if isinstance(value, str):
        if not schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", len(value)):
            return f"{at} has a length of {len(value)}, outside the limits"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            return f"{at} does not match {schema['pattern']!r}"
    if _is(value, "number") and not schema.get("minimum", value) <= value <= schema.get("maximum", value):
        return f"{at} is {value}, outside the limits"
    return None


def _object(schema: dict[str, Any], value: Any, at: str) -> str | None:
    if not isinstance(value, dict):
        return None
    properties, more = schema.get("properties", {}), schema.get("additionalProperties", True)
    missing = [name for name in schema.get("required", []) if name not in value]
    if missing:
        return f"{at} lacks {missing}"
    pairs = ((properties.get(name, more), inner, f"{at}.{name}") for name, inner in value.items())
    return next((found for one in pairs if (found := problem(*one))), None)


def _array(schema: dict[str, Any], value: Any, at: str) -> str | None:
    if not isinstance(value, list):
        return None
    if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", len(value)):
        return f"{at} has {len(value)} items, outside the limits"
    items = schema.get("items", True)
    found = (problem(items, inner, f"{at}[{number}]") for number, inner in enumerate(value))
    return next((one for one in found if one), None)


def _is(value: Any, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    if kind == "integer" and isinstance(value, float):
        return value.is_integer()
    return isinstance(value, _TYPES[kind])


def _same(a: Any, b: Any) -> bool:
    return isinstance(a, bool) == isinstance(b, bool) and bool(a == b)
