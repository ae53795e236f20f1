"""Capture values of a recorded program that it does not log with Rearview; docs/capture.md has the rules."""
