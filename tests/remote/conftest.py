from servers.fixtures import pytest_terminal_summary, server

__all__ = ["pytest_terminal_summary", "server"]
