"""Measure the page in a real browser: first paint, questions to the table, charts, brush, idle traffic.

python benchmarks/ui/store.py /tmp/big            # once; takes minutes
python benchmarks/ui/run.py /tmp/big              # less than five minutes
python benchmarks/ui/run.py --peer tensorboard    # both pages on the same 1,000 runs, in turn
python benchmarks/ui/run.py --peer mlflow         # the same beside MLflow's page

Times are taken in the page: from the moment something is asked for until the new rows or the new curve are
there. The server runs in a process of its own on the same machine. Each question is asked once, so that no
answer is one that was kept.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
LIMIT = 20_000
"""Milliseconds after which an answer counts as missing."""
ANSWERED = """
const done = arguments[arguments.length - 1], [hash, part] = arguments, begun = performance.now();
location.hash = hash;
const look = () => { const g = document.querySelector('.grid');
  if (g && g.getAttribute('aria-busy') === 'false' && (g.dataset.answered || '').includes(part)) done(performance.now() - begun);
  else if (performance.now() - begun > LIMIT) done(null); else requestAnimationFrame(look); };
requestAnimationFrame(look);
""".replace("LIMIT", str(LIMIT))
DRAWN = """
const done = arguments[arguments.length - 1], [hash, name] = arguments, begun = performance.now();
for (const c of document.querySelectorAll('.chart')) delete c.dataset.drawn;
location.hash = hash;
const look = () => { const c = document.querySelector(`.chart[data-name="${name}"][data-drawn]`);
  if (c) done([performance.now() - begun, Number(c.dataset.drawn), Number(c.dataset.points)]);
  else if (performance.now() - begun > LIMIT) done(null); else requestAnimationFrame(look); };
requestAnimationFrame(look);
""".replace("LIMIT", str(LIMIT))
WAIT = """
const done = arguments[arguments.length - 1], selector = arguments[0];
const look = () => document.querySelector(selector) ? done([performance.now(),
    performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null])
  : performance.now() > 120000 ? done(null) : requestAnimationFrame(look);
