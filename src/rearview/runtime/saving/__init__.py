"""A captured state on its way to disk."""
