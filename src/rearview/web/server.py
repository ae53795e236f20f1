"""The server of the page: its routes, its static files, and `serve`, which starts it."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import re
import secrets
import socket
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from importlib import resources
from typing import TYPE_CHECKING, Any

import msgspec

import rearview
from rearview._history import History
from rearview.errors import RearviewError, UsageError
from rearview.store.checkpoints.objects import Objects
from rearview.web import rows, screen_data
from rearview.web.guard import App, Guard
from rearview.web.live import Live
from rearview.web.logged_media import Media
from rearview.web.replays import BackfillRequest, PageBackfills, Prices
from rearview.web.run_index import Index
from rearview.web.screen_data import execution_tree
from rearview.web.series import Chart, Series

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

TYPES = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".txt": "text/plain; charset=utf-8",
}
_OID = re.compile(r"[0-9a-f]{64}")
MOST_EXPORTED = 100_000
"""Maximum number of rows of an exported CSV file."""


class Label(msgspec.Struct, forbid_unknown_fields=True):
    """A request to give runs a tag, note or name, or to remove it."""

    runs: list[str]
    text: str | None = None
    remove: bool = False


class Move(msgspec.Struct, forbid_unknown_fields=True):
    """A request to store the line that the user chose for log statements in a run's version; see `History.correct`.

    If `line` is 0, the stored choice is removed.
    """

    run: str
    names: list[str]
    path: str = ""
    line: int = 0
    after: bool = False


class Stop(msgspec.Struct, forbid_unknown_fields=True):
    """A request to stop a backfill that the page started."""

    job: str


class Workers(msgspec.Struct, forbid_unknown_fields=True):
    """A request to change the number of workers of a running backfill."""

    backfill: str
    workers: int


@dataclass
class Page:
    """All that the routes of one server share: the index of runs, charts, prices and backfills."""

    history: History
    writable: bool = False
    token: str = field(default_factory=lambda: secrets.token_urlsafe(24))
    host: str = "127.0.0.1"

    def __post_init__(self) -> None:
        self.index = Index(self.history.project)
        self.series = Series(self.index)
        self.media = Media(self.index, Objects(self.history.project))
        self.prices = Prices(History(self.history.project), self.index)
        self.live = Live(self.index)
        self.lock = threading.Lock()
        """Lock to hold while `history` is used; `prices` uses another `History` object."""
        self.jobs = PageBackfills(str(self.history.project.root), self._on_event)
        self._columns: tuple[int, rows.Columns] = (-1, rows.Columns())

    def _on_event(self, event: dict[str, Any]) -> None:
        self.live.tell(event)
        if event["event"].get("event") in {"rows", "proved", "failed", "filled", "ended"}:
            run = event["event"].get("run")
            self.live.look_now([run] if run else ())

    def columns(self) -> rows.Columns:
        """Return the columns of the table of runs, read again if the index has changed since the last call."""
        revision, columns = self._columns
        if revision != self.index.revision:
            revision = self.index.revision
            columns = rows.Columns.of(self.index)
            self._columns = (revision, columns)
        return columns

    def state(self) -> dict[str, Any]:
        """Return facts of the project, its runs and columns, which the page loads first."""
        counts = dict(
            self.index.ask("SELECT status, count(*) FROM page.runs GROUP BY status").fetchall()
        )
        return {
            "project": self.history.project.root.name,
            "root": str(self.history.project.root),
            "version": rearview.__version__,
            "writable": self.writable,
            "trusted": self.history.trusted,
            "revision": self.index.revision,
            "pending": self.index.pending or int(not self.index.revision),
            "runs": len(self.index.entries),
            "statuses": counts,
            "problems": self.index.problems[:20],
            **self.known_columns(),
        }

    def known_columns(self) -> dict[str, Any]:
        """Return the arguments and logged names of all runs, and the names that a backfill can fill."""
        columns = self.columns()
        names = dict(columns.names)
        fillable_names = self.prices.fillable_names()
        for name, loops in fillable_names:
            names.setdefault(
                name,
                {
                    "kind": "float",
                    "path": "/".join(loops),
                    "runs": 0,
                    "unproved": False,
                    "asked": True,
                },
            )
        return {
            "args": {
                name: {"numeric": numeric, "distinct": columns.distinct[name]}
                for name, numeric in columns.args.items()
            },
            "names": names,
            "virtual": [name for name, _ in fillable_names],
        }

    def table(self, query: rows.Query) -> dict[str, Any]:
        """Return the rows of the table of runs that `query` requests.

        For columns that a backfill can fill, the result has the number of values in each run too.
        """
        answer = rows.Rows(self.index, self.columns(), query).answer()
        fillable_names = {name for name, _ in self.prices.fillable_names()}
        names = {key.partition(":")[2] for key in query.columns if not key.startswith("fact:")}
        if "rows" in answer:
            run_ids = [row[0] for row in answer["rows"]]
            answer["filled"] = rows.value_counts(
                self.index, run_ids, sorted(names & fillable_names)
            )
        return {**answer, "revision": self.index.revision}

    def app(self) -> App:
        """Return the ASGI application of the server: a `Guard` around the routes."""
        return Guard(_routes(self), self.token, self.host, writable=self.writable)

    def close(self) -> None:
        """Stop the threads and backfills of the page, and release its memory."""
        self.live.close()
        self.jobs.close()
        self.live.join()
        self.index.close()


Handler = Callable[[Page, "Request"], Any]


def _query(request: Request, kind: type[Any]) -> Any:
    return rows.request(request.query_params.get("q", "{}"), kind)


def _names(request: Request) -> list[str]:
    return [name for name in request.query_params.getlist("name") if name][:50]


def _run(page: Page, request: Request) -> str:
    return screen_data.check_run(page.index, request.path_params["run"])


def _table(page: Page, request: Request) -> Any:
    return page.table(_query(request, rows.Query))


def _scatter(page: Page, request: Request) -> Any:
    return rows.Rows(page.index, page.columns(), _query(request, rows.Query)).points()


def _chosen(page: Page, request: Request) -> Any:
    query = _query(request, rows.Query)
    limit = max(1, min(query.limit, 500))
    return {"runs": rows.Rows(page.index, page.columns(), query).matching_ids(limit)}


def _points(page: Page, request: Request) -> Any:
    return rows.point_rows(page.index, _query(request, rows.Points), page.prices.fillable_names())


def _complete(page: Page, request: Request) -> Any:
    text = request.query_params.get("text", "")[-500:]
    return rows.completions(page.columns(), text)


def _price(page: Page, request: Request) -> Any:
    runs = request.query_params.get("runs", "").split(",")
    return page.prices.of(request.query_params.get("name", ""), runs)


def _plan(page: Page, request: Request) -> Any:
    return page.prices.plan(_query(request, BackfillRequest))


def _detail(page: Page, request: Request) -> Any:
    run = _run(page, request)
    with page.lock:
        return screen_data.run_details(page.history, page.index, run)


def _printed(page: Page, request: Request) -> Any:
    run, search = _run(page, request), request.query_params.get("search", "")[:200]
    return screen_data.printed_lines(page.history, run, search)


def _versions(page: Page, request: Request) -> Any:  # noqa: ARG001 - handlers have the same parameters
    return screen_data.versions(page.history, page.index, page.prices.fillable_names())


def _diff(page: Page, request: Request) -> Any:
    pair = []
    for name in ("a", "b"):
        which = request.query_params.get(name, "worktree")
        pair.append(which if which == "worktree" else screen_data.check_run(page.index, which))
    with page.lock:
        return screen_data.compare_sources(page.history, *pair)


def _tree(page: Page, request: Request) -> Any:
    runs = [run for run in request.query_params.get("runs", "").split(",") if run]
    return execution_tree(page.index, runs)


def _propagate(page: Page, request: Request) -> Any:
    with page.lock:
        return screen_data.propagated_statements(page.history, _names(request))


def _under_way(page: Page, request: Request) -> Any:  # noqa: ARG001
    running = screen_data.running_work(page.history, page.index)
    return {**running, "jobs": [job.status() for job in page.jobs.all()]}


def _job(page: Page, request: Request) -> Any:
    return page.jobs.get(request.path_params["job"]).status(whole=True)


def _media(page: Page, request: Request) -> Any:
    runs = request.query_params.get("runs", "").split(",")
    return page.media.listed(request.query_params.get("name", ""), runs)


def _heat(page: Page, request: Request) -> Any:
    run = screen_data.check_run(page.index, request.query_params.get("run", ""))
    return page.media.heat(request.query_params.get("name", ""), run)


def _state(page: Page, request: Request) -> Any:  # noqa: ARG001
    return page.state()


def _chart(page: Page, request: Request) -> bytes:
    return page.series.chart(_query(request, Chart))


def _oid(request: Request) -> str:
    oid: str = request.path_params["oid"]
    if not _OID.fullmatch(oid):
        raise UsageError("That is no stored value.", slug="page-question")
    return oid


def _image(page: Page, request: Request) -> bytes:
    return page.media.image(_oid(request))


def _sound(page: Page, request: Request) -> bytes:
    return page.media.sound(_oid(request))


def _content(page: Page, request: Request) -> Any:
    return page.media.content(_oid(request))


def _export(page: Page, request: Request) -> bytes:
    query = _query(request, rows.Query)
    return b"".join(rows.csv_lines(page.index, page.columns(), query, MOST_EXPORTED))


GET: dict[str, Handler] = {
    "/api/state": _state,
    "/api/table": _table,
    "/api/scatter": _scatter,
    "/api/chosen": _chosen,
    "/api/points": _points,
    "/api/complete": _complete,
    "/api/price": _price,
    "/api/plan": _plan,
    "/api/run/{run}": _detail,
    "/api/printed/{run}": _printed,
    "/api/versions": _versions,
    "/api/diff": _diff,
    "/api/tree": _tree,
    "/api/propagate": _propagate,
    "/api/underway": _under_way,
    "/api/jobs/{job}": _job,
    "/api/media": _media,
    "/api/heat": _heat,
    "/api/content/{oid}": _content,
}
"""Address -> function that answers GET requests to it; these functions only read."""


def _fill(page: Page, body: bytes) -> Any:
    request = rows.request(body, BackfillRequest)
    if not request.names or any(
        "\x00" in text for text in (*request.names, *request.runs, request.where, request.at)
    ):
        raise UsageError("Name at least one column to fill.", slug="page-question")
    request.runs = [screen_data.check_run(page.index, run) for run in request.runs]
    page.history.check_trust("A backfill")
    plan = page.prices.plan(request)
    return page.jobs.start(request, plan).status(whole=True)


def _stop(page: Page, body: bytes) -> Any:
    return page.jobs.stop(rows.request(body, Stop).job).status()


def _tag(page: Page, body: bytes) -> Any:
    label = rows.request(body, Label)
    for run in label.runs:
        run_id = screen_data.check_run(page.index, run)
        change = page.history.untag if label.remove else page.history.tag
        change(run_id, label.text or "")
    page.live.look_now(label.runs)
    return {"runs": label.runs}


def _note(page: Page, body: bytes) -> Any:
    label = rows.request(body, Label)
    for run in label.runs:
        page.history.note(
            screen_data.check_run(page.index, run), None if label.remove else label.text
        )
    page.live.look_now(label.runs)
    return {"runs": label.runs}


def _name(page: Page, body: bytes) -> Any:
    label = rows.request(body, Label)
    run = screen_data.check_run(page.index, label.runs[0] if label.runs else "")
    page.history.name(run, None if label.remove else label.text)
    page.live.look_now(label.runs)
    return {"runs": label.runs}


def _move(page: Page, body: bytes) -> Any:
    move = rows.request(body, Move)
    run = screen_data.check_run(page.index, move.run)
    with page.lock:
        if move.line:
            page.history.correct(run, move.path, move.line, move.names, after=move.after)
        else:
            page.history.undo(run, move.names)
        return screen_data.propagated_statements(page.history, move.names)


def _workers(page: Page, body: bytes) -> Any:
    change = rows.request(body, Workers)
    if not 1 <= change.workers <= 256:
        raise UsageError("A backfill has 1 to 256 workers.", slug="page-question")
    page.history.set_workers(change.workers, of=change.backfill)
    return {}


POST: dict[str, Callable[[Page, bytes], Any]] = {
    "/api/backfill": _fill,
    "/api/stop": _stop,
    "/api/tag": _tag,
    "/api/note": _note,
    "/api/name": _name,
    "/api/move": _move,
    "/api/workers": _workers,
}
"""Address -> function that answers POST requests to it, which change something.

