"""Measure the page in a real browser: first paint, questions to the table, charts, brush, idle traffic.

python benchmarks/ui/store.py /tmp/big          # once; takes minutes
python benchmarks/ui/run.py /tmp/big

Times are taken in the page: from the moment something is asked for until the new rows or the new curve are
there. The server runs in a process of its own on the same machine.
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
CHANGE = """
const done = arguments[arguments.length - 1], hash = arguments[0];
const sign = () => { const g = document.querySelector('.grid');
  return g && document.querySelector('.grid .row .runlink, .grid .row .groupname') ?
    g.getAttribute('aria-label') + g.getAttribute('aria-rowcount') + document.querySelector('.grid-body').innerText.slice(0, 400) : ''; };
const before = sign(), begun = performance.now();
location.hash = hash;
const look = () => { const now = sign();
  if (now && now !== before) done(performance.now() - begun);
  else if (performance.now() - begun > 20000) done(null); else requestAnimationFrame(look); };
requestAnimationFrame(look);
"""
DRAWN = """
const done = arguments[arguments.length - 1], [hash, name] = arguments;
const begun = performance.now();
for (const c of document.querySelectorAll('.chart')) delete c.dataset.drawn;
location.hash = hash;
const look = () => { const c = document.querySelector(`.chart[data-name="${name}"][data-drawn]`);
  if (c) done([performance.now() - begun, Number(c.dataset.drawn), Number(c.dataset.points)]);
  else if (performance.now() - begun > 60000) done(null); else requestAnimationFrame(look); };
requestAnimationFrame(look);
"""


def opened():
    """Start a browser with an empty profile."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or "chromium"
    folder = tempfile.mkdtemp(prefix="rearview-bench-")
    for flag in (*FLAGS, f"--user-data-dir={folder}", "--window-size=1440,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))


def measure(link: str, token: str) -> dict:
    """Return what was measured on the page at `link`."""
    browser = opened()
    browser.set_script_timeout(90)
    out: dict = {}
    try:
        paints = []
        for _ in range(5):
            browser.get("about:blank")
            browser.get(f"{link}#token={token}")
            shown = browser.execute_async_script(
                "const done = arguments[0]; const look = () => document.querySelector('.grid .row .runlink')"
                " ? done(performance.now()) : requestAnimationFrame(look); look()"
            )
            first = browser.execute_script(
                "return performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
            )
            paints.append((first, shown))
        out["first paint"] = statistics.median(p[0] for p in paints)
        out["first rows"] = statistics.median(p[1] for p in paints)
        questions = {
            "filter": [f"#/runs?where=lr+%3C+{r}+and+acc+%3E+0.{k}" for k, r in enumerate(("0.001", "0.01", "0.1", "0.0003") * 5)],
            "sort": [f"#/runs?sort={'-' * (k % 2)}last%253Ametric_{k:02d}" for k in range(18)],
            "group": [f"#/runs?group=arg%253A{a}%2Carg%253A{b}" for a, b in (("lr", "width"), ("lr", "seed"), ("width", "optimizer"), ("optimizer", "seed"), ("lr", "optimizer")) * 4],
            "search": [f"#/runs?search=seed%3D{k % 5}+lr%3D0.00{k % 3}" for k in range(1, 16)],
        }  # fmt: skip
        for kind, hashes in questions.items():
            browser.execute_async_script(CHANGE, "#/runs")
            took = []
            for hash_ in hashes:
                found = browser.execute_async_script(CHANGE, hash_)
                if found is not None:
                    took.append(found)
            took.sort()
            out[kind] = {
                "median": statistics.median(took),
                "p95": took[max(0, int(0.95 * len(took)) - 1)],
                "n": len(took),
            }
        charts = []
        for name in ("loss", "acc", "metric_03", "metric_07"):
            hash_ = f"#/charts?most=200&names={name}&sort=fact%253Astarted"
            charts.append(browser.execute_async_script(DRAWN, hash_, name))
            again = browser.execute_async_script(DRAWN, hash_ + "&logy=1", name)
            charts.append(again)
        out["200 runs"] = {"first": charts[::2], "again": charts[1::2]}
        browser.execute_async_script(CHANGE, "#/runs?where=%22signal%22+is+not+null")
        run = browser.execute_script(
            "return document.querySelector('.grid .row .runlink')?.getAttribute('href')"
        ).split("/")[-1]
        hash_ = f"#/charts?runs={run}&names=signal"
        out["10^7 points"] = {"first": browser.execute_async_script(DRAWN, hash_, "signal")}
        brushes = []
        for k in range(20):
            lo = 400_000 * k + 1000
            hi = lo + (4_000_000 if k % 2 else 30_000)
            zoomed = f"{hash_}&zoom={lo}%3A{hi}"
            brushes.append(browser.execute_async_script(DRAWN, zoomed, "signal")[1])
        out["10^7 points"]["brush"] = brushes
        browser.get(f"{link}#/runs")
        time.sleep(3)
        browser.get_log("performance")
        time.sleep(30)
        received = 0
        for entry in browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.dataReceived":
                received += message["params"]["dataLength"]
        out["idle bytes per second"] = received / 30
    finally:
        browser.quit()
    return out


if __name__ == "__main__":
    if sys.argv[1].startswith("http"):
        address, _, secret = sys.argv[1].partition("#token=")
        print(json.dumps(measure(address, secret), indent=1))
        raise SystemExit
    command = [sys.executable, "-m", "rearview", "ui", "--no-browser", "--port", "0"]
    server = subprocess.Popen(
        command, cwd=Path(sys.argv[1]), stdout=subprocess.PIPE, text=True, stdin=subprocess.DEVNULL
    )
    assert server.stdout is not None
    address, _, secret = server.stdout.readline().strip().partition("#token=")
    print(platform.platform(), address)
    try:
        print(json.dumps(measure(address, secret), indent=1))
    finally:
        server.terminate()
        server.wait()
