"""Capture, restore and compare the live objects of the user's program."""
