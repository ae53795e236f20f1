"""The command `ui`, which shows the project in a browser."""

from __future__ import annotations

from pathlib import Path

import click

from rearview.cli.options import open_history
from rearview.cli.terminal import output
from rearview.cli.terminal.progress import waiting

PORT = 8517


@click.command()
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help=f"Port to listen on; 0 for one that is free. Default: {PORT}, or a free one if it is taken.",
)
@click.option(
    "--host",
    default="127.0.0.1",
    metavar="ADDRESS",
    help="Address to listen on. Anything but loopback can be reached by others who have the token.",
)
@click.option("--allow-replay", is_flag=True, help="Let the page fill cells, tag and note runs.")
@click.option("--no-browser", is_flag=True, help="Only print the link.")
@click.option(
    "--token", metavar="TEXT", help="The token of the link, 16 characters or more; else a new one."
)
@click.option(
    "--static",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the page with its data to DIR/index.html instead, to send to others.",
)
def ui(
    port: int | None,
    host: str,
    allow_replay: bool,
    no_browser: bool,
    token: str | None,
    folder: Path | None,
) -> None:
    """Show the project in a browser.

    It starts at once, needs no account and no network, and shows runs while they train. Only this
    machine reaches it, and only with the token that the link has. It changes nothing unless it is
    started with --allow-replay. Ctrl-C ends it, and the backfills that it started.
    """
    from rearview.web.server import Page, check_libraries, listening_socket, serve

    if token is not None and len(token) < 16:
        raise click.BadParameter("has fewer than 16 characters.", param_hint="--token")
    check_libraries()
    history = open_history()
    if folder is not None:
        from rearview.web.snapshot import write_snapshot

        with waiting("writing the page"):
            file = write_snapshot(history, folder)
        output.out(f"wrote {file} ({file.stat().st_size / 1e6:.1f} MB)")
        return
    try:
        sock = listening_socket(host, PORT if port is None else port)
    except Exception:
        if port is not None:
            raise
        sock = listening_socket(host, 0)
    page = Page(history, writable=allow_replay, host=host, **({"token": token} if token else {}))
    shown = f"[{host}]" if ":" in host else host
    link = f"http://{shown}:{sock.getsockname()[1]}/#token={page.token}"
    output.out(link)
    output.note(
        "Ctrl-C ends it."
        if allow_replay
        else "Ctrl-C ends it. It is read-only: see --allow-replay."
    )
    if not no_browser:
        import webbrowser

        webbrowser.open(link)
    serve(page, sock)