The guard allows POST requests only with `--allow-replay`.
"""


def _routes(page: Page) -> Starlette:  # noqa: C901 - one route after another
    """Return the application with all routes of the server, not protected by a `Guard`."""
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    static = static_files()

    def answer(value: Any) -> Response:
        return Response(msgspec.json.encode(value), media_type="application/json")

    def refused(exc: RearviewError) -> Response:
        body = msgspec.json.encode({"error": str(exc), "slug": exc.slug})
        return Response(body, 400, media_type="application/json")

    async def attempt(work: Callable[..., Any], *args: Any) -> Response:
        """Return a response with the result of `work(*args)` as JSON, or with the message of a Rearview error."""
        try:
            return answer(await run_in_threadpool(work, *args))
        except RearviewError as exc:
            return refused(exc)

    def asks(handler: Handler) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await attempt(handler, page, request)

        return endpoint

    def changes(handler: Callable[[Page, bytes], Any]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            return await attempt(handler, page, await request.body())

        return endpoint

    def data(kind: str, handler: Callable[[Page, Request], bytes]) -> Callable[[Request], Any]:
        async def endpoint(request: Request) -> Response:
            try:
                content = await run_in_threadpool(handler, page, request)
            except RearviewError as exc:
                return refused(exc)
            return Response(content, media_type=kind)

        return endpoint

    async def events(request: Request) -> Response:  # noqa: ARG001
        if page.live.full:
            body = {"error": "Too many pages listen to this server. Close some of them."}
            return Response(msgspec.json.encode(body), 503, media_type="application/json")
        return StreamingResponse(page.live.listen(), media_type="text/event-stream")

    async def file(request: Request) -> Response:
        path = request.path_params.get("path", "index.html")
        # `static` has only files that were loaded at the start: a request never opens a path on the disk
        asset = static.get(path)
        if asset is None:
            return Response("There is nothing here.", 404, media_type="text/plain")
        headers = {"etag": asset.tag, "cache-control": "no-cache", "vary": "accept-encoding"}
        if request.headers.get("if-none-match") == asset.tag:
            return Response(status_code=304, headers=headers)
        body = asset.plain
        if "gzip" in request.headers.get("accept-encoding", ""):
            body, headers["content-encoding"] = asset.gzipped, "gzip"
        return Response(body, media_type=asset.kind, headers=headers)

    @contextlib.asynccontextmanager
    async def lifespan(_app: Starlette) -> AsyncIterator[None]:
        page.live.start()
        yield
        page.live.close()

    routes = [Route("/", file), Route("/static/{path:path}", file)]
    routes += [Route(path, asks(handler)) for path, handler in GET.items()]
    routes += [Route(path, changes(change), methods=["POST"]) for path, change in POST.items()]
    routes += [
        Route("/api/chart", data("application/octet-stream", _chart)),
        Route("/api/image/{oid}", data("image/png", _image)),
        Route("/api/sound/{oid}", data("audio/wav", _sound)),
        Route("/api/export.csv", data("text/csv; charset=utf-8", _export)),
        Route("/api/events", events),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


@dataclass(frozen=True, slots=True)
class StaticFile:
    """One static file of the page: its bytes, plain and gzipped, its media type and its ETag."""

    plain: bytes
    gzipped: bytes
    kind: str
    tag: str


def static_files() -> dict[str, StaticFile]:
    """Return path below `static` -> file, for all static files of the page."""
    out: dict[str, StaticFile] = {}

    def walk(folder: Any, prefix: str) -> None:
        for entry in folder.iterdir():
            if entry.is_dir():
                walk(entry, f"{prefix}{entry.name}/")
                continue
            kind = TYPES.get(f".{entry.name.rpartition('.')[2]}")
            if kind is not None:
                data = entry.read_bytes()
                tag = f'"{hashlib.sha256(data).hexdigest()[:20]}"'
                packed = gzip.compress(data, 9, mtime=0)
                out[f"{prefix}{entry.name}"] = StaticFile(data, packed, kind, tag)

    walk(resources.files("rearview.web") / "static", "")
    return out


def listening_socket(host: str, port: int) -> socket.socket:
    """Return a socket that listens on `host` and `port`; if `port` is 0, the system chooses a free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(128)  # from now on, a browser can connect, and waits until the server answers
    except OSError as exc:
        sock.close()
        raise UsageError(
            f"Port {port} of {host} cannot be used: {exc.strerror or exc}. Choose another with "
            "`--port`, or 0 for one that is free.",
            slug="page-port",
        ) from exc
    return sock


def check_libraries() -> None:
    """Raise if a library that the page's server needs is not installed."""
    try:
        import numpy as np  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as exc:
        raise UsageError(
            f"The page needs {exc.name}, which is not installed. Install it with "
            "`pip install 'rearview[ui]'`.",
            slug="missing-library",
        ) from exc


def serve(page: Page, sock: socket.socket) -> None:
    """Answer requests on `sock` until the process is interrupted; then close `page`."""
    import uvicorn

    config = uvicorn.Config(
        page.app(),
        log_level="critical",
        access_log=False,
        server_header=False,
        ws="none",
        lifespan="on",
        timeout_graceful_shutdown=2,
        limit_concurrency=200,
    )
    try:
        uvicorn.Server(config).run(sockets=[sock])
    finally:
        page.close()
