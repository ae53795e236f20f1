"""Clusters in tests leave this process as they found it."""

import os
import sys
from contextlib import contextmanager


@contextmanager
def traceless():
    """Take away what Ray puts into this process, a debugger of its own above all.

    How it talks to its clusters stays: it is read once, and the next cluster here must agree.
    """
    environment, hook = dict(os.environ), sys.breakpointhook
    try:
        yield
    finally:
        kept = {key: value for key, value in os.environ.items() if key.startswith("RAY_")}
        kept.pop("RAY_ADDRESS", None)
        os.environ.clear()
        os.environ.update(kept | environment)
        sys.breakpointhook = hook
