"""A plan in, records out."""
