"""The order of interest of rows: `"acc desc, epoch"` as keys, and each key as SQL."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rearview.errors import UsageError
from rearview.store.tables.connection import ident

_COMMA = re.compile(r""",(?=(?:[^"]*"[^"]*")*[^"]*$)""")
"""A comma outside of double quotes."""
_KEY = re.compile(
    r"""(?P<minus>-?)(?:"(?P<quoted>(?:[^"]|"")+)"|(?P<plain>.+?))(?:\s+(?P<way>asc|desc))?""",
    re.IGNORECASE | re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class OrderKey:
    """A column that rows are ordered by."""

    column: str
    """As the user wrote it."""
    descending: bool = False


def order_keys(
    order: str | Iterable[str] | None, is_column: Callable[[str], bool]
) -> list[OrderKey]:
    """Return the keys that a text or several texts name, the most important first.

    A column whose name has commas, blanks or a leading minus is written in double quotes, unless the
    whole text is its name.

    >>> order_keys("acc desc, epoch", lambda name: False)
    [OrderKey(column='acc', descending=True), OrderKey(column='epoch', descending=False)]
    >>> order_keys(["-acc", '"val, acc" DESC'], lambda name: False)
    [OrderKey(column='acc', descending=True), OrderKey(column='val, acc', descending=True)]
    """
    keys: list[OrderKey] = []
    for text in [order] if isinstance(order, str) else (order or ()):
        if is_column(text):
            keys.append(OrderKey(text))
            continue
        for piece in _COMMA.split(text):
            match = _KEY.fullmatch(piece.strip())
            if match is None:
                raise _unreadable(text)
            way = (match["way"] or "asc").lower()
            column = match["quoted"].replace('""', '"') if match["quoted"] else match["plain"]
            keys.append(OrderKey(column, (way == "desc") != bool(match["minus"])))
    return keys


def _unreadable(text: str) -> UsageError:
    return UsageError(
        f"The order {text!r} cannot be read. Write columns separated by commas, each with desc "
        'behind it if large values come first: "acc desc, epoch".',
        slug="order",
    )


def order_sql(label: str, kind: str, *, descending: bool) -> list[str]:
    """Return the SQL terms that order rows by one column; rows without a value come last.

    Not-a-number comes behind all numbers in both directions. A column of several types is ordered
    by its numbers first, then by text.
    """
    way = f"{'DESC' if descending else 'ASC'} NULLS LAST"
    column = ident(label)
    if kind == "float":
        return [f"{column} IS NULL", f"coalesce(isnan({column}), false)", f"{column} {way}"]
    if kind == "bigint":
        return [
            f"TRY_CAST({column} AS HUGEINT) {way}",
            f"length({column}) {way}",
            f"{column} {way}",
        ]
    if kind == "mixed":
        return [f"TRY_CAST({column} AS DOUBLE) {way}", f"{column} {way}"]
    return [f"{column} {way}"]
