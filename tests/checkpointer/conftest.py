from servers.fixtures import pytest_sessionfinish, pytest_terminal_summary, server

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "server"]
