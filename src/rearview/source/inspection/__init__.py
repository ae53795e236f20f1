"""Inspect the text of a program before it runs: its loops, what trains, obstacles, places for probes. Pure."""
