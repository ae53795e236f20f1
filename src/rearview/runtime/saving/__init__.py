"""Saves of the Checkpointer: written, kept, mirrored, found again."""
