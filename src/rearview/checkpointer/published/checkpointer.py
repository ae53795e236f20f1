"""The top-level module `checkpointer`, for programs that import the published package and are not to be changed.

This module has a folder of its own, because another package of this name may be installed.
"""

from rearview.checkpointer import Checkpointer, __path__

__all__ = ["Checkpointer", "__path__"]
