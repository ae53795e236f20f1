"""Remotes, the other places where bytes are stored: a protocol of five methods, and its implementations."""
