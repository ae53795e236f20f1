"""Away: other places for bytes."""
