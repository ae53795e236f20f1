"""Kinds of recorded values, and the one type that a column of several kinds gets."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterable
from typing import Any

from rearview.store.values import restore, restore_json

TYPES = {
    "float": "DOUBLE",
    "int": "BIGINT",
    "bool": "BOOLEAN",
    "str": "VARCHAR",
    "bytes": "BLOB",
    "json": "VARCHAR",
    "object": "VARCHAR",
    "bigint": "VARCHAR",
    "mixed": "VARCHAR",
}
"""SQL type of a column by its kind; `mixed` is the JSON text of `store.values`."""


def unify(kinds: Iterable[str]) -> str:
    """Return the kind of a column that holds values of these kinds without losing any.

    >>> unify(["float", "int", "null"]), unify(["str", "float"]), unify([])
    ('float', 'mixed', 'float')
    """
    found = set(kinds) - {"null"}
    for kind, fits in (
        ("float", {"float", "int"}),
        ("str", {"str", "repr"}),
        ("bigint", {"int", "long", "bigint"}),
    ):
        if found <= fits and found & ({kind} if kind != "str" else fits):
            return kind
    if found and found <= {"int", "long"}:
        return "int"
    if len(found) == 1 and next(iter(found)) in TYPES:
        return found.pop()
    return "mixed" if found else "float"


_JSON = {
    "float": """CASE WHEN isfinite({0}) THEN CAST({0} AS VARCHAR)
        ELSE '{{"$float":"' || CAST({0} AS VARCHAR) || '"}}' END""",
    "int": "CAST({0} AS VARCHAR)",
    "bool": "CAST({0} AS VARCHAR)",
    "str": "CAST(to_json({0}) AS VARCHAR)",
    "bytes": """'{{"$bytes":"' || to_base64({0}) || '"}}'""",
    "json": """'{{"$json":' || {0} || '}}'""",
    "object": "{0}",
    "bigint": """'{{"$int":"' || {0} || '"}}'""",
    "mixed": "{0}",
}


def cell(kind: str) -> str:
    """Return the SQL for a value of the table of records as a column of that kind."""
    if kind == "mixed":
        as_json = " ".join(
            f"WHEN '{one}' THEN {_JSON[key].format(column)}"
            for one, key, column in (
                ("float", "float", "number"),
                ("int", "int", "whole"),
                ("long", "int", "whole"),
                ("bool", "bool", "CAST(number AS BOOLEAN)"),
                ("str", "str", '"text"'),
                ("repr", "str", '"text"'),
                ("json", "json", '"text"'),
                ("object", "object", '"text"'),
                ("bigint", "bigint", '"text"'),
            )
        )
        coded = """WHEN 'bytes' THEN '{"$bytes":"' || "text" || '"}'
            WHEN 'str64' THEN '{"$str":"' || "text" || '"}'"""
        return f"CASE kind {as_json} {coded} END"
    return {
        "float": "number",
        "int": "whole",
        "bool": "CAST(number AS BOOLEAN)",
        "bytes": """CASE kind WHEN 'bytes' THEN from_base64("text") END""",
        "bigint": 'coalesce("text", CAST(whole AS VARCHAR))',
    }.get(kind, '"text"')


def recast(column: str, kind: str, to: str) -> str:
    """Return the SQL that makes a column of one kind one of a wider kind."""
    if kind == to:
        return column
    if to == "mixed":
        return _JSON[kind].format(column)
    return f"CAST({column} AS {TYPES[to]})"


def decode(value: Any, kind: str, stored: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """Return the Python value of what a column of that kind holds.

    `stored` returns what to put in the place of an array, tensor, image or histogram.
    """
    if value is None or kind in {"float", "int", "bool", "str"}:
        return value
    if kind == "bytes":
        return bytes(value)
    if kind == "bigint":
        return restore({"$int": value})
    out = json.loads(value)
    return restore_json(out, stored) if kind == "json" else restore(out, stored)


def encode(value: Any) -> tuple[str, str | None]:
    """Return (kind, text) of a converted value, as the arguments of a run need it.

    >>> encode(0.1), encode({"$json": [1]}), encode(True)
    (('float', '0.1'), ('json', '[1]'), ('bool', 'true'))
    """
    if value is None:
        return "null", None
    if isinstance(value, bool):
        return "bool", json.dumps(value)
    if isinstance(value, int):
        return ("int" if abs(value) <= 2**53 else "long"), str(value)
    if isinstance(value, float):
        return "float", repr(value)
    if isinstance(value, str):
        return "str", value
    marker = next(iter(value))
    if marker == "$float":
        return "float", value[marker]
    if marker == "$json":
        return "json", json.dumps(value[marker])
    if marker == "$str":
        return "str", base64.b64decode(value[marker]).decode("utf-8", "backslashreplace")
    return {"$int": "bigint", "$bytes": "bytes", "$repr": "repr"}.get(marker, "object"), (
        json.dumps(value) if marker == "$object" else value[marker]
    )
