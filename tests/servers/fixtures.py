"""pytest fixtures for the servers; a test that cannot have its server says so at the end.

Several conftest files import these names; each server is still started once and named once.
"""

import os

import pytest

from servers.daemons import SERVERS, UnavailableError

_MISSED = {}
_STARTED = {}


@pytest.fixture
def server():
    """Return a function that starts the named server once and returns it."""

    def start(name):
        if name not in _STARTED and name not in _MISSED:
            context = SERVERS[name]()
            try:
                _STARTED[name] = (context, context.__enter__())
            except UnavailableError as exc:
                if os.environ.get("REARVIEW_REQUIRE_SERVERS"):
                    raise
                _MISSED[name] = str(exc)
        if name in _MISSED:
            pytest.skip(f"NOT TESTED on a real {name} server: {_MISSED[name]}")
        return _STARTED[name][1]

    return start


def pytest_sessionfinish():
    while _STARTED:
        _, (context, _found) = _STARTED.popitem()
        context.__exit__(None, None, None)


def pytest_terminal_summary(terminalreporter):
    while _MISSED:
        name, reason = _MISSED.popitem()
        terminalreporter.write_line(f"NOT TESTED on a real {name} server: {reason}", red=True)
