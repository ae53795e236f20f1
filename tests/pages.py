"""Parts of the tests of the page: a project, a server, a browser's settings."""

import contextlib
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from rearview._history import history
from rearview.web.server import Page, listening_socket

SCRIPT = """\
import argparse

import numpy as np
from PIL import Image

import rearview
from rearview import media

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--seed", type=int, default=0)
args = parser.parse_args()
rng = np.random.default_rng(args.seed)
w = rng.normal(size=20)
for epoch in range(5):
    for step in range(4):
        g = w + rng.normal(size=20) * 0.1
        w = w - args.lr * g
        rearview.log("train/loss", float((w**2).sum()))
    rearview.log("loss", float((w**2).mean()))
    rearview.log("weights", np.histogram(w, bins=8))
    print(f"epoch {epoch} loss {(w**2).mean():.4f}")
rearview.log("picture", Image.fromarray((np.outer(w, w) * 99 % 255).astype("uint8")))
rearview.log("remark", "<b>done</b>")
rearview.log("tone", media.Audio(np.sin(np.arange(800) / 9), rate=8000))
rearview.log("errors", media.DataTable(["class", "share"], [["<i>cat</i>", 0.25], ["dog", 0.75]]))
rearview.log("confusion", media.ConfusionMatrix([[7, 2], [1, 9]], ["cat", "dog"]))
"""
ANCHOR = '    rearview.log("loss"'
PROBED = SCRIPT.replace(ANCHOR, '    rearview.log("norm", float(np.linalg.norm(w)))\n' + ANCHOR)
HOSTILE = "<img src=x onerror=document.body.dataset.owned=1>"


def record(folder: Path, *words: str) -> None:
    """Run the project's script under `rearview run`."""
    command = [sys.executable, "-m", "rearview", "run", "-q", "train.py", *words]
    subprocess.run(command, cwd=folder, check=True, capture_output=True)


@dataclass
class Served:
    """A page that answers."""

    page: Page
    port: int

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.port}/#token={self.page.token}"


@contextlib.contextmanager
def serving(folder: Path, **options):
    """Serve the page of a project in a thread of this process."""
    import uvicorn

    page = Page(history(folder), **options)
    page.index.refresh()
    sock = listening_socket("127.0.0.1", 0)
    config = uvicorn.Config(
        page.app(), log_level="critical", ws="none", lifespan="on", timeout_graceful_shutdown=1
    )
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None
    begun = threading.Event()
    startup = server.startup

    async def started(sockets=None):
        await startup(sockets)
        begun.set()

    server.startup = started
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    assert begun.wait(30)
    try:
        yield Served(page, sock.getsockname()[1])
    finally:
        server.should_exit = True
        page.live.close()
        thread.join(15)
        page.close()
        sock.close()


FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def themed(browser, theme: str) -> None:
    """Let the browser prefer a theme."""
    features = [{"name": "prefers-color-scheme", "value": theme}]
    features.append({"name": "prefers-reduced-motion", "value": "reduce"})
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
