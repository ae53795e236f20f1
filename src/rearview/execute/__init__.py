"""Segments started somewhere: processes of this machine, or of a Ray cluster."""
