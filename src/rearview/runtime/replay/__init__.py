"""Replay a segment inside the user's process: skip iterations, restore checkpoints, run, prove; fork servers."""
