"""Replay a segment inside the user's process: skip, restore, run and prove; isolate probes; share the first code."""
