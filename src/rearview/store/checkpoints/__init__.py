"""Checkpoints at rest: objects by content, manifests, compression, garbage collection."""
