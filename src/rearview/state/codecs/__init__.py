"""Codecs: each finds references, captures, and restores objects of one kind, such as tensors, in place."""
