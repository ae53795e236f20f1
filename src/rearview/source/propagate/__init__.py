"""One statement in every past version."""
