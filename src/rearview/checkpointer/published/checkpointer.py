"""`checkpointer` as a top-level package, for programs whose imports are not to be changed.

It has a separate folder, because another package of this name may be installed.
"""

from rearview.checkpointer import Checkpointer, __path__

__all__ = ["Checkpointer", "__path__"]
