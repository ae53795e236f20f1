"""Replay a segment inside the user's process: skip, restore, run and prove; guard probes; share set-ups."""
