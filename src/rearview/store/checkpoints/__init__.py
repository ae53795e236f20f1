"""Checkpoints on disk: objects that are named by the hash of their content, manifests, compression."""
