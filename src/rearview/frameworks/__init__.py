"""Callbacks and bridges for training frameworks; each imports only the public face."""
