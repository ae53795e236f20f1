"""Write a snapshot of the page: one HTML file with the page and the data of a project, which needs no server.

A browser does not load JavaScript modules from files on disk, so each module becomes a `data:` URL in an import map.
The content security policy of the HTML file allows only scripts with listed hashes. The data are JSON in a `script`
element; they are escaped so that no text in them can end this element.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import json
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

from rearview._history import History
from rearview.errors import RearviewError, UsageError
from rearview.web import screen_data
from rearview.web.rows import plain
from rearview.web.run_index_cache import RUNS
from rearview.web.screen_data import execution_tree
from rearview.web.series import Chart
from rearview.web.server import Page, static_files

MOST_RUNS = 5000
"""Maximum number of runs in the table of a snapshot: the newest runs."""
MOST_DETAILED = 200
"""Maximum number of runs whose details and curves a snapshot has: the newest runs."""
MOST_PRINTED = 1000
"""Maximum number of printed lines per run in a snapshot."""
MOST_IMAGES = 8 << 20
"""Maximum number of bytes of all images in a snapshot together."""
MOST_SOUNDS = 8 << 20
"""Maximum number of bytes of all sounds in a snapshot together."""
MOST_CONTENTS = 400
"""Maximum number of logged tables, confusion matrices and long texts in a snapshot."""
PIXELS = 500
"""Width in pixels for which the curves of a snapshot are computed."""
_IMPORT = re.compile(r"""(from\s*|import\s*)(["'])\./([\w./-]+)\2""")
_NUMERIC = {"float", "int", "long", "bool"}


def write_snapshot(history: History, folder: Path) -> Path:
    """Write a snapshot of the project to `index.html` in `folder`; return the path of this file."""
    page = Page(history)
    try:
        page.index.refresh()
        while page.index.pending:
            page.index.refresh()
        data = _data(page)
    finally:
        page.index.close()
    file = folder / "index.html"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(_document(data), "utf-8")
    except OSError as exc:
        raise UsageError(
            f"{file} cannot be written: {exc.strerror or exc}. Name a folder that you may write to.",
            slug="file-unwritable",
        ) from exc
    return file


def _data(page: Page) -> dict[str, Any]:
    """Return the data of all screens of a snapshot, as values for JSON."""
    index, history = page.index, page.history
    run_ids = [run.id for run in index.runs()][-MOST_RUNS:]
    detailed = run_ids[-MOST_DETAILED:]
    state = {**page.state(), "writable": False, "root": "", "runs": len(run_ids)}
    names = state["names"]
    kinds = {name: column["kind"] for name, column in names.items() if column["runs"]}
    numbers = [name for name, kind in kinds.items() if kind in _NUMERIC and names[name]["path"]]
    media = {
        name: page.media.listed(name, detailed[-12:])
        for name, kind in kinds.items()
        if kind not in _NUMERIC and kind != "histogram"
    }
    fillable_names = page.prices.fillable_names()
    versions = screen_data.versions(history, index, fillable_names)
    return {
        "state": state,
        "runs": _runs(page, set(run_ids)),
        "charts": {name: _curves(page, name, detailed) for name in numbers},
        "details": {run: screen_data.run_details(history, index, run) for run in detailed},
        "printed": {
            run: screen_data.printed_lines(history, run, "")["lines"][:MOST_PRINTED]
            for run in detailed
        },
        "versions": versions,
        "diffs": _diffs(history, [version["runs"][-1]["run"] for version in versions["versions"]]),
        "tree": _tree(page),
        "propagated": _propagated(history, [name for name, _ in fillable_names]),
        "media": media,
        "images": _data_urls(media, "image", "image/png", page.media.image, MOST_IMAGES),
        "sounds": _data_urls(media, "audio", "audio/wav", page.media.sound, MOST_SOUNDS),
        "contents": _contents(page, media),
        "heat": {
            f"{name}/{run}": page.media.heat(name, run)
            for name, kind in kinds.items()
            if kind == "histogram"
            for run in detailed[-6:]
        },
    }


def _runs(page: Page, run_ids: set[str]) -> list[dict[str, Any]]:
    ask = page.index.ask
    out: dict[str, dict[str, Any]] = {}
    columns = ", ".join(RUNS)
    for row in ask(f"SELECT {columns} FROM page.runs ORDER BY started DESC, run DESC").fetchall():
        facts = dict(zip(RUNS, map(plain, row), strict=True))
        if facts["run"] in run_ids:
            words = (facts["run"], facts["name"], facts["command"], facts["note"], facts["status"])
            text = " ".join([*words, *facts["tags"]]).lower()
            out[facts["run"]] = {"facts": facts, "args": {}, "stats": {}, "text": text}
    for run, name, number, text in ask("SELECT run, name, number, text FROM page.args").fetchall():
        if run in out:
            out[run]["args"][name] = plain(number) if number is not None else text
    stats = ask("SELECT run, name, last, low, high, mean, n, kind, text FROM page.stats")
    for run, name, *values, kind, text in stats.fetchall():
        if run in out:
            shown = text if kind not in _NUMERIC else None
            out[run]["stats"][name] = [*map(plain, values), shown]
    return list(out.values())


def _curves(page: Page, name: str, runs: list[str]) -> dict[str, Any]:
    """Return run -> [list of x, list of y] of the values of `name`, with six digits, to keep the file small."""
    import numpy as np

    data = page.series.chart(Chart(name, runs, pixels=PIXELS))
    head, _, number_bytes = data.partition(b"\n")
    values = np.frombuffer(number_bytes, "<f8")
    out, offset = {}, 0
    for line in json.loads(head)["lines"]:
        n, columns = line["n"], line["columns"]
        x, y = values[offset : offset + n], values[offset + n : offset + 2 * n]
        offset += n * columns
        out[line["run"]] = [
            [float(f"{v:.6g}") for v in x.tolist()],
            [float(f"{v:.6g}") if np.isfinite(v) else None for v in y.tolist()],
        ]
    return out


def _diffs(history: History, runs: list[str]) -> dict[str, Any]:
    pairs = [*pairwise(runs), *((run, "worktree") for run in runs)]
    out = {}
    for a, b in pairs[-100:]:
        with contextlib.suppress(RearviewError):
            out[f"{a}/{b}"] = screen_data.compare_sources(history, a, b)
    return out


def _tree(page: Page) -> dict[str, Any] | None:
    with contextlib.suppress(RearviewError, OSError):
        return execution_tree(page.index, [])
    return None


def _propagated(history: History, names: list[str]) -> dict[str, Any]:
    out = {}
    for name in names:
        with contextlib.suppress(RearviewError):
            out[name] = screen_data.propagated_statements(history, [name])
    return out


def _data_urls(
    media: dict[str, list[dict[str, Any]]],
    kind: str,
    mime: str,
    read: Callable[[str], bytes],
    most: int,
) -> dict[str, str]:
    """Return oid -> data URL of the logged values of one kind, until they have `most` bytes together.

    `media` has the values of each name, `read` returns the bytes of an oid, and `mime` is their media type.
    """
    out: dict[str, str] = {}
    for value in itertools.chain.from_iterable(media.values()):
        if value.get("kind") == kind and value["oid"] not in out:
            with contextlib.suppress(RearviewError):
                data = read(value["oid"])
                most -= len(data)
                if most < 0:
                    return out
                out[value["oid"]] = f"data:{mime};base64,{base64.b64encode(data).decode()}"
    return out


def _contents(page: Page, media: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for value in itertools.chain.from_iterable(media.values()):
        if value.get("kind") in {"table", "confusion", "text"} and len(out) < MOST_CONTENTS:
            with contextlib.suppress(RearviewError):
                out[value["oid"]] = page.media.content(value["oid"])
    return out


def _document(data: dict[str, Any]) -> str:
    """Return the text of the HTML file with the page and `data`."""
    files = static_files()
    modules = {
        path: _mapped(path, file.plain.decode())
        for path, file in files.items()
        if path.endswith(".js") and path != "theme.js"
    }
    icon = f"data:image/svg+xml;base64,{base64.b64encode(files['icon.svg'].plain).decode()}"
    addresses = {
        f"rearview/{path}": f"data:text/javascript;base64,{base64.b64encode(text.encode()).decode()}"
        for path, text in modules.items()
    }
    imports = json.dumps({"imports": addresses})
    theme = files["theme.js"].plain.decode()
    begin = (
        'import { open } from "rearview/snapshot.js";\n'
        'window.rearviewSnapshot = open(JSON.parse(document.getElementById("data").textContent));\n'
        'await import("rearview/app.js");\n'
    )
    style = files["vendor/uplot.css"].plain.decode() + files["app.css"].plain.decode()
    scripts = " ".join(map(_hash, (imports, theme, begin)))
    policy = (
        f"default-src 'none'; script-src {scripts} data:; style-src {_hash(style)}; "
        "img-src data: blob:; media-src data:; base-uri 'none'; form-action 'none'"
    )
    # escape each `<`, so that no text in the JSON can end the `script` element
    text = msgspec.json.encode({**data, "icon": icon}).decode().replace("<", "\\u003c")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>Rearview</title>\n'
        f'<link rel="icon" href="{icon}">\n<style>{style}</style>\n<script>{theme}</script>\n'
        f'<script type="importmap">{imports}</script>\n</head>\n<body><div id="app"></div>\n'
        f'<script type="application/json" id="data">{text}</script>\n'
        f'<script type="module">{begin}</script>\n</body>\n</html>\n'
    )


def _mapped(path: str, text: str) -> str:
    """Return `text`, the JavaScript of the module `path`, with imports by the names in the import map."""

    def named(match: re.Match[str]) -> str:
        return f"{match[1]}{match[2]}{_name(path, match[3])}{match[2]}"

    return _IMPORT.sub(named, text)


def _name(path: str, imported: str) -> str:
    """Return the name in the import map of the module that the module `path` imports as `./IMPORTED`.

    >>> _name("vendor/signals.js", "preact.js"), _name("app.js", "vendor/preact.js")
    ('rearview/vendor/preact.js', 'rearview/vendor/preact.js')
    """
    folder = path.rpartition("/")[0]
    return f"rearview/{folder}/{imported}" if folder else f"rearview/{imported}"


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"