look();
"""


def opened() -> Any:
    """Start a browser with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    folder = tempfile.mkdtemp(prefix="rearview-bench-")
    for flag in (*FLAGS, f"--user-data-dir={folder}", "--window-size=1440,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    browser.set_script_timeout(150)
    browser.execute_cdp_cmd("Performance.enable", {"timeDomain": "threadTicks"})
    return browser


class Computing:
    """CPU time of the server and of the page's main thread: what a loaded machine does not distort."""

    def __init__(self, browser: Any, server: int | None) -> None:
        self._browser, self._server = browser, server

    def _now(self) -> tuple[float, float]:
        metrics = self._browser.execute_cdp_cmd("Performance.getMetrics", {})["metrics"]
        page = next(one["value"] for one in metrics if one["name"] == "TaskDuration")
        if self._server is None:
            return page, 0.0
        fields = Path(f"/proc/{self._server}/stat").read_text().rpartition(")")[2].split()
        return page, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    @contextlib.contextmanager
    def each(self, out: dict[str, Any], times: int) -> Iterator[None]:
        """Add the milliseconds of one of `times` questions to `out`."""
        before = self._now()
        yield
        page, server = (1000 * (b - a) / times for a, b in zip(before, self._now(), strict=True))
        out["cpu of the page"], out["cpu of the server"] = round(page, 1), round(server, 1)


def spread(times: Sequence[float | None]) -> dict[str, Any]:
    """Return median and 95th percentile; an answer that did not come is infinitely late."""
    found = sorted(t if t is not None else float("inf") for t in times)
    return {
        "median": round(statistics.median(found), 1),
        "p95": round(found[max(0, -(-95 * len(found) // 100) - 1)], 1),
        "n": len(found),
    }


def encoded(text: str) -> str:
    """Return a column key as the page's links have it: encoded twice."""
    return quote(quote(text, safe=""), safe="")


QUESTIONS = {
    "filter": [
        (f"where={quote(text)}", text)
        for text in (f"lr < {rate} and acc > 0.{k}" for k in range(1, 6) for rate in (0.0005, 0.002, 0.005, 0.05))
    ],
    "sort": [
        (f"sort={'-' if k % 2 else ''}{encoded(f'{form}:metric_{k:02d}')}", f"{form}:metric_{k:02d}")
        for form in ("last", "max")
        for k in range(10)
    ],
    "group": [
        (f"group={encoded(f'arg:{a}')}%2C{encoded(f'arg:{b}')}{more}", f'"group":["arg:{a}","arg:{b}"]')
        for more in ("", "&where=acc+%3C+0.9")
        for a in ("lr", "width", "optimizer", "seed")
        for b in ("lr", "width", "optimizer", "seed")
        if a != b
    ][:20],
    "search": [
        (f"search={quote(text)}", text)
        for text in (f"seed={k % 5} width={w}" for k in range(5) for w in (64, 128, 256, 512))
    ],
}  # fmt: skip
"""What is asked of the table, and a part of the question by which its answer is known."""


def paints(browser: Any, link: str, ready: str, times: int = 5) -> dict[str, Any]:
    """Return when the page first painted, and when `ready` was there, each time from nothing."""
    found = []
    for _ in range(times):
        browser.get("about:blank")
        browser.get(link)
        found.append(browser.execute_async_script(WAIT, ready))
    seen = [one for one in found if one is not None]
    return {
        "first paint": spread([one[1] for one in seen if one[1] is not None]),
        "content": spread([one and one[0] for one in found]),
    }


def measure(link: str, token: str, server: int | None = None) -> dict[str, Any]:
    """Return what was measured on the page at `link`, served by the process `server`."""
    browser = opened()
    computing = Computing(browser, server)
    out: dict[str, Any] = {}
    try:
        out.update(paints(browser, f"{link}#token={token}", ".grid .row .runlink"))
        for kind, questions in QUESTIONS.items():
            took, cpu = [], {}
            with computing.each(cpu, len(questions)):
                for number, (question, part) in enumerate(questions):
                    sign = json.dumps(part)[1:-1] if kind != "group" else part
                    hash_ = f"#/runs?{question}&turn={number}"
                    took.append(browser.execute_async_script(ANSWERED, hash_, sign))
            out[kind] = {**spread(took), **cpu}
        browser.execute_async_script(ANSWERED, "#/runs", '"where":""')
        cpu = {}
        with computing.each(cpu, 16):
            first, again = charts(browser)
        out["200 runs"] = {
            "read first": spread([one and one[0] for one in first]),
            "again": spread([one and one[0] for one in again]),
            **cpu,
        }
        out["10^7 points"] = brushed(browser)
        out["idle bytes per second"] = idle(browser, link)
    finally:
        browser.quit()
    return out


def charts(browser: Any) -> tuple[list[Any], list[Any]]:
    """Return the times of charts of 200 runs: names read for the first time, and drawn another way."""
    first, again = [], []
    for name in ("loss", "acc", *(f"metric_{k:02d}" for k in range(3, 9))):
        hash_ = f"#/charts?most=200&names={name}&sort={encoded('fact:started')}"
        first.append(browser.execute_async_script(DRAWN, hash_, name))
        again.append(browser.execute_async_script(DRAWN, hash_ + "&logy=1", name))
    return first, again


def brushed(browser: Any) -> dict[str, Any]:
    """Return the times of zooming into a curve of ten million points."""
    browser.execute_async_script(ANSWERED, "#/runs?where=%22signal%22+is+not+null", "signal")
    run = browser.execute_script(
        "return document.querySelector('.grid .row .runlink')?.getAttribute('href')"
    ).split("/")[-1]
    hash_ = f"#/charts?runs={run}&names=signal"
    first = browser.execute_async_script(DRAWN, hash_, "signal")
    took = []
    for k in range(20):
        lo = 400_000 * k + 1000
        hi = lo + (4_000_000 if k % 2 else 30_000)
        took.append(browser.execute_async_script(DRAWN, f"{hash_}&zoom={lo}%3A{hi}", "signal"))
    return {
        "first": first and first[0],
        "points": first and first[2],
        "brush": spread([one and one[0] for one in took]),
    }


def idle(browser: Any, link: str, seconds: float = 20.0) -> float:
    """Return the bytes that an untouched page receives in a second."""
    browser.get(f"{link}#/runs")
    browser.execute_async_script(WAIT, ".grid .row .runlink")
    time.sleep(3)
    browser.get_log("performance")
    time.sleep(seconds)
    received = 0
    for entry in browser.get_log("performance"):
        message = json.loads(entry["message"])["message"]
        if message["method"] == "Network.dataReceived":
            received += message["params"]["dataLength"]
    return received / seconds


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[str, str, int]]:
    """Serve the page of a project; yield address, token and process once it has read every run."""
    command = [sys.executable, "-m", "rearview", "ui", "--no-browser", "--port", "0"]
    server = subprocess.Popen(
        command, cwd=folder, stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert server.stdout is not None
    begun = time.monotonic()
    try:
        address, _, secret = server.stdout.readline().strip().partition("#token=")
        while _state(address, secret).get("pending", 1):
            time.sleep(0.1)
        print(f"server ready after {time.monotonic() - begun:.1f} s", flush=True)
        yield address, secret, server.pid
    finally:
        server.terminate()
        server.wait()


def _state(address: str, token: str) -> dict[str, Any]:
    from urllib.request import Request, urlopen

    request = Request(f"{address}api/state", headers={"Authorization": f"Bearer {token}"})
    with urlopen(request) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


def peers(name: str, runs: int = 1000) -> dict[str, Any]:
    """Return how long both pages take to open the same runs, in turn: those of `name`, and ours."""
    from store import make

    out: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="rearview-peer-") as scratch:
        project = Path(scratch, "project")
        project.mkdir()
        make(project, runs, wide=0, long=0)
        page = PEERS[name]
        with (
            page.serving(project, Path(scratch)) as address,
            serving(project) as (link, token, _),
        ):
            browser = opened()
            try:
                for turn in range(3):
                    ours = paints(browser, f"{link}#token={token}", ".grid .row .runlink", 1)
                    curve = browser.execute_async_script(
                        DRAWN, f"#/charts?most=200&names=loss&turn={turn}", "loss"
                    )
                    theirs = paints(browser, address + page.opened, page.ready, 1)
                    for who, visit in (("rearview", ours), (name, theirs)):
                        for what, times in visit.items():
                            out.setdefault(f"{who} {what}", []).append(times["median"])
                    out.setdefault("rearview curves of 200 runs", []).append(curve and curve[0])
                    if page.charts:
                        charts = paints(browser, address + page.charts, page.drawn, 1)
                        out.setdefault(f"{name} charts", []).append(charts["content"]["median"])
            finally:
                browser.quit()
    return out


@dataclass(frozen=True)
class Peer:
    """Another tracker's page: how to serve it, which addresses to open, and what shows that they are drawn."""

    serving: Callable[[Path, Path], contextlib.AbstractContextManager[str]]
    """Serves the runs of a project, and yields the address once all of them are there."""
    opened: str
    ready: str
    charts: str = ""
    drawn: str = ""


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@contextlib.contextmanager
def tensorboard(project: Path, scratch: Path) -> Iterator[str]:
    """Serve event files of the runs with TensorBoard."""
    events, port = scratch / "events", free_port()
    write_events(project, events)
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(events)]
    with background([*command, "--port", str(port), "--bind_all"]):
        address = f"http://127.0.0.1:{port}/"
        runs = len(list(events.iterdir()))
        while len(_asked(f"{address}data/runs") or ()) < runs:
            time.sleep(0.2)
        yield address


@contextlib.contextmanager
def mlflow(project: Path, scratch: Path) -> Iterator[str]:
    """Serve the runs with MLflow's tracking server on its SQLite store."""
    store, port = f"sqlite:///{scratch / 'mlflow.db'}", free_port()
    write_mlflow(project, store)
    command = [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", store]
    with background([*command, "--port", str(port), "--workers", "1"]):
        address = f"http://127.0.0.1:{port}/"
        while _asked(f"{address}version", text=True) is None:
            time.sleep(0.2)
        yield address


@contextlib.contextmanager
def background(command: Sequence[str]) -> Iterator[None]:
    """Run a server, silently, until the block ends."""
    server = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(server.pid, signal.SIGTERM)
        server.wait()


PEERS = {
    "tensorboard": Peer(tensorboard, "#timeseries", "line-chart canvas, line-chart svg path"),
    "mlflow": Peer(
        mlflow,
        "#/experiments/1/runs",
        "[row-id] [col-id], .ag-row",
        "#/experiments/1/runs?compareRunsMode=CHART",
        ".js-plotly-plot path.js-line, .js-plotly-plot .trace path",
    ),
}


def write_mlflow(project: Path, store: str) -> None:
    """Write parameters and values of every run through MLflow's own client."""
    import pyarrow.parquet as pq
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param

    client = MlflowClient(store)
    experiment = client.create_experiment("peer")
    assert experiment == "1"
    for folder in sorted((project / ".rearview" / "runs").iterdir()):
        run = client.create_run(experiment, run_name=folder.name).info.run_id
        table = pq.read_table(next(folder.glob("records-*.parquet")))
        columns = (table[name].to_pylist() for name in ("name", "indices", "time", "number"))
        metrics = [
            Metric(name, number, int(1000 * when), indices[0])
            for name, indices, when, number in zip(*columns, strict=True)
        ]
        arguments = json.loads((folder / "run.json").read_text()).get("args") or {}
        params = [Param(name, str(value)) for name, value in dict(arguments).items()]
        client.log_batch(run, metrics=metrics, params=params)
        client.set_terminated(run)


def write_events(project: Path, events: Path) -> None:
    """Write the values of every run as event files, with TensorBoard's own classes."""
    import pyarrow.parquet as pq
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    for folder in sorted((project / ".rearview" / "runs").iterdir()):
        writer = EventFileWriter(str(events / folder.name))
        table = pq.read_table(next(folder.glob("records-*.parquet")))
        columns = (table[name].to_pylist() for name in ("name", "indices", "time", "number"))
        for name, indices, when, number in zip(*columns, strict=True):
            value = Summary.Value(tag=name, simple_value=number)
            summary = Summary(value=[value])
            writer.add_event(Event(wall_time=when, step=indices[0], summary=summary))
        writer.close()


def _asked(address: str, *, text: bool = False) -> Any:
    """Return what a server answers, or None while it does not."""
    from urllib.error import URLError
    from urllib.request import urlopen

    try:
        with urlopen(address) as answer:
            return answer.read() if text else json.load(answer)
    except (URLError, OSError):
        return None


if __name__ == "__main__":
    print(platform.platform(), "load", os.getloadavg(), flush=True)
    if sys.argv[1] == "--peer":
        print(
            json.dumps(
                peers(sys.argv[2], int(sys.argv[3]) if len(sys.argv) > 3 else 1000), indent=1
            )
        )
    elif sys.argv[1].startswith("http"):
        place, _, secret_ = sys.argv[1].partition("#token=")
        print(json.dumps(measure(place, secret_), indent=1))
    else:
        with serving(Path(sys.argv[1])) as (place, secret_, process):
            print(json.dumps(measure(place, secret_, process), indent=1))
    print("load", os.getloadavg())
