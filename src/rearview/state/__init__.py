"""Live objects: capture, restore, compare."""
