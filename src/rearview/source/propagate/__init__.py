"""Carry added statements into the source of every past version."""
