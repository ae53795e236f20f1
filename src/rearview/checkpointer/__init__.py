"""The names and import paths of the published `checkpointer` package, for programs written for it.

`from checkpointer.lightning_callback import …` becomes `from rearview.checkpointer.lightning_callback
import …`; under `rearview run`, or with the folder `published` on the path, it stays as it is.
"""

from rearview import Checkpointer

__all__ = ["Checkpointer"]
