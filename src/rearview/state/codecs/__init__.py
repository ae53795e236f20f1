"""Codecs: how objects of each kind are walked, captured and restored in place."""
