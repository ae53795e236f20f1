"""Cases of HLAST (github.com/adandamudi/hlast): statements with their places labelled by hand.

`tests/CODEBASE/vN-log/FILE` is version N with the statement, `vK` an older version and `vK-gt` the
same with the statement where its authors say it belongs.
"""

from __future__ import annotations

import ast
import difflib
import re
from pathlib import Path

from mine import Case, parse


def cases(folder: Path) -> list[Case]:
    """Return a case for each labelled file whose label adds a statement."""
    found: list[Case] = []
    for logged in sorted(folder.glob("*/v*-log/*.py")):
        codebase = logged.parent.parent
        newest = int(re.findall(r"\d+", logged.parent.name)[0])
        plain = (codebase / f"v{newest}" / logged.name).read_text()
        span = added(plain, logged.read_text())
        if span is None:
            continue
        for number in range(newest - 1, 0, -1):
            old, label = (codebase / f"v{number}{end}" / logged.name for end in ("", "-gt"))
            if not old.exists() or not label.exists():
                continue
            before, after = old.read_text(), label.read_text()
            place = added(before, after)
            if place is None:
                continue
            lines = after.split("\n")
            text = "\n".join(lines[place[0] - 1 : place[1]])
            base = "\n".join(lines[: place[0] - 1] + lines[place[1] :])
            found.append(
                Case(
                    codebase.name, logged.name, (f"v{newest}", f"v{number}"), newest - number,
                    "labelled", "simple", logged.read_text(), span, base, place[0], text,
                )
            )  # fmt: skip
    return found


def added(before: str, after: str) -> tuple[int, int] | None:
    """Return the lines of the statement that one text has more than another; comments do not count."""
    ones, twos = before.split("\n"), after.split("\n")
    extra: list[int] = []
    bare = [[line.split("  #")[0].strip() for line in text] for text in (ones, twos)]
    for tag, _, _, j, m in difflib.SequenceMatcher(None, *bare, autojunk=False).get_opcodes():
        if tag in {"insert", "replace"}:
            extra += [at + 1 for at in range(j, m)]
    tree = parse(after)
    if tree is None:
        return None
    hits = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt)
        and not isinstance(node, (ast.Import, ast.ImportFrom))
        and set(range(node.lineno, (node.end_lineno or 0) + 1)) <= set(extra)
    ]
    outer = [n for n in hits if not any(o is not n and o.lineno <= n.lineno and (n.end_lineno or 0) <= (o.end_lineno or 0) for o in hits)]  # fmt: skip
    if not outer:
        return None
    return min(n.lineno for n in outer), max(n.end_lineno or 0 for n in outer)
