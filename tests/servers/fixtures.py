"""pytest fixtures for the servers; a test that cannot have its server says so at the end."""

import os

import pytest

from servers.daemons import SERVERS, UnavailableError

_MISSED = {}


@pytest.fixture(scope="session")
def server():
    """Return a function that starts the named server once and returns it."""
    started = {}

    def start(name):
        if name in _MISSED:
            pytest.skip(f"NOT TESTED on a real {name} server: {_MISSED[name]}")
        if name not in started:
            context = SERVERS[name]()
            try:
                started[name] = (context, context.__enter__())
            except UnavailableError as exc:
                if os.environ.get("REARVIEW_REQUIRE_SERVERS"):
                    raise
                _MISSED[name] = str(exc)
                pytest.skip(f"NOT TESTED on a real {name} server: {exc}")
        return started[name][1]

    yield start
    for context, _ in started.values():
        context.__exit__(None, None, None)


def pytest_terminal_summary(terminalreporter):
    for name, reason in _MISSED.items():
        terminalreporter.write_line(f"NOT TESTED on a real {name} server: {reason}", red=True)
