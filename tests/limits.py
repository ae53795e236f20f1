"""The one limit of time in the tests. No test may need it: it only ends a test that hangs."""

HUNG = 1200.0
"""Seconds after which whatever a test waits for is taken never to come, on the slowest machine."""
